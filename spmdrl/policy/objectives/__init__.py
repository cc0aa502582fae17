"""What models learn from a batch: implementations of `Objective` of `policy/contract.py`.

reinforcement.py  the policy's loss, a critic's, an implicit process reward model's
algorithm.py      advantages on packed batches over all ranks, and the settings of the policy's loss
likelihood.py     supervised fine-tuning
pairs.py          pairs of responses, by their sums of logp
labelled.py       responses that are good or bad, each alone
scores.py         a reward model's scores of pairs; step_scores.py: of steps
distillation.py   the columns that a teacher adds to a batch, and the divergence that trains a student
aligned.py        the distance from a teacher with another tokenizer
"""
