"""Runs the layers other than attention that mix tokens, over packed sequences and trees of shared prompts.

layers.py  recurrent layers and short convolutions: the layout of a pack as rows, and a forward over these rows
rotary.py  rotary embeddings whose frequencies depend on the length of a sequence
"""
