"""Policies on Megatron-core: tensor, pipeline, context and expert parallelism of the same HF models.

layout.py      the division of a model over ranks, and checks of it
arch.py        the description of a model, from which it is built, and names of parameters in HF checkpoints
families.py    translates a HF config into Megatron's terms; a new architecture is added here
model.py       groups and modules: `initialize`, `build`
layers.py      modules that Megatron lacks, and layer specs that combine them with Megatron's modules
routing.py     routers: routing replay, load-balancing loss, router biases adjusted by expert load
attention.py   packed sequences, their division over context parallelism, attention in plain torch
convert.py     maps a rank's parameters to ranges of checkpoint tensors, to load, save and send them to engines
schedule.py    runs micro-batches through the pipeline and sends the last stage's results to every rank
training.py    gradient buffers, the distributed optimizer, its checkpoints
host_adamw.py  AdamW in host memory
policy.py      implements the Policy contract with all of these modules
ranks.py       runs Megatron on a part of the job's ranks
repairs.py     patches of Megatron-core for every machine
cpu.py         patches with which Megatron-core runs on CPUs
"""
