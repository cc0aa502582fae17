"""Plans a job on paper: the memory, traffic and least times of its ranks, before any GPU is used.

__main__.py       the command: `python -m spmdrl.plan`
run.py            plans a job: one rank of each kind, in parallel
kinds.py          groups the ranks that have the same plan

Building and running one rank on tensors without values:
rank.py           one rank: its world, its models from config.json files alone, its engine
step.py           the phases of its step, on a batch of sequences of full length
passes.py         runs a few micro-batches of a step and measures them
boxes.py          the boxes of weights that all ranks hold and need
push.py           a weight push from these boxes
substitutes.py    replaces streams, groups and libraries that need a device
kernels.py        replaces kernels of a GPU
engine.py         an engine's bytes and the boxes that it needs, without an engine
engine_boxes.py   the part of each checkpoint tensor that a rank of an engine holds
engine_bytes.py   an engine's weights, workspace and KV cache in bytes

Counting:
paper.py          counts memory, traffic and operations on tensors without values
storages.py       follows the live storages of tensors, by purpose
numbers.py        keeps the values of tensors that are known on paper
traffic.py        bytes that a rank sends, by axis and kind of collective
scale.py          scales a few micro-batches to a whole step; least times by a roofline

Reporting:
report.py         the plan as text, as JSON and as an SVG
dry.py            `--dry-run` of jobs that sample
changes.py        changes of the settings that a plan may try
sweep.py          finds the nearest settings that fit, or ranks several
gpus.py           the GPUs that a plan knows, and files that describe others
"""
