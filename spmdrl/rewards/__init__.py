"""Rewards: functions that score samples, and the processes that run them.

base.py             input and result types of rewards; the base class of graders
load.py             loads the grader of --reward.function; checks rewards against the data and other settings
combined_reward.py  combines several rewards into one with weights and gates
forms.py            adapts built-in functions, and user functions with verl's or TRL's signature, to one interface
route.py            the reward `auto`: selects the reward for each row by its data_source
pool.py             grades in worker processes that can be killed; worker.py is the program that they run
judge.py            rewards from an LLM judge; judge_verdict.py builds the questions and parses the verdicts;
                    judge_server.py sends questions to a server through judge_client.py; judge_engine.py sends them to
                    the run's engine
code.py             rewards for programs, tested in the sandbox; code_tests.py reads a row's tests and compares outputs;
                    programs.py extracts the program from a response
math.py             the reward for mathematical answers: extracts, normalises and compares them; symbolic.py parses an
                    answer into an expression, latex.py normalises notation, units.py splits off the unit
text.py boxed.py choice.py numeric.py qa.py    the other built-in rewards; text.py has helpers for all text graders
trial.py            tries a reward on correct and wrong answers; __main__.py is the command that reports the scores
"""
