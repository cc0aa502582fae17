"""Attention over packed sequences.

packed.py    the attention function that HF models call, and the switch to transformers' implementations
packing.py   the division of a packed micro-batch into sequences, or into a tree of shared prompts
varlen.py    kernels for concatenated sequences, and the choice of a kernel for a layer
ulysses.py   sequence parallelism: tokens divided over ranks, all-to-all between tokens and heads
"""
