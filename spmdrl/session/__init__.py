"""Code shared by all kinds of jobs: reinforcement learning, supervised fine-tuning, evaluation and others.

Files for jobs with an engine (device_table.py, memory_advice.py, transfer.py, engine.py, engine_check.py) read the
settings sections `rollout` and `reference`. The other files only read the sections that every training job has
(`config.schema.TrainingConfig`).

job.py           job descriptions, one per entry point
launch.py        launches a job from its command line
open.py          opens and closes a job on this rank
run.py           the work that all kinds of jobs do between steps and at the end
session.py       settings, ranks, timer, console and folder of a job
checkpoints.py   resumes a job from its checkpoint, and saves checkpoints after steps and at preemption
image_reader.py  reads the images of rows for a model, and expands their placeholders
engine.py        starts the engine of a job
engine_check.py  compares engine and trainer log p of sampled tokens before the first update
journal.py       writes the metrics, samples and console output of each step
environ.py       sets process defaults: environment variables, threads, allocator
determinism.py   makes runs with the same settings bitwise reproducible
device_table.py  moves models and the engine on and off the device, and tracks their memory
memory_advice.py suggests flags that free memory
transfer.py      sends new weights to the engine
meter.py         measures memory as reported by the operating system or the driver
"""
