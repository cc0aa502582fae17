"""Parts of weights: boxes that ranks hold and need, their transfer between ranks, and safetensors files.

boxes.py        a part of a tensor as ranges in every dimension
experts.py      maps parameters of a HF model to the tensors of its checkpoints
folder.py       reads boxes of the tensors in a HF folder, fp8 ones dequantised
sources.py      finds the tensors that a model's parameters are read from
shards.py       one rank's part of a parameter that FSDP2 shards
plan.py         plans which rank sends which regions to which rank
reshard.py      sends them bucket by bucket, with checksums
safetensors.py  writes and reads a sharded model as HF safetensors
"""
