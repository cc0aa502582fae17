"""Implementations of `Objective` (`policy/contract.py`): the losses by which models train on a batch.

tokens.py         the base class of objectives that average over tokens, and means for the log
reinforcement.py  losses of a policy, a critic and an implicit process reward model
algorithm.py      computes advantages over all ranks, and holds the settings of the policy's loss
likelihood.py     supervised fine-tuning
pairs.py          preference losses of pairs of responses, and of single responses that are labelled good or bad
scores.py         losses of a reward model on pairs and on labelled steps
distillation.py   the columns that a teacher adds to a batch, and the divergence of the student from the teacher
aligned.py        the distance from a teacher with another tokenizer
"""
