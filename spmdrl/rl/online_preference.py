"""Learns from pairs of the policy's own samples: selects pairs, computes reference logp, updates the policy.

Online DPO (https://arxiv.org/abs/2402.04792) and iterative SPPO (https://arxiv.org/abs/2405.00675) compare the best and
the worst sample of each prompt. RAFT (https://arxiv.org/abs/2304.06767) learns only from the best sample, with the
supervised fine-tuning loss.
"""

from dataclasses import dataclass
from typing import cast

import torch

from spmdrl.config.online_preference import OnlinePreferenceConfig, takes_best_alone
from spmdrl.config.preference import losses_of
from spmdrl.data.batch import Batch
from spmdrl.data.episode import Episode
from spmdrl.data.preferences import CHOSEN, REJECTED
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.objectives.algorithm import Algorithm, add_mismatch
from spmdrl.policy.objectives.likelihood import SftObjective
from spmdrl.policy.objectives.pairs import PairObjective
from spmdrl.rl.reading import finite
from spmdrl.rl.run import PolicyGradient, Run
from spmdrl.rl.score import add_model_scores, shape
from spmdrl.rl.update import refresh_reference
from spmdrl.tracking.metrics import Metrics

ROUNDING = 1e-6
"""Relative margin added to `--preference.gap`, so that rounding errors alone never turn two samples into a pair."""


class OnlinePreference(PolicyGradient):
    """The learning method that applies a preference loss to pairs of samples, or learns only from the best samples."""

    replays = False

    def __init__(self, run: Run):
        """Set up learning from pairs or, if the settings say so, only from the best sample."""
        super().__init__(run)
        self.cfg = cast(OnlinePreferenceConfig, run.cfg)
        self.alone = takes_best_alone(self.cfg)

    def pack(self, episodes: list[Episode], step: int) -> Batch:
        """Return this rank's episodes as a batch. Balancing keeps the samples of each prompt on one rank.

        Collective over all ranks.
        """
        batch = super().pack(episodes, step)
        if batch.branches:
            raise ValueError(
                "episodes that branch cannot be compared in pairs: take an environment that keeps its history"
            )
        batch.seq["unit"] = batch.seq["position"]
        if not self.cfg.reward.model:
            # Models process only the chosen samples, so balancing counts the other samples as almost no work.
            learnt_B = torch.zeros(len(batch), dtype=torch.bool)
            learnt_B[self.extremes(batch, batch.seq["reward"])] = True
            batch.seq["work"] = torch.where(learnt_B, batch.seq["work"], 1)
            if "common" in batch.seq:
                batch.seq["common"] = torch.minimum(batch.seq["common"], batch.seq["work"] - 1)
        return batch

    def extremes(self, batch: Batch, reward_B: torch.Tensor) -> torch.Tensor:
        """Return the indices of the samples to learn from: each prompt's best sample, followed by its worst.

        The worst sample is omitted if the method learns only from the best. The first sample wins ties. Two samples
        with the same tokens never form a pair. Prompts excluded by `--preference.gap` or `--preference.least-reward`
        contribute no samples.
        """
        chosen, groups, tokens = self.cfg.preference, {}, batch.token["tokens"].split(batch.lengths.tolist())
        for place, position in enumerate(batch.seq["position"].tolist()):
            groups.setdefault(position, []).append(place)
        reward, found = reward_B.tolist(), []
        for places in groups.values():
            best, worst = (pick(places, key=reward.__getitem__) for pick in (max, min))
            if chosen.least_reward is not None and reward[best] < chosen.least_reward:
                continue
            if self.alone:
                found.append(best)
                continue
            least = chosen.gap + ROUNDING * max(1.0, abs(reward[best]), abs(reward[worst]))
            if reward[best] - reward[worst] > least and not torch.equal(tokens[best], tokens[worst]):
                found += [best, worst]
        return torch.tensor(found, dtype=torch.int64)

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the samples to learn from, with the reference's logp if the run has a reference.

        The two samples of a pair are adjacent, with the better sample first.

        Collective over the ranks that train or score.

        Raises:
            ValueError: a model gave a number that is not finite; the message names model, prompt and sample.
        """
        models, cfg, algo, metrics = self.run.models, self.cfg, self.run.algo, Metrics()
        # From here on, only the two samples of a pair must stay together, not all samples of a prompt.
        batch.seq.pop("unit", None)
        if models.reward_model:
            metrics.merge(add_model_scores(batch, models, algo, cfg.reward.model_coef))
        batch.seq["shaped"] = shape(batch, cfg, algo.state, self.run.peers)
        index = self.extremes(batch, batch.seq["shaped"])
        pairs = batch.select(index)
        shaped = pairs.seq["shaped"].view(-1, 1 if self.alone else 2)
        prompts = len(set(batch.seq["position"].tolist()))
        metrics.add("pairs/kept", len(shaped) / max(1, prompts), prompts)
        if models.reference is not None:
            pairs.token["ref_logp"], _ = models.reference.logprobs(pairs, cfg.rollout.temperature)
            finite(pairs, pairs.token["ref_logp"], "the reference")
        if self.alone:
            # The loss uses temperature 1, so logp at the sampling temperature must be computed separately.
            logp_T, _ = models.policy.logprobs(pairs, cfg.rollout.temperature)
            add_mismatch(metrics, logp_T, *sampled_of(pairs, algo, models.policy.version), len(pairs))
        else:
            gap = shaped[:, 0] - shaped[:, 1]
            metrics.add("pairs/gap", gap.mean() if len(gap) else 0.0, len(gap))
            pairs.seq["unit"] = pairs.seq["position"]
            pairs.seq["sample"] = torch.tensor([CHOSEN, REJECTED]).repeat(len(gap))
        return pairs, metrics

    def answer(self, batch: Batch) -> Metrics:
        """Implements `PolicyGradient.answer`."""
        batch.seq.pop("unit", None)
        return super().answer(batch)

    def advantages(self, batch: Batch) -> Batch:
        """Return the samples unchanged, because the losses need no advantages."""
        return batch

    def update(self, pairs: Batch, step: int) -> Metrics:
        """Update the policy on the samples that `score` returned, then refresh the reference if it is due. Collective.

        step: 0-based.
        """
        models, cfg = self.run.models, self.cfg
        stats = models.policy.update(pairs, self.objective())
        refresh_reference(models, cfg.reference.refresh_every, step, cfg.reference.mix)
        return stats

    def objective(self) -> Objective:
        """Return the configured loss. Pair losses compute logp at the sampling temperature."""
        chosen, policy, peers = self.cfg.preference, self.run.models.policy, self.run.peers
        if self.alone:
            return SftObjective("nll", peers)
        temperature = self.cfg.rollout.temperature
        return OwnPairs(losses_of(chosen), chosen, policy, peers, temperature, self.run.algo, policy.updates_done)


@dataclass
class OwnPairs(PairObjective):
    """Pair losses on samples from an engine. They also report the mismatch between policy and engine logp."""

    algo: Algorithm | None = None
    start: int = 0
    """The policy's `updates_done` at the start of the update."""

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `PairObjective.loss`, and reports the logp mismatch before the first update."""
        out = super().loss(micro, first_T, second_T, shared)
        assert self.algo is not None
        if self.policy.updates_done == self.start:
            columns = sampled_of(micro, self.algo, self.policy.version)
            add_mismatch(out.stats, first_T.detach(), *columns, len(micro))
        return out


def sampled_of(
    batch: Batch, algo: Algorithm, version: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the columns that `add_mismatch` compares with the policy's logp. version: the policy's weight version."""
    return batch.token["rollout_logp"], batch.token["mask"], batch.seq_index, algo.fresh_mask(batch, version)
