"""The Hugging Face engine.

engine.py  implements the Engine contract
decode.py  runs forwards with a cache, or without it if the cache is wrong
start.py   builds each rank's part of the model without values: tensor parallelism, 8-bit weights
"""
