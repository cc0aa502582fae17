"""Parts of weight tensors that ranks hold and need (boxes), their transfer between ranks, and safetensors files.

boxes.py        boxes: parts of a tensor as ranges in every dimension
experts.py      maps parameters of a HF model to the tensors of its checkpoints
folder.py       reads boxes of the tensors in a HF folder, and dequantises fp8
sources.py      finds the tensors from which a model's parameters are read
shards.py       one rank's shard of a parameter under FSDP2
plan.py         plans which rank sends which parts of tensors to which rank
reshard.py      sends the planned parts bucket by bucket, with checksums
safetensors.py  writes and reads a sharded model as HF safetensors
writer.py       writes safetensors files tensor by tensor
"""
