"""A loss taken chunk by chunk in the head is the loss of the whole micro-batch: same gradients, same numbers."""

import pytest
import torch

from spmdrl.algos.losses import LOSSES
from spmdrl.policy import heads
from spmdrl.policy.models import Models
from spmdrl.policy.objectives.reinforcement import PolicyObjective
from spmdrl.rl.compose import compose
from tests.ranks.cases import build_policy, config, float64_softmax, gradients_of, relative, small_model, update_models
from tests.ranks.cases import synthetic_batch as episodes
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
"""Settings, and whether they may be taken in chunks."""


def both(world, folder: str, own: str, separable: str) -> dict:
    """Returns for each case, whole and chunked: metrics, gradients of every optimizer step, calls of the head."""
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
                    models.policy, lambda m=models, c=cfg, s=seen: s.update(update_models(c, world, m, episodes()))
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
    by_sequence = {name for name, row in LOSSES.items() if row.scope != "token"}
    assert by_sequence == {"gspo", "gspo_token", "gmpo", "sppo"}


BFLOAT16 = {
    "grpo, KL, tis": {"algo": {"kl_coef": 0.05, "old_logp": "policy"}, "correction": {"kind": "tis_token"}},
    "engine's logp": {"algo": {"old_logp": "rollout", "loss": "reinforce"}, "correction": {"kind": "tis_token"}},
    "a ratio": {"algo": {"old_logp": "rollout", "loss": "cispo", "clip_high": 1e3}, "correction": {"kind": "none"}},
}


def in_bfloat16(world, folder: str) -> dict:
    """Returns for each case, whole and chunked: types of the loss's inputs, its derivative at each logp, gradients."""
    out, plain = {}, PolicyObjective.token_losses
    for name, sections in BFLOAT16.items():
        found = []
        for chunked in (False, True):
            types: set[tuple[str, torch.dtype]] = set()
            slopes: list[torch.Tensor] = []

            def token_losses(self, shared, episodes, logp, entropy, x, types=types, slopes=slopes):
                types |= {(column, values.dtype) for column, values in {**x, "logp": logp}.items()}
                loss, stats = plain(self, shared, episodes, logp, entropy, x)
                if logp.requires_grad:
                    slopes.append(torch.autograd.grad(loss.sum(), logp, retain_graph=True)[0][x["mask"]])
                return loss, stats

            PolicyObjective.token_losses = token_losses
            policy = {"max_tokens_per_microbatch": 64, "chunked_loss": chunked}
            cfg = config(**sections | {"policy": policy, "model": {"dtype": "bfloat16", "path": folder}})
            models = Models(
                build_policy(cfg, world), build_policy(cfg, world, False) if "reference" in compose(cfg).needs else None
            )
            grads = gradients_of(models.policy, lambda m=models, c=cfg: update_models(c, world, m, episodes()))
            found.append((types, torch.cat(slopes), torch.cat([x.flatten() for x in grads[0].values()])))
        out[name] = found
    PolicyObjective.token_losses = plain
    return out


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    return run_ranks(in_bfloat16, 2, small_model(tmp_path_factory.mktemp("bfloat16")))


@pytest.mark.parametrize("case", BFLOAT16)
def test_a_bfloat16_model_is_given_the_columns_of_the_loss_unrounded(case, bfloat16):
    for rank in bfloat16:
        (want, slopes, whole), (got, chunked, apart) = rank[case]
        # One type for each column, so none was rounded on its way to a chunk.
        assert got == want and {"logp", "advantages", "rollout_logp", "weight"} < dict(got).keys()
        assert {kind for _, kind in got if kind.is_floating_point} == {torch.float32, torch.float64}
        assert len(slopes) == len(chunked) > 20 and slopes.abs().max() > 1e-3
        assert (slopes - chunked).abs().max() < 1e-5 * slopes.abs().max()
        # The matmuls of the head are in bfloat16, each kernel's in its own order.
        assert (apart - whole).norm() < 0.02 * whole.norm()
