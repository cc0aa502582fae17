"""Policies on Megatron-core: tensor, pipeline, context and expert parallelism of the same HF models.

layout.py      how a model is divided over ranks, and whether it can be
arch.py        description of a model, from which it is built
families.py    a HF config in Megatron's terms; a new architecture is added there
names.py       names of Megatron's parameters in HF checkpoints
model.py       groups and modules: `initialize`, `build`
layers.py      modules that Megatron does not have, and layers composed of Megatron's modules and these
routing.py     routers: choices told to them, a loss for evenly used experts, a bias that follows their load
attention.py   packed sequences, their division over context parallelism, attention in plain torch
convert.py     which ranges of which checkpoint tensors a rank holds: loading, saving and pushes all use this one list
schedule.py    micro-batches through the pipeline, and how every rank learns what the last stage found
training.py    sums of gradients, the distributed optimizer, its state in files
host_adamw.py  AdamW on the host
policy.py      the Policy contract over all of these
ranks.py       Megatron over those ranks of the job that hold the models
repairs.py     fixes of Megatron-core for every machine
cpu.py         substitutes that let Megatron-core run on CPUs
"""
