"""Metrics, trackers, console and logs of a run.

metrics.py    metrics of one step, reduced over ranks; times of the step's phases
trackers.py   metrics.jsonl, TensorBoard, wandb
console.py    a live panel on a terminal, or one line per step
logs.py       one log file per rank
"""
