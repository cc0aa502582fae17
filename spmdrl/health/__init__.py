"""Heartbeats, failure handling, and a job's last line: if one rank fails, all exit (law 6 in CONTRIBUTING.md).

status.py         position of this rank: phase, step, file and line
heartbeat.py      publishes this position to the other ranks from a thread, and detects a rank that makes no progress
overview.py       where all ranks are when a job ends, read by a few ranks
failure.py        ends the whole job when one rank fails; one rank prints the cause
exit_message.py   the last line: an error, its location and advice
preempt.py        accepts requests, by signal, to finish or abandon the step, save and exit
flight_record.py  the last collectives of every rank, written when a job fails
causes.py         recognises the causes of errors: memory, disks, devices, other ranks
"""
