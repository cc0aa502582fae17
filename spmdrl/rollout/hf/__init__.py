"""The Hugging Face engine.

engine.py    the Engine contract
decode.py    forwards with a cache, or without it where it is wrong
start.py     builds the model without values, each rank its part
tp.py        tensor parallelism by the plan of transformers
quantize.py  8-bit weights
"""
