"""Commands other than training and evaluation.

replay.py      python -m spmdrl.tools.replay: repeats an optimizer step on one process
conversation_lines.py
               episodes as lines, turn by turn, for the replay
flight.py      python -m spmdrl.tools.flight: finds the collective where the ranks of a failed job diverged
doctor.py      python -m spmdrl.tools.doctor: checks whether a run can start here; doctor_report.py does it
doctor_findings.py, doctor_python.py, doctor_software.py, doctor_gpus.py, doctor_machine.py, doctor_settings.py,
doctor_folder.py, doctor_ranks.py
               its checks: a line of the report, Python, packages, accelerators, the machine, files that settings
               name, the disk, collectives
settings.py    checks a run's settings and does nothing else, for slurm/job.sh
preflight.py   chooses the nodes of a job: the doctor on each, bandwidth of neighbours, spares for bad ones
ssh_start.py   starts a job on hosts over ssh: launch/node.sh without SLURM
hosts.py       runs a command on other hosts, by srun or ssh, for these two
reach.py       whether the first node can be reached, and the interface towards it
"""
