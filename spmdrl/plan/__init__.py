"""A job on paper: what its ranks would hold and send.

engine.py          an engine's bytes and the boxes that it reads, without an engine
engine_boxes.py    the part of each checkpoint tensor that a rank of an engine holds
engine_weights.py  an engine's parameters in bytes
engine_memory.py   an engine's workspace and KV cache in bytes
"""
