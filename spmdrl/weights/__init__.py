"""Describes the slices of weight tensors that ranks hold and need (boxes), transfers them between ranks, and reads and
writes safetensors files.

boxes.py        boxes: rectangular slices of a tensor, with an index range per dimension
experts.py      maps the parameters of a HF model to checkpoint tensors
folder.py       reads tensor slices from a HF folder, and dequantises fp8
sources.py      finds the checkpoint tensors that a model's parameters are read from
shards.py       one rank's shard of a parameter under FSDP2
plan.py         plans which rank sends which tensor slices to which rank
reshard.py      sends the planned slices bucket by bucket, with checksums
safetensors.py  reads and writes a sharded model as HF safetensors
writer.py       writes safetensors files tensor by tensor
"""
