"""Attention over packed sequences.

packed.py    the attention function that HF models call
packing.py   how a packed row divides into sequences, or into a tree of shared prompts
varlen.py    kernels for sequences laid end to end, and which one a layer takes
own.py       transformers' own attention, for one sequence in a forward
ulysses.py   tokens divided over ranks: heads traded for tokens
"""
