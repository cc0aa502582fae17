"""Commands beside a training.

rerun_step.py  python -m spmdrl.replay: an optimizer step once more, on one process
flight.py      python -m spmdrl.flight: where the ranks of a failed job went apart
"""
