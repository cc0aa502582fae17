"""Rewards: how samples are scored.

base.py        types that a reward takes and returns; the interface of a grader
load.py        makes a grader from --reward.function
pool.py        graders in processes that can be killed
process.py     one worker of the pool, as its parent sees it
worker.py      the program of that worker
gsm8k.py  math.py  reasoning.py  text.py    built-in rewards
"""
