"""Metrics, trackers, console and logs of a run.

metrics.py    numbers of one step, reduced over ranks; the clock of its phases
trackers.py   metrics.jsonl, TensorBoard, wandb
console.py    the panel on a terminal, or one line a step
logs.py       one log file for each rank
"""
