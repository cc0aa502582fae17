"""The science: pure functions on tensors. No process groups, no configuration, nothing from the rooms above.

Call advantages and losses through the rows of their dicts, because one of each is named `reinforce`.

advantages.py         outcome advantages: one number for each sequence
credit.py             advantages by token; reward and cost combined
turns.py              advantages by turn
tree.py               which token and turn follows which, and sums along them
estimators.py         a row for each advantage estimator: function, inputs; advantages of a padded batch
samples.py            inputs of an estimator
groups.py             groups of samples, and sums over them that no order changes
token_losses.py       policy losses token by token
sequence_losses.py    policy losses of whole sequences
covariance_losses.py  KL-Cov, Clip-Cov, and the tokens that they hold back
losses.py             a row for each policy loss: function, aggregation, scope; loss of a padded batch
loss_inputs.py        inputs and results of a loss
rows.py               settings and paper of a function; padded tensors
aggregate.py          reduces per-token losses to one number
kl.py                 estimates of KL to the reference
correction.py         importance weights for the difference between engine and trainer
filters.py            chooses the groups that a step learns from
resample.py           draws samples whose reward is likely right more often
shaping.py            turns a score into the reward that advantages use
preference.py         losses of pairs of responses, and of labelled responses
value.py              critic, implicit process rewards, imitation of good samples, losses of given tokens
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
