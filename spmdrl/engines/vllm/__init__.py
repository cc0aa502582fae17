"""The vLLM engine, which runs in the processes of the ranks.

engine.py   implements the Engine contract
start.py    starts vLLM inside a rank's process, also if other ranks have no engine
options.py  sets vLLM's environment variables and arguments
read.py     computes the likeliest tokens at positions of existing sequences
cpu.py      adapts vLLM's CPU build
copies.py   data parallelism of the attention within one engine
lora.py     LoRA adapters inside vLLM
"""
