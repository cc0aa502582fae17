"""Runs layers that mix tokens without attention over packed sequences and trees of shared prompts.

layers.py  recurrent layers and short convolutions: their forward over a pack, and its layout as rows
rotary.py  rotary embeddings whose frequencies depend on the length of a sequence
"""
