"""Layers that mix tokens without attention, over packed sequences and trees of shared prompts.

active.py    the packing of the forward that runs
rows.py      how a pack is laid out for layers that carry a state from token to token
layers.py    which layers these are, and their forward over a pack
rotary.py    rotary embeddings whose frequencies depend on the length of a sequence
"""
