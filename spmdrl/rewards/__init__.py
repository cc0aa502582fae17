"""Rewards: what a sample is worth.

base.py        what a reward takes and returns; how a grader is driven
load.py        from --reward.function to a grader
pool.py        graders in processes that can be killed
worker.py      one such process
gsm8k.py  math.py  reasoning.py  text.py    built-in rewards
"""
