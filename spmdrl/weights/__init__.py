"""Parts of weights: boxes that ranks hold and need, their transfer between ranks, and safetensors files.

boxes.py        a part of a tensor as ranges in every dimension
experts.py      parameters of a HF model as the tensors of its checkpoints
shards.py       one rank's part of a parameter that FSDP2 shards
plan.py         which rank sends which regions to which
reshard.py      the sending, bucket by bucket, with checksums
safetensors.py  a sharded model to and from HF safetensors
"""
