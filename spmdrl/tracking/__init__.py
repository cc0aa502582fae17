"""Metrics, trackers, console and logs of a run.

metrics.py    metrics of one step, reduced over ranks; timers of its phases
trackers.py   metrics.jsonl, TensorBoard, wandb
console.py    the panel on a terminal, or one line for each step
logs.py       one log file for each rank
"""
