"""A loss taken chunk by chunk in the head is the loss of the whole micro-batch: same gradients, same numbers."""

import pytest

from spmdrl.algos.losses import LOSSES, TOKEN_LOSSES
from spmdrl.compose import compose
from spmdrl.models import Models
from spmdrl.policy import heads
from tests.ranks.cases import build_policy, config, float64_softmax, gradients_of, relative, small_model, update_models
from tests.ranks.cases import synthetic_batch as trajectories
from tests.ranks.harness import run_ranks

OWN = """
import torch

def own(x):
    loss = -torch.where(x.mask, x.advantages * x.logp, 0.0)
    return loss, {"own": loss.detach()}
"""
CASES: dict[str, tuple[dict, bool]] = {
    "grpo, KL, entropy": ({"algo": {"kl_coef": 0.05, "entropy_coef": 0.01, "updates_per_step": 2}}, True),
    "dapo, positive, tis": (
        {"algo": {"preset": "dapo", "positive_coef": 0.5}, "correction": {"kind": "tis_token"}},
        True,
    ),
    "kl_cov": ({"algo": {"preset": "kl_cov", "cov_ratio": 0.2, "updates_per_step": 2}}, True),
    "engine's logp": ({"algo": {"old_logp": "rollout"}, "correction": {"kind": "none"}}, True),
    "shared prompts": ({"policy": {"share_prompts": True}}, True),
    "sequence weights of a pass": ({"correction": {"kind": "tis_sequence"}, "algo": {"old_logp": "policy"}}, True),
    "gspo": ({"algo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1}}, False),
    "sequence weights of the update": (
        {"correction": {"kind": "tis_sequence"}, "algo": {"preset": "reinforce_pp", "old_logp": "update"}},
        False,
    ),
    "own": ({}, False),
    "own, separable": ({}, True),
}
"""What is set, and whether it may be taken in chunks."""


def both(world, folder: str, own: str, separable: str) -> dict:
    """Case -> for whole and chunked: metrics, gradients of every optimizer step, calls of the chunked head."""
    calls, plain = [], heads.chunked_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    heads.chunked_loss = counted
    out = {}
    for name, (sections, _) in CASES.items():
        found = []
        for chunked in (False, True):
            policy = {"max_tokens_per_microbatch": 64} | sections.get("policy", {}) | {"chunked_loss": chunked}
            algo = dict(sections.get("algo", {}))
            if name.startswith("own"):
                algo["loss"] = separable if name.endswith("separable") else own
            cfg = config(**sections | {"policy": policy, "algo": algo, "model": {"dtype": "float64", "path": folder}})
            models = Models(
                build_policy(cfg, world), build_policy(cfg, world, False) if "reference" in compose(cfg).needs else None
            )
            calls.clear()
            seen: dict = {}
            with float64_softmax():
                grads = gradients_of(
                    models.policy, lambda m=models, c=cfg, s=seen: s.update(update_models(c, world, m, trajectories()))
                )
            found.append((seen, grads, len(calls)))
        out[name] = found
    return out


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "sp 2"])
def found(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("chunked")
    (root / "own.py").write_text(OWN)
    (root / "separable.py").write_text(OWN + "\nown.token_separable = True\n")
    args = (small_model(root / "model"), f"{root / 'own.py'}:own", f"{root / 'separable.py'}:own")
    return run_ranks(both, request.param, *args, sp=request.param)


@pytest.mark.parametrize("case", CASES)
def test_layout_of_the_head_does_not_change_the_update(case, found):
    for rank in found:
        (want, gradients, none), (got, chunked, calls) = rank[case]
        assert none == 0
        assert (calls > 0) == CASES[case][1]
        assert want.keys() == got.keys() and len(gradients) == len(chunked)
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-10, abs=1e-12, nan_ok=True), name
        # A step that was taken apart: weights of the second one have moved.
        assert max(relative(a, b) for a, b in zip(chunked, gradients, strict=True)) <= 1e-10
        assert max(g.abs().max() for g in gradients[0].values()) > 1e-3


def test_losses_of_tokens_are_named():
    by_sequence = {name for name, loss in LOSSES.items() if loss not in TOKEN_LOSSES}
    assert by_sequence == {"gspo", "gspo_token", "gmpo", "sppo"}
