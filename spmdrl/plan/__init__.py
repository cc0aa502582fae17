"""Plans a job without GPUs: simulates its ranks and reports their memory, their traffic and the least time of a step.

__main__.py       the command: `python -m spmdrl.plan`
run.py            plans a job by simulating one rank of each kind, in parallel
kinds.py          groups ranks that need the same memory and traffic

Simulating one rank on meta tensors (tensors without data):
rank.py           builds the rank: its world, its models from config.json files alone, its engine
step.py           runs its step on a batch of sequences of full length
passes.py         runs and measures only a few micro-batches of each pass of the step
boxes.py          computes the boxes (ranges of weight tensors) that all ranks hold and need
push.py           plans how training ranks send new weights to the engines, from the boxes of all ranks
substitutes.py    replaces streams, groups and libraries that need a device
kernels.py        replaces GPU kernels
engine.py         replaces the engine by a simulated one, which only allocates memory
engine_boxes.py   computes the part of each checkpoint tensor that a rank of an engine holds
engine_bytes.py   computes the bytes of an engine's weights, workspace and KV cache

Counting:
paper.py          counts memory, traffic and operations of a program on meta tensors
storages.py       counts the bytes of live tensor storages, by purpose
numbers.py        tracks the values of meta tensors that do not depend on weights
traffic.py        counts the bytes that a rank sends, by axis and kind of collective
scale.py          extrapolates to a complete step; computes its least time by a roofline model

Reporting:
report.py         formats the plan as text, as JSON and as an SVG
dry.py            prints the output of `--dry-run` for jobs that sample
changes.py        lists changes of a job's settings for sweep.py
sweep.py          plans a job with changed settings, to find settings that fit or that are faster
gpus.py           describes GPUs, from a table or from a file
"""
