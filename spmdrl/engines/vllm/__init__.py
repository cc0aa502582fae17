"""The vLLM engine, in this process.

engine.py   implements the Engine contract
start.py    starts vLLM inside a rank's process, among ranks that have no engine
options.py  environment and arguments of vLLM
read.py     the likeliest tokens at places of existing sequences
cpu.py      adaptations of vLLM's CPU build
copies.py   copies of the attention in one engine
lora.py     adapters inside vLLM
"""
