"""Runs, over packed sequences and trees of shared prompts, layers that mix tokens by other means than attention.

layers.py  recurrent layers and short convolutions: the layout of a pack as rows, and a forward over these rows
rotary.py  rotary embeddings whose frequencies depend on the length of a sequence
"""
