"""The Hugging Face engine.

engine.py  implements the Engine contract
decode.py  decodes with a KV cache, or without one if the model's cache does not work
start.py   builds each rank's shard of the model without weights: tensor parallelism, 8-bit layers
"""
