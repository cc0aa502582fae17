"""The FSDP2 backend, for any Hugging Face transformer.

policy.py      implements the Policy contract
layers.py      activation checkpointing, compilation and Liger kernels for decoder layers
sharding.py    wraps a HF model for packed sequences, shards it and loads the shards
checkpoint.py  writes and reads weights, adapters and optimizer state
lora.py        LoRA: adapter weights for engines and checkpoints, and the base model as reference
"""
