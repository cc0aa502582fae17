"""Attention over packed sequences.

packed.py    the attention function that HF models call, and the switch to transformers' own
packing.py   the division of a packed row into sequences, or into a tree of shared prompts
varlen.py    kernels for sequences laid end to end, and the choice of a kernel for a layer
ulysses.py   tokens divided over ranks; all-to-all trades heads for tokens
"""
