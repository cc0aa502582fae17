"""The vLLM engine, which runs inside the processes of the ranks.

engine.py   implements the Engine contract
start.py    starts vLLM inside a rank's process, even if other ranks have no engine
options.py  sets vLLM's environment variables and arguments
read.py     computes the most likely tokens at positions of existing sequences
cpu.py      adapts vLLM's CPU build
images.py   gives vLLM the images of requests
vision.py   adapts vLLM's classes of models that read images
copies.py   data-parallel attention within one engine
lora.py     LoRA adapters inside vLLM
"""
