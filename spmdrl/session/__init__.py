"""Code that several kinds of jobs share: reinforcement learning, supervised fine-tuning, evaluation and others.

Files for jobs with an engine (device_table.py, memory_advice.py, transfer.py, engine.py, engine_check.py) read settings
of the sections `rollout` and `reference`. The other files read only the sections that every training has
(`config.schema.TrainingConfig`).

job.py           the description that each entry point gives of its kind of job
launch.py        launches a job from its command line
open.py          opens and closes a job on this rank
run.py           the work that every kind of job does between two steps and at the end
session.py       settings, ranks, timer, console and folder of a job
checkpoints.py   resumes a job from its checkpoint, and saves it after steps and at preemption
engine.py        starts the engine of a job
engine_check.py  compares the engine's log p of sampled tokens with the trainer's, before the first update
journal.py       writes metrics, samples and console output of a step
environ.py       sets defaults of the process: environment variables, threads, allocator
determinism.py   makes two runs of the same settings equal to the last bit; saves the states of random number generators
device_table.py  moves models and the engine on and off the device, and keeps a table of the memory that each uses
memory_advice.py suggests flags that would free memory
transfer.py      sends new weights to the engine
meter.py         measures memory as the operating system or the driver counts it
"""
