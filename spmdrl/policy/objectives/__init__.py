"""Implements `Objective` of `policy/contract.py`: the losses by which models train on a batch.

tokens.py         objectives that average over tokens, and means for the log
reinforcement.py  losses of the policy, of a critic and of an implicit process reward model
algorithm.py      advantages on packed batches over all ranks, and the settings of the policy's loss
likelihood.py     supervised fine-tuning
pairs.py          preference losses of pairs of responses, and of single responses that are labelled good or bad
scores.py         a reward model's scores of pairs and of steps
distillation.py   the columns that a teacher adds to a batch, and the divergence of the student from it
aligned.py        the distance from a teacher with another tokenizer
"""
