"""Plans a job without GPUs: simulates its ranks and estimates memory, communication and a lower bound on the step time.

__main__.py       the command: `python -m spmdrl.plan`
run.py            plans a job by simulating one rank of each kind, in parallel
kinds.py          groups ranks that need the same memory and traffic

Simulating one rank on meta tensors (tensors without data):
rank.py           builds the rank: its world, its models (from config.json files only) and its engine
step.py           runs one training step on a batch of full-length sequences
images.py         assumes which images the prompts show
passes.py         runs and measures only a few micro-batches of each pass in the step
boxes.py          computes the boxes (slices of weight tensors) that all ranks hold and need
push.py           plans how training ranks send updated weights to the engines
substitutes.py    replaces streams, process groups and libraries that need a device
kernels.py        replaces GPU kernels
engine.py         replaces the engine with a simulated one, which only allocates memory
engine_boxes.py   computes which part of each checkpoint tensor an engine rank holds
engine_bytes.py   computes the size of an engine's weights, workspace and KV cache

Counting:
paper.py          counts memory, traffic and FLOPs of a program that runs on meta tensors
storages.py       tracks the size of live tensor storages, by purpose
numbers.py        tracks the values of meta tensors that do not depend on weights
traffic.py        counts the bytes that a rank sends, by mesh axis and collective type
scale.py          extrapolates to a full step and bounds its time with a roofline model

Reporting:
report.py         formats the plan as text, JSON or SVG
dry.py            prints the `--dry-run` output of jobs that sample
changes.py        lists changes to a job's settings that sweep.py can try
sweep.py          plans a job with changed settings to find ones that fit or are faster
gpus.py           describes GPUs, from a built-in table or a file
"""
