"""Rewards: functions that score samples, and the processes that run them.

base.py        types of a reward's inputs and result; the interface of a grader
load.py        makes a grader from --reward.function
pool.py        graders in processes that can be killed
worker.py      the program that a worker runs
combined_reward.py
               several rewards as one: weights and gates
forms.py       functions of users, in the forms of verl and TRL
code.py        programs graded by tests in the sandbox; code_tests.py reads the tests of a row, programs.py the
               program of a response, compare.py compares what is given with what is wanted
trial.py       tries a reward on right and wrong answers, and trial_report.py says what that shows; __main__.py is the
               command
route.py       the reward `auto`: which one grades rows of a data_source
prefilled.py   where a reply that the prompt begins opens the mark of an answer
quick.py       built-in rewards that are called in the process itself, by the rows of config/builtin.py
truths.py      finds rows whose truths a reward cannot compare with, before a run begins
judge.py       a language model as a judge, and judge_pairs.py as one of pairs; judge_verdict.py is what is asked and
               what is read from the answer, judge_asker.py how both ask; judge_server.py asks a server and counts,
               judge_client.py is one request, judge_cache.py a folder of answers; judge_engine.py asks the engine
symbolic.py    reads a mathematical answer whole or not at all; spelling.py: its LaTeX; units.py: its unit; names.py:
               its names
boxed.py  choice.py  dapo.py  gsm8k.py  math.py  numeric.py  qa.py  reasoning.py  text.py    built-in rewards
"""
