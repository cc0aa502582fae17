"""Policies on FSDP2: any Hugging Face transformer.

policy.py      the Policy contract
sharding.py    FSDP2 or HSDP over a packed model
loading.py     fills a sharded model: each rank reads its own shards
checkpoint.py  weights, adapters and optimizer state in files
lora.py        adapters: pieces, checkpoints, the model without them as reference
liger.py       Liger's kernels between the matmuls
"""
