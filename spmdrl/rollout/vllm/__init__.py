"""The vLLM engine, in this process.

engine.py   the Engine contract
start.py    vLLM inside a rank's process
options.py  environment and arguments of vLLM
classes.py  classes of transformers that vLLM changes, put back
read.py     the likeliest tokens of given sequences
cpu.py      adaptations of vLLM's CPU build
copies.py   copies of the attention in one engine
lora.py     adapters inside vLLM
world.py    vLLM among ranks that have no engine
"""
