"""Signs of life, failures, and the last line of a job (law 6).

status.py         position of this rank: phase, step, file and line
heartbeat.py      a thread that reports this position to the other ranks, and notices a rank without progress
overview.py       where all ranks are when a job ends, read by a few of them
failure.py        ends the whole job when one rank fails; one rank prints the cause
exit_message.py   the last line: an error, its place and advice
preempt.py        on a signal, the run finishes its step and saves
flight_record.py  the last collectives of every rank, written when a job fails
causes.py         recognises causes of errors: memory, disks, devices, other ranks
"""
