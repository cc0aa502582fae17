"""Parts that every job has, whatever it trains.

Jobs with an engine also have a device table: it, its flags, the push and the check of the engine read the sections
`rollout` and `reference`. The other files read only the sections of every training (`config.schema.TrainingConfig`).

job.py           the kinds of jobs: the row that each entry point declares
launch.py        launches a job from its command line
open.py          opens and closes a job on this rank
run.py           the work of every kind of job between two steps and at the end
session.py       settings, ranks, clock, console and folder of a job
checkpoints.py   resumes a job from its checkpoint, and saves it after steps and at preemption
engine.py        starts the engine of a job
engine_check.py  compares log p of the engine with the trainer's after the first push
journal.py       writes metrics, samples and console output of a step
environ.py       defaults of the process: environment, threads, allocator
determinism.py   makes two runs of the same settings equal to the last bit; the process's generators
device_table.py  moves models on and off the device: sleep, wake, offload, and the table of bytes
memory_advice.py names flags that would free memory
transfer.py      pushes new weights into the engine
meter.py         measures memory as the system counts it
"""
