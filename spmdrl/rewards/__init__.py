"""Rewards: functions that score samples, and the processes that run them.

base.py             types of a reward's inputs and result; what all graders share
load.py             loads the grader of --reward.function; checks of rewards against rows, samples and costs
combined_reward.py  several rewards as one: weights and gates
forms.py            functions of built-in rewards and of users, in the forms of verl and TRL, as one form
route.py            the reward `auto`: which reward grades rows of a data_source
pool.py             grades in processes that can be killed; worker.py is their program
judge.py            rewards by a language model as a judge; judge_verdict.py has its questions and reads its verdicts,
                    judge_server.py asks a server by the requests of judge_client.py, judge_engine.py the run's engine
code.py             rewards of programs by tests in the sandbox; code_tests.py reads the tests of a row and compares,
                    programs.py finds the program of a response
math.py             the reward of mathematical answers: finds, normalises and compares them; symbolic.py reads an answer
                    as an expression, latex.py unites its spellings, units.py splits off its unit
text.py boxed.py choice.py numeric.py qa.py    the other built-in rewards; text.py has what graders of text share
trial.py            tries a reward on right and wrong answers; __main__.py is the command and its report
"""
