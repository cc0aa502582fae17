"""Heartbeats, failures, and the last line of a job: if one rank fails, all end (law 6 in CONTRIBUTING.md).

status.py         position of this rank: phase, step, file and line
heartbeat.py      publishes this position to the other ranks from a thread, and notices a rank without progress
overview.py       positions of all ranks when a job ends, read by a few ranks
failure.py        ends the whole job when one rank fails; one rank prints the cause
exit_message.py   the last line: an error, its place and advice
preempt.py        accepts requests, by signal, to finish or abandon the step, save and exit
flight_record.py  the last collectives of every rank, written when a job fails
causes.py         recognises the causes of errors: memory, disks, devices, other ranks
"""
