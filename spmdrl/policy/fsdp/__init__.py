"""Policies on FSDP2, for any Hugging Face transformer.

policy.py      implements the Policy contract
sharding.py    puts a HF model into its packed form and shards it
loading.py     fills a sharded model: each rank reads its own shards
checkpoint.py  writes and reads weights, adapters and optimizer state
lora.py        adapters: pieces, checkpoints, the model without them as reference
"""
