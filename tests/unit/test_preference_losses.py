"""Losses of preference learning against TRL 1.16's own code, to 1e-6 in value and gradient, and against formulas."""

import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid

from spmdrl.algos.preference import LOSSES, Labelled, Pairs, bco, simpo
from spmdrl.config import preference as settings
from spmdrl.config.preference import PreferenceMethod
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import MEASURE
from spmdrl.policy.objectives.pairs import LabelledObjective, PairObjective
from spmdrl.spmd.peers import Peers

ALONE = Peers(None, torch.device("cpu"))
ASKED = [3, 2, 4, 3, 5]
SAID = [(4, 6), (5, 2), (3, 3), (7, 1), (2, 5)]
"""Tokens of the prompt, and of the two responses, of each pair."""
MOST = 12


class Case:
    """Pairs with logp of policy and reference, packed for us and padded for TRL."""

    def __init__(self, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        pairs = len(ASKED)
        shape = (2 * pairs, MOST - 1)
        self.logp = -torch.rand(shape, generator=draw, dtype=torch.float64) * 2
        self.ref = self.logp + torch.randn(shape, generator=draw, dtype=torch.float64) * 0.4
        self.collision = torch.rand(shape, generator=draw, dtype=torch.float64) * 0.9 + 0.05
        lengths = [asked + said[side] for side in (0, 1) for asked, said in zip(ASKED, SAID, strict=True)]
        self.mask = torch.zeros(2 * pairs, MOST, dtype=torch.long)
        for i, length in enumerate(lengths):
            self.mask[i, ASKED[i % pairs] : length] = 1
        # Rows of TRL are all chosen, then all rejected; ours are pair by pair.
        self.order = [i for pair in range(pairs) for i in (pair, pair + pairs)]
        self.lengths = torch.tensor([lengths[i] for i in self.order])

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """[2P, L - 1] -> [T], a number at the token that it is of."""
        rows = [torch.cat([x.new_zeros(1), x[i, : n - 1]]) for i, n in zip(self.order, self.lengths, strict=True)]
        return torch.cat(rows)

    def batch(self) -> Batch:
        """The batch, without logp of the policy."""
        mask = torch.cat([self.mask[i, :n] for i, n in zip(self.order, self.lengths, strict=True)]).bool()
        place = torch.arange(len(self.lengths))
        tokens = torch.zeros(len(mask), dtype=torch.int64)
        token = {"tokens": tokens, "mask": mask, "ref_logp": self.packed(self.ref)}
        seq = {"position": place // 2, "sample": place % 2, "unit": place // 2, "update": place * 0}
        return Batch(self.lengths, token, seq)


def stand_in(case: Case, logp: torch.Tensor, **more) -> SimpleNamespace:
    """What TRL's trainers read of themselves, and models that answer with given numbers."""
    zeros = torch.zeros_like(case.logp)

    def answers(x):
        def model(**kwargs):
            said = torch.where(case.mask[:, 1:].bool(), x, torch.zeros_like(x))
            return SimpleNamespace(
                log_probs=said.to(logp.dtype),
                log_sum_sq_probs=case.collision.log(),
                entropy=zeros,
                mean_logits=zeros,
                is_top1=zeros.bool(),
            )

        return model

    policy = answers(logp)
    policy.training = True
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    fixed = dict(
        accelerator=accelerator,
        model=policy,
        ref_model=answers(case.ref),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        ld_alpha=None,
        label_smoothing=0.0,
        beta=0.1,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5,
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
    )
    return SimpleNamespace(**(fixed | more))


def trl_loss(case: Case, dtype=torch.float64, **more) -> tuple[float, torch.Tensor]:
    """TRL's loss of one batch, and the gradient of logp, packed."""
    from trl.trainer import dpo_trainer

    logp = case.logp.clone().requires_grad_()
    trainer = stand_in(case, logp.to(dtype), **more)
    inputs = {"input_ids": case.mask * 0, "attention_mask": case.mask * 0 + 1, "completion_mask": case.mask}
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(dpo_trainer, "is_peft_model", lambda model: False)
        patch.setattr(dpo_trainer, "disable_gradient_checkpointing", lambda *args: nullcontext())
        loss = dpo_trainer.DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    loss.backward()
    return loss.item(), case.packed(logp.grad)


def our_loss(case: Case, losses: dict[str, float], method: PreferenceMethod, parts=None) -> tuple[float, torch.Tensor]:
    """Our loss of the same batch, in micro-batches of the pairs `parts`, and the gradient of logp."""
    batch, logp_T = case.batch(), case.packed(case.logp).requires_grad_()
    policy = SimpleNamespace(logprobs=lambda share, *_: (logp_T.detach(), torch.zeros_like(logp_T)))
    objective = PairObjective(losses, method, policy, ALONE)  # type: ignore[arg-type]
    shared, total = objective.prepare(batch, 0), torch.zeros((), dtype=torch.float64)
    token = batch.token | {"place": torch.arange(batch.n_tokens), "collision": case.packed(case.collision)}
    whole = Batch(batch.lengths, token, batch.seq)
    for part in parts or [range(len(ASKED))]:
        micro = whole.select(torch.tensor([i for pair in part for i in (2 * pair, 2 * pair + 1)]))
        at = micro.token["place"]
        total = total + objective.loss(micro, logp_T[at], micro.token["collision"], shared).loss
    total.backward()
    assert logp_T.grad is not None
    return total.item(), logp_T.grad


ALIKE = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "exo_pair": {"label_smoothing": 0.1},
    "nca_pair": {},
    "robust": {"label_smoothing": 0.2},
    "bco_pair": {},
    "sppo_hard": {},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {},
    "sft": {},
    "sigmoid_norm": {"beta": 2.0},
}
"""Losses that TRL's DPO has, each with settings."""


@pytest.mark.parametrize("name", ALIKE)
def test_parity_each_loss_is_that_of_trl(name):
    case, more = Case(), ALIKE[name]
    want, gradient = trl_loss(case, loss_types=[name], loss_weights=[1.0], **more)
    got, mine = our_loss(case, {name: 1.0}, PreferenceMethod(**more))
    assert got == pytest.approx(want, rel=1e-6) and gradient.abs().max() > 0
    torch.testing.assert_close(mine, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["forward_kl", "js", "alpha"])
def test_parity_divergences_are_those_of_trl(kind):
    theirs = {"js": "js_divergence", "alpha": "alpha_divergence"}.get(kind, kind)
    # TRL knows no float64 for the alpha divergence.
    dtype = torch.float32 if kind == "alpha" else torch.float64
    want, gradient = trl_loss(Case(), dtype, loss_types=["sigmoid"], loss_weights=[1.0], f_divergence_type=theirs)
    got, mine = our_loss(Case(), {"sigmoid": 1.0}, PreferenceMethod(divergence=kind))
    assert got == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(mine, gradient, rtol=1e-6, atol=1e-8)


def test_parity_lists_weights_and_tails_are_those_of_trl():
    mixed = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    for tail, weighted in ((None, False), (0.3, False), (None, True)):
        # TRL's weights of WPO multiply the likelihood term too, which is one number for the whole batch.
        losses = {k: v for k, v in mixed.items() if k != "sft" or not weighted}
        more = dict(ld_alpha=tail, use_weighting=weighted)
        want, gradient = trl_loss(Case(), loss_types=list(losses), loss_weights=list(losses.values()), **more)
        got, mine = our_loss(Case(), losses, PreferenceMethod(tail=1.0 if tail is None else tail, weighted=weighted))
        assert got == pytest.approx(want, rel=1e-6)
        torch.testing.assert_close(mine, gradient, rtol=1e-6, atol=1e-9)


def test_parity_simpo_cpo_and_orpo_are_those_of_trl():
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    case = Case(1)
    sums, means = (torch.where(case.mask[:, 1:].bool(), case.logp, 0 * case.logp).sum(1) for _ in (0, 1))
    means = means / case.mask.sum(1)
    on = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(alpha=0.0, beta=0.7, label_smoothing=0.1, simpo_gamma=0.5, accelerator=on)
    terms = PreferenceMethod(beta=0.7, label_smoothing=0.1, margin=0.5)
    pairs = len(ASKED)
    for name, kind, values in (("simpo", "simpo", means), ("cpo", "sigmoid", sums)):
        trainer.loss_type = kind
        want = CPOTrainer.cpo_loss(trainer, values[:pairs], values[pairs:])[0].mean().item()
        assert our_loss(case, {name: 1.0}, terms)[0] == pytest.approx(want, rel=1e-9), name
    odds = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.1, accelerator=on), means[:pairs], means[pairs:])[0]
    # TRL computes it in float32.
    assert our_loss(case, {"orpo": 0.1}, terms)[0] == pytest.approx(-odds.mean().item(), rel=1e-5)


def test_simpo_by_its_formula():
    x = Pairs(*(torch.tensor([v], dtype=torch.float64) for v in (-4.0, -9.0, 0.0, 0.0, 2.0, 3.0)))
    want = -math.log(1 / (1 + math.exp(-(2.0 * (-2.0 + 3.0) - 0.5))))
    assert simpo(x, beta=2.0, label_smoothing=0.0, margin=0.5).item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if not row.labelled] + ["sft"])
def test_layout_micro_batches_change_no_loss_of_pairs(name):
    terms = PreferenceMethod(label_smoothing=0.1, tail=0.5)
    want, gradient = our_loss(Case(2), {name: 1.0}, terms)
    got, mine = our_loss(Case(2), {name: 1.0}, terms, parts=[[3], [0, 2], [4, 1]])
    assert got == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(mine, gradient, rtol=1e-10, atol=1e-14)


def labelled(
    name: str, case: Case, parts=None, steps: int = 1, weights=(1.0, 1.0)
) -> tuple[float, torch.Tensor, float]:
    """Our loss of single responses, its gradient and shift; those of the last pair are to other prompts."""
    batch, logp_T = case.batch(), case.packed(case.logp).requires_grad_()
    batch.seq["sample"] = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0, 2, 3])
    batch.token["place"] = torch.arange(batch.n_tokens)
    policy = SimpleNamespace(logprobs=lambda share, *_: (logp_T.detach()[share.token["place"]], None))
    method = PreferenceMethod(beta=0.3, wanted_weight=weights[0], unwanted_weight=weights[1])
    objective = LabelledObjective(name, method, policy, ALONE)  # type: ignore[arg-type]
    for step in range(steps):
        shared = objective.prepare(batch, step)
    total = torch.zeros((), dtype=torch.float64)
    assert shared.active is not None and shared.active.tolist() == [True] * 8 + [False] * 2
    for part in parts or [range(10)]:
        micro = batch.select(torch.tensor(list(part)))
        total = total + objective.loss(micro, logp_T[micro.token["place"]], torch.zeros(0), shared).loss
    total.backward()
    assert logp_T.grad is not None
    return total.item(), logp_T.grad, shared.shift


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_parity_kto_is_that_of_trl(name):
    from trl.trainer import kto_trainer

    case = Case(3)
    rows = [case.order[i] for i in range(8)]
    label = torch.tensor([True, False, True, False, True, False, False, True])
    others = case.order[8:]
    logp = case.logp.clone().requires_grad_()
    trainer = stand_in(case, logp, loss_type=name, beta=0.3, calculate_KL=name == "kto")
    trainer.desirable_weight, trainer.undesirable_weight = 1.5, 0.5

    def kl(model, batch):
        x = logp if model is trainer.model else case.ref
        return (x * case.mask[:, 1:])[others].sum(1).detach()

    def model_of(x):
        def model(**kwargs):
            zeros = torch.zeros(8, MOST - 1, dtype=torch.float64)
            said = (x * case.mask[:, 1:])[rows]
            return SimpleNamespace(log_probs=said, entropy=zeros, mean_logits=zeros)

        model.training = True
        return model

    trainer.model, trainer.ref_model, trainer._compute_kl_logps = model_of(logp), model_of(case.ref), kl
    mask = case.mask[rows]
    inputs = {"input_ids": mask * 0, "attention_mask": mask * 0 + 1, "completion_mask": mask, "label": label}
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(kto_trainer, "is_peft_model", lambda model: False)
        patch.setattr(kto_trainer, "disable_gradient_checkpointing", lambda *args: nullcontext())
        loss = kto_trainer.KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    loss.backward()
    got, mine, shift = labelled(name, case, weights=(1.5, 0.5))
    assert got == pytest.approx(loss.item(), rel=1e-6)
    assert shift == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-6, abs=1e-12)
    torch.testing.assert_close(mine, case.packed(logp.grad), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.labelled])
def test_layout_micro_batches_change_no_loss_of_single_responses(name):
    want, gradient, shift = labelled(name, Case(4), steps=2)
    got, mine, same = labelled(name, Case(4), parts=[[7, 9], [0, 1, 8, 2], [3], [4, 5, 6]], steps=2)
    assert got == pytest.approx(want, rel=1e-12) and same == shift
    torch.testing.assert_close(mine, gradient, rtol=1e-10, atol=1e-14)


def test_bco_by_its_formula():
    ratio = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    wanted = torch.tensor([True, False, True])
    want = -logsigmoid(torch.tensor([0.3 * 0.5 - 0.2, 0.3 + 0.2, 0.3 * 2 - 0.2], dtype=torch.float64))
    torch.testing.assert_close(bco(Labelled(ratio, wanted), 0.2, beta=0.3), want)


def test_bco_keeps_half_of_each_label_and_no_step_that_is_not_finite():
    """Three steps: both labels, wanted ones alone, a nan. Log-ratios are 1 a token of a response."""
    batch, ones = Case().batch(), torch.ones(sum(map(sum, zip(ASKED, ASKED, strict=True))) + sum(map(sum, SAID)))
    batch.token["ref_logp"] = torch.zeros_like(ones, dtype=torch.float64)
    said = [n for pair in SAID for n in pair]
    numbers = iter([1.0, 2.0, math.nan, 5.0])
    policy = SimpleNamespace(logprobs=lambda share, *_: (torch.full_like(share.token["ref_logp"], next(numbers)), None))
    objective = LabelledObjective("bco", PreferenceMethod(beta=0.5), policy, ALONE)  # type: ignore[arg-type]
    won, lost = sum(said[0::2]), sum(said[1::2])
    assert objective.prepare(batch, 0).shift == pytest.approx(0.5 * (won / 5 + lost / 5) / 2)
    wanted = batch.select(torch.tensor([0, 2, 4, 6, 8]))
    want = 0.5 * ((won + 2 * won) / 10 + lost / 5) / 2
    assert objective.prepare(wanted, 0).shift == pytest.approx(want)
    assert objective.prepare(batch, 0).shift == pytest.approx(want), "a nan is left out"
    assert objective.prepare(batch, MEASURE).shift == pytest.approx(want), "an evaluation moves nothing"


def test_settings_know_the_losses():
    for name in settings.METHODS:
        assert settings.losses_of(settings.PreferenceMethod(method=name)), name  # type: ignore[arg-type]
