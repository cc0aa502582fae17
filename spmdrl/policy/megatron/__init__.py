"""Policies on Megatron-core: tensor, pipeline, context and expert parallelism of the same HF models.

layout.py      how a model is divided over ranks, and whether it can be
families.py    a HF config in Megatron's terms; a new architecture is added there
model.py       groups and modules: `initialize`, `build`
attention.py   packed sequences, their division over context parallelism, attention in plain torch
convert.py     which ranges of which checkpoint tensors a rank holds: loading, saving and pushes all use this one list
cpu.py         what Megatron-core needs to run where there is no GPU
"""
