"""Parts that every job has, whatever it trains. Nothing here knows of reinforcement learning.

open.py          opens and closes a job on this rank
session.py       settings, ranks, clock, console and folder of a job
checkpoints.py   where a job stands: taken up, saved, left behind
journal.py       metrics, samples and console of a step
generators.py    random number generators of the process, for checkpoints
environ.py       defaults of the process: environment, threads, allocator
determinism.py   two runs of the same settings are equal to the last bit
device_table.py  who owns the device: sleep, wake, offload, and the table of bytes
room.py          flags that would free memory
transfer.py      new weights into the engine
meter.py         memory as the system counts it
"""
