"""Rewards: how samples are scored.

base.py        types that a reward takes and returns; the interface of a grader
load.py        makes a grader from --reward.function
pool.py        graders in processes that can be killed
worker.py      one such process
gsm8k.py  math.py  reasoning.py  text.py    built-in rewards
"""
