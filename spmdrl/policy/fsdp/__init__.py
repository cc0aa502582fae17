"""Policies on FSDP2, for any Hugging Face transformer.

policy.py      implements the Policy contract
layers.py      recomputes layers, compiles them, or replaces their operations by Liger's kernels
sharding.py    wraps a HF model for packed sequences, shards it and fills the shards
checkpoint.py  writes and reads weights, adapters and optimizer state
lora.py        adapters: their weights for engines and checkpoints, and the model without adapters as reference
"""
