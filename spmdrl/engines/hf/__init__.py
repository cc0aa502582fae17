"""The Hugging Face engine.

engine.py    implements the Engine contract
decode.py    runs forwards with a cache, or without it where the cache is wrong
start.py     builds each rank's part of the model without values
tp.py        tensor parallelism by the plan of transformers
quantize.py  8-bit weights
"""
