"""Signs of life, failures, and the last line of a job (law 6).

status.py         where this rank is: phase, step, file and line
heartbeat.py      a thread that tells the other ranks, and notices a rank that stands still
failure.py        one rank down, all down; which rank speaks
exit_message.py   what an error means and what to do about it
preempt.py        a signal asks the run to finish its step and save
flight_record.py  the last collectives of every rank, written when a job fails
oom.py            recognises an allocator that ran out of memory
"""
