"""The Hugging Face engine.

engine.py  implements the Engine contract
decode.py  decodes with a KV cache, or without one if the model's cache does not work; gives the model images
sample.py  draws one token per row: temperature, top_p, greedy
start.py   builds each rank's shard of the model without weights: tensor parallelism, 8-bit layers
"""
