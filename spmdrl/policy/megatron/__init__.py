"""Policies on Megatron-core: tensor, pipeline, context and expert parallelism of the same HF models.

layout.py      the division of a model over ranks, and checks of it
arch.py        the description of a model, from which it is built, and names of parameters in HF checkpoints
families.py    translates a HF config into Megatron's terms; a new architecture is added here
model.py       groups and modules: `initialize`, `build`
layers.py      modules that Megatron lacks, and layers composed of these and Megatron's
routing.py     routers: prescribed choices, a loss for balanced experts, a bias that follows their load
attention.py   packed sequences, their division over context parallelism, attention in plain torch
convert.py     the ranges of checkpoint tensors that a rank holds; loading, saving and pushes use this one list
schedule.py    runs micro-batches through the pipeline and sends the last stage's results to every rank
training.py    sums of gradients, the distributed optimizer, its state in files
host_adamw.py  AdamW on the host
policy.py      the Policy contract over all of these
ranks.py       runs Megatron on the ranks that hold the models, a part of the job
repairs.py     fixes of Megatron-core for every machine
cpu.py         substitutes with which Megatron-core runs on CPUs
"""
