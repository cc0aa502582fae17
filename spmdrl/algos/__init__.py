"""The science: pure functions on tensors. No process groups, no configuration, nothing from the rooms above.

Call advantages and losses through the rows of their dicts, because one of each is named `reinforce`.

advantages.py         outcome advantages: one number for each sequence
credit.py             advantages by token; reward and cost combined
turns.py              advantages by turn
tree.py               which token and turn follows which, and sums along them
estimators.py         a row for each advantage estimator: function, inputs
samples.py            inputs of an estimator
losses.py             policy losses token by token; a row for each loss: function, aggregation, scope
sequence_losses.py    policy losses of whole sequences
covariance_losses.py  KL-Cov, Clip-Cov
divergence_losses.py  DPPO
rows.py               what a function says of itself: settings, paper
loss_inputs.py        inputs and results of a loss
selection.py          selects the tokens that KL-Cov and Clip-Cov hold back, over all ranks
aggregate.py          reduces per-token losses to one number
kl.py                 estimates of KL to the reference
correction.py         importance weights for the difference between engine and trainer
filters.py            chooses the groups that a step learns from
resample.py           learns more from samples whose reward is likely right
shaping.py            turns a score into the reward that advantages use
supervised.py         losses of given tokens
preference.py         losses of pairs of responses, and of labelled responses
value.py              critic, implicit process rewards, imitation of good samples
notebook.py           the same functions on padded tensors
"""

from spmdrl.algos.aggregate import AGGREGATIONS, Totals, count_totals, token_weights
from spmdrl.algos.correction import (
    CORRECTIONS,
    correction_weights_T,
    disagreement,
    finish_monitors,
    mismatch,
    reject_sequences,
)
from spmdrl.algos.credit import lagrangian
from spmdrl.algos.estimators import ADVANTAGES, Advantage
from spmdrl.algos.kl import KL_KINDS, adaptive_coef, kl_estimate
from spmdrl.algos.losses import LOSSES, Loss, LossInputs, LossResult
from spmdrl.algos.notebook import compute_advantages, compute_kl, compute_loss, correction_weights
from spmdrl.algos.samples import Samples
from spmdrl.algos.selection import Selecting
from spmdrl.algos.value import dual_step, implicit_reward_loss, implicit_rewards, positive_nll, value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_KINDS",
    "LOSSES",
    "Advantage",
    "Loss",
    "LossInputs",
    "LossResult",
    "Samples",
    "Selecting",
    "Totals",
    "adaptive_coef",
    "compute_advantages",
    "compute_kl",
    "compute_loss",
    "correction_weights",
    "correction_weights_T",
    "count_totals",
    "disagreement",
    "dual_step",
    "finish_monitors",
    "implicit_reward_loss",
    "implicit_rewards",
    "kl_estimate",
    "lagrangian",
    "mismatch",
    "positive_nll",
    "reject_sequences",
    "token_weights",
    "value_loss",
]
