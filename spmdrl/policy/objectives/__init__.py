"""Implementations of `Objective` (`policy/contract.py`): the training losses.

tokens.py         base class of objectives that average over tokens, and helpers for mean metrics
reinforcement.py  losses of the policy, a critic and an implicit process reward model
algorithm.py      computes advantages over all ranks and holds the settings of the policy loss
likelihood.py     supervised fine-tuning
pairs.py          preference losses on response pairs, and on single responses labelled good or bad
scores.py         reward model losses on pairs and on labelled steps
distillation.py   teacher columns of a batch, and the divergence between student and teacher
aligned.py        distillation from a teacher with a different tokenizer
"""
