"""Layers that mix tokens without attention, over packed sequences and trees of shared prompts.

rows.py      the layout of a pack for layers that carry a state from token to token
layers.py    these layers, and their forward over a pack
rotary.py    rotary embeddings whose frequencies depend on the length of a sequence
"""
