"""The Megatron-core backend: tensor, pipeline, context and expert parallelism for the same HF models.

layout.py      parallel sizes and their validation
arch.py        model descriptions, and parameter names in HF checkpoints
families.py    translates HF configs for Megatron; add new architectures here
model.py       process groups and modules: `initialize`, `build`
layers.py      modules missing in Megatron, and the layer specs that use them
routing.py     routers: routing replay, load-balancing loss, router biases adjusted by expert load
attention.py   packed sequences, context-parallel sharding, attention in plain torch
convert.py     maps parameters to slices of checkpoint tensors, to load, save and send them to engines
schedule.py    runs micro-batches through the pipeline and sends the last stage's results to every rank
training.py    gradient buffers, the distributed optimizer, its checkpoints
host_adamw.py  AdamW in host memory
policy.py      implements the Policy contract with all of these modules
ranks.py       runs Megatron on a subset of the job's ranks
repairs.py     patches for Megatron-core on every machine
cpu.py         patches that make Megatron-core run on CPUs
"""
