"""Policies on FSDP2: any Hugging Face transformer.

policy.py   the Policy contract
lora.py     adapters: pieces, checkpoints, the model without them as reference
liger.py    Liger's kernels between the matmuls
"""
