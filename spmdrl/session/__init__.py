"""What every job has, whatever it trains. Nothing here knows of reinforcement learning.

open.py          opens and closes a job on this rank
environ.py       defaults of the process: environment, threads, allocator
determinism.py   two runs of the same settings are equal to the last bit
device_table.py  who owns the device: sleep, wake, offload, and the table of bytes
transfer.py      new weights into the engine
meter.py         memory as the system counts it
"""
