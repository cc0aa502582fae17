"""A job on paper: what its ranks would hold and send, computed before a GPU is asked for.

__main__.py       the command: `python -m spmdrl.plan`
paper.py          counts memory, traffic and operations on tensors without values
storages.py       the storages that live, by what they are for
numbers.py        numbers that are known although tensors have no values
operations.py     arguments, changes and floating-point operations of an operation of torch
traffic.py        bytes that a rank sends, by axis and kind of collective
substitutes.py    streams and groups that cannot run without a device, and their stand-ins
kernels.py        stand-ins for kernels of a GPU
on_host.py        the ways of a CPU, where the meta device stands for one
world.py          the world of one simulated rank
readers.py        models from their config.json alone
boxes.py          the boxes of weights that all ranks hold and need
push.py           a weight push from them
batch.py          the batch of one data position, of sequences of full length
job.py            one rank: its models, its engine and the phases of a step
passes.py         a few micro-batches of a step, which tell what all take
kinds.py          which ranks are unlike
scaled.py         from few micro-batches to all of a step's
times.py          least times by a roofline
run.py            plans a job: one rank of each kind, side by side
dry.py            the plan that --dry-run of a training prints
dry_data.py       the first rows of the data, as --dry-run shows them
report.py         the plan in words and as JSON
changes.py        changes of the settings that a plan may try
sweep.py          the nearest settings that fit, and others ranked
picture.py        the memory of each phase as an SVG
engine.py         an engine's bytes and the boxes that it reads, without an engine
engine_boxes.py   the part of each checkpoint tensor that a rank of an engine holds
engine_memory.py  an engine's workspace and KV cache in bytes
engine_weights.py an engine's weights in bytes
gpus.py           the GPUs that a plan knows, and files that describe others
"""
