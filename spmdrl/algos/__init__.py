"""RL algorithms as pure functions on tensors, with no process groups, configuration or imports from higher layers.

The tables ADVANTAGES and LOSSES list all advantage estimators and losses by name. An estimator and a loss can share a
name, such as `reinforce`.

advantages.py         outcome advantages, one number per sequence
credit.py             token-level advantages; combines reward and cost advantages
turns.py              turn-level advantages
tree.py               token and turn order in episodes that may fork, and discounted sums along it
estimators.py         table of all advantage estimators; computes the advantages of a padded batch
samples.py            inputs to advantage estimators
groups.py             sample groups, and group sums that do not depend on the sample order
token_losses.py       token-level policy losses
sequence_losses.py    sequence-level policy losses
covariance_losses.py  KL-Cov and Clip-Cov, and how they select tokens
losses.py             table of all policy losses; computes the loss of a padded batch
loss_inputs.py        inputs and outputs of policy losses
rows.py               looks up a function's settings and paper; checks and converts padded inputs
aggregate.py          reduces per-token losses to a scalar
kl.py                 estimates of the KL to the reference
correction.py         importance weights for the mismatch between engine and trainer
filters.py            selects the groups that a step trains on
resample.py           resampling that favours samples whose reward is likely right; a replay buffer
shaping.py            turns scores into the rewards that advantages are computed from
preference.py         preference losses, for response pairs and for labelled responses
value.py              critic, implicit reward model and imitation losses; a cost's Lagrange multiplier
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
