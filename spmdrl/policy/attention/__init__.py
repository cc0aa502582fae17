"""Attention over packed sequences.

packed.py    the attention function that HF models call, and switching to transformers' implementations
packing.py   how a packed micro-batch is split into sequences, or into a tree of shared prompts
varlen.py    kernels for concatenated sequences, and kernel selection
ulysses.py   sequence parallelism: tokens sharded over ranks, all-to-all between tokens and heads
"""
