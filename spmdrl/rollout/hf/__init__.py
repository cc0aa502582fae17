"""The Hugging Face engine.

engine.py    the Engine contract: forward with a KV cache
tp.py        tensor parallelism by the plan of transformers
quantize.py  8-bit weights
"""
