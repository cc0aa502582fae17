"""Commands other than training and evaluation.

rerun_step.py  python -m spmdrl.replay: repeats an optimizer step on one process
conversation_lines.py
               episodes as lines, turn by turn, for the replay
flight.py      python -m spmdrl.flight: finds the collective where the ranks of a failed job diverged
doctor.py      python -m spmdrl.doctor: checks whether a run can start here
doctor_findings.py, doctor_python.py, doctor_software.py, doctor_gpus.py, doctor_machine.py, doctor_settings.py,
doctor_folder.py, doctor_ranks.py
               its checks: a line of the report, Python, packages, accelerators, the machine, files that settings
               name, the disk, collectives
settings.py    checks a run's settings and does nothing else, for slurm/job.sh
preflight.py   chooses the nodes of a job: the doctor on each, bandwidth of neighbours, spares for bad ones
hosts.py       starts a job on hosts over ssh: launch/node.sh without SLURM
reach.py       whether the first node can be reached, and the interface towards it
"""
