"""Plans a job on paper: the memory, traffic and least times of its ranks, before any GPU is used.

__main__.py       the command: `python -m spmdrl.plan`
paper.py          counts memory, traffic and operations on tensors without values
storages.py       follows the live storages of tensors, by purpose
numbers.py        keeps the values of tensors that are known on paper
operations.py     arguments, changed tensors and floating-point operations of an operation of torch
traffic.py        bytes that a rank sends, by axis and kind of collective
substitutes.py    replaces streams, groups and libraries that need a device
kernels.py        replaces kernels of a GPU
on_host.py        makes code take its CPU paths, for a plan of a CPU job
world.py          the world of one simulated rank
readers.py        builds models from their config.json alone
boxes.py          the boxes of weights that all ranks hold and need
push.py           a weight push from these boxes
batch.py          the batch of one data position, of sequences of full length
job.py            one rank: its models, its engine and the phases of a step
passes.py         runs a few micro-batches of a step and measures them
kinds.py          groups the ranks that have the same plan
scaled.py         scales the measurements of a few micro-batches to a whole step
times.py          least times by a roofline
run.py            plans a job: one rank of each kind, in parallel
dry.py            the plan that a training's --dry-run prints
dry_data.py       the first rows of the data, for --dry-run
report.py         the plan as text and as JSON
changes.py        changes of the settings that a plan may try
sweep.py          finds the nearest settings that fit, or ranks several
picture.py        the memory of each phase as an SVG
engine.py         an engine's bytes and the boxes that it needs, without an engine
engine_boxes.py   the part of each checkpoint tensor that a rank of an engine holds
engine_memory.py  an engine's workspace and KV cache in bytes
engine_weights.py an engine's weights in bytes
gpus.py           the GPUs that a plan knows, and files that describe others
"""
