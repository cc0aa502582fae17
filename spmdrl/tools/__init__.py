"""Commands other than training and evaluation.

replay.py        python -m spmdrl.tools.replay: recomputes an optimizer step in a single process
conversation_lines.py
                 formats episodes as text, turn by turn, for replay.py
flight.py        python -m spmdrl.tools.flight: finds the collective where the ranks of a failed job diverged
doctor.py        python -m spmdrl.tools.doctor: checks whether a run can start on this machine (doctor_report.py)
doctor_findings.py, doctor_software.py, doctor_gpus.py, doctor_machine.py, doctor_settings.py, doctor_ranks.py
                 the doctor's findings, and its checks: packages; GPUs; machine and disk; settings; collectives
preflight.py     chooses the nodes of a job: checks them, measures their bandwidth, replaces bad nodes with spares
ssh_start.py     starts launch/node.sh on hosts over ssh, for jobs without SLURM
hosts.py         runs a command on other hosts with srun or ssh, for preflight.py and ssh_start.py
reach.py         checks that the first node of a job is reachable, and prints the network interface to use
"""
