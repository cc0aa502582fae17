"""Runs token-mixing layers other than attention over packed sequences and trees of shared prompts.

layers.py  recurrent layers and short convolutions: the row layout of a packed batch, and the forward over rows
rotary.py  rotary embeddings whose frequencies depend on the sequence length
"""
