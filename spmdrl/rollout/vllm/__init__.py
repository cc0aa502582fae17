"""The vLLM engine, in this process.

engine.py   the Engine contract
options.py  environment and arguments of vLLM
cpu.py      adaptations of vLLM's CPU build
lora.py     adapters inside vLLM
world.py    vLLM among ranks that have no engine
"""
