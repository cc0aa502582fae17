"""The vLLM engine, in this process.

engine.py  the Engine contract
cpu.py     what the CPU build needs
lora.py    adapters inside vLLM
world.py   vLLM among ranks that have no engine
"""
