"""Parts of weights: which rank holds and needs which, how they travel, how they are written.

boxes.py        a part of a tensor as ranges in every dimension
experts.py      parameters of a HF model as the tensors of its checkpoints
shards.py       one rank's part of a parameter that FSDP2 shards
plan.py         who sends which regions to whom
reshard.py      the sending, bucket by bucket, with checksums
safetensors.py  a sharded model to and from HF safetensors
"""
