"""Rewards: functions that score samples, and the processes that run them.

base.py             types of a reward's input and result; the base class of graders
load.py             loads the grader of --reward.function; checks rewards against rows, samples and costs
combined_reward.py  combines several rewards into one by weights and gates
forms.py            converts built-in functions, and users' functions in verl's or TRL's form, to one form
route.py            the reward `auto`: chooses the reward of a row by its data_source
pool.py             grades in processes that can be killed; worker.py is their program
judge.py            rewards from a language model as a judge; judge_verdict.py writes the questions and parses the
                    verdicts; judge_server.py sends questions to a server through judge_client.py; judge_engine.py has
                    the run's engine answer them
code.py             rewards of programs by tests in the sandbox; code_tests.py reads a row's tests and compares outputs;
                    programs.py finds the program in a response
math.py             the reward of mathematical answers: finds, normalises and compares them; symbolic.py parses an
                    answer into an expression, latex.py unifies spellings, units.py splits off the unit
text.py boxed.py choice.py numeric.py qa.py    the other built-in rewards; text.py has helpers of all text graders
trial.py            tries a reward on right and wrong answers; __main__.py is the command and its report
"""
