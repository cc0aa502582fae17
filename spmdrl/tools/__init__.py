"""Commands other than training and evaluation.

rerun_step.py  python -m spmdrl.replay: repeats an optimizer step on one process
flight.py      python -m spmdrl.flight: finds the collective where the ranks of a failed job diverged
"""
