"""Parts that every job has, whatever it trains.

Jobs with an engine have a device table, too: it, its flags, the push and the check of the engine read the sections of
rollout and reference. The other files read only the sections that every training has (`config.schema.TrainingConfig`).

job.py           the kinds of jobs: what an entry point declares, and how it starts
open.py          opens and closes a job on this rank
run.py           what jobs of every kind do between two steps and at the end
session.py       settings, ranks, clock, console and folder of a job
checkpoints.py   resumes a job from its checkpoint, and saves it after steps and at preemption
engine.py        starts the engine of a job
engine_check.py  compares log p of the engine with the trainer's after the first push
journal.py       writes metrics, samples and console output of a step
generators.py    random number generators of the process, for checkpoints
environ.py       defaults of the process: environment, threads, allocator
determinism.py   makes two runs of the same settings equal to the last bit
device_table.py  moves models on and off the device: sleep, wake, offload, and the table of bytes
memory_advice.py names flags that would free memory
transfer.py      pushes new weights into the engine
meter.py         measures memory as the system counts it
"""
