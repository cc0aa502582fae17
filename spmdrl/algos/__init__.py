"""Algorithms as pure functions on tensors, without process groups, configuration or imports from higher layers.

The tables ADVANTAGES and LOSSES list the functions by name. An advantage and a loss may share a name, such as
`reinforce`.

advantages.py         advantages with one number for each sequence
credit.py             advantages with one number for each token; combines the advantages of reward and cost
turns.py              advantages with one number for each turn
tree.py               order of tokens and turns in an episode that may fork, and discounted sums along it
estimators.py         table of all advantage estimators; advantages of a padded batch
samples.py            inputs of an advantage estimator
groups.py             groups of samples, and sums over them that do not depend on the order of the samples
token_losses.py       policy losses computed token by token
sequence_losses.py    policy losses computed from whole sequences
covariance_losses.py  KL-Cov and Clip-Cov, and their selection of tokens
losses.py             table of all policy losses; loss of a padded batch
loss_inputs.py        inputs and results of a policy loss
rows.py               finds the settings and the paper of a function; checks and converts padded inputs
aggregate.py          reduces per-token losses to one number
kl.py                 estimates of KL to the reference
correction.py         importance weights for the difference between engine and trainer
filters.py            chooses the groups that a step learns from
resample.py           draws samples with replacement, preferring those whose reward is likely right; a replay buffer
shaping.py            turns a score into the reward that advantages use
preference.py         losses of pairs of responses, and of labelled responses
value.py              losses of a critic, of an implicit reward model and of imitation; a cost's Lagrange multiplier
"""

from spmdrl.algos.correction import correction_weights
from spmdrl.algos.estimators import ADVANTAGES, compute_advantages
from spmdrl.algos.kl import kl_estimate
from spmdrl.algos.loss_inputs import LossInputs
from spmdrl.algos.losses import LOSSES, compute_loss
from spmdrl.algos.samples import Samples

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "LossInputs",
    "Samples",
    "compute_advantages",
    "compute_loss",
    "correction_weights",
    "kl_estimate",
]
