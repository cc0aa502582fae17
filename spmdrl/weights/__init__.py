"""Parts of weights: boxes that ranks hold and need, their transfer between ranks, and safetensors files.

boxes.py        a part of a tensor as ranges in every dimension
experts.py      maps parameters of a HF model to the tensors of its checkpoints
shards.py       one rank's part of a parameter that FSDP2 shards
plan.py         plans which rank sends which regions to which rank
reshard.py      sends them bucket by bucket, with checksums
safetensors.py  writes and reads a sharded model as HF safetensors
"""
