"""Preference learning on own samples: the pairs of the rewards, the loss of transformers, the same on any layout."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.online_preference import OnlinePreferenceConfig, check_online_preference
from spmdrl.config.schema import ParallelConfig
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import balance
from spmdrl.data.preferences import CHOSEN, REJECTED
from spmdrl.hub.resolve import resolve
from spmdrl.rl.build import build_run
from spmdrl.rl.online_preference import OnlinePreference
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import small_model
from tests.ranks.demo import Interrupted, dying, metrics, untimed
from tests.ranks.given import small_run, weights, with_sections
from tests.ranks.harness import run_ranks
from tests.ranks.test_shared_prompts import float64_norm

LETTERS = Path(__file__).parents[2] / "recipes" / "own" / "letters.py"
"""A reward of several values: the share of letters in the right place."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    """A reference that is not the policy, of its architecture."""
    return small_model(tmp_path_factory.mktemp("reference"), seed=5)


def settings(folder: str, *sections: dict) -> OnlinePreferenceConfig:
    """Settings of a run of four steps on the demo's prompts, whose reward has many values."""
    Path(folder).mkdir(exist_ok=True)
    more = dict(
        reward={"function": f"{LETTERS}:compute_score"},
        # An eps above the rounding of small gradients: Adam divides by their size.
        optimizer={"lr": 1e-3, "eps": 1e-2},
        rollout={"samples_per_prompt": 4},
    )
    return with_sections(OnlinePreferenceConfig(), small_run(folder), more, *sections)


def opened(world, folder: str, sections: dict, stop_after: int = 0):
    """Opens a run that stops as if it was killed once step `stop_after` is done; 0: never."""
    if sections.get("policy", {}).get("share_prompts"):
        from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

        Qwen2RMSNorm.forward = float64_norm
    if parallel := sections.get("parallel"):
        world = world_from_group(ParallelConfig(**parallel), 1, torch.device("cpu"), world.rank, timedelta(seconds=60))
    cfg = settings(folder, sections)
    check_online_preference(cfg, world.size)
    return dying(build_run(Session(cfg, world, Timer()), OnlinePreference), stop_after)


def trained(world, folder: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    """Trains; returns the weights of a rank that trains, and those of a reference that moves."""
    run = opened(world, folder, sections, stop_after)
    with suppress(Interrupted):
        train(run)
    run.close()
    models = run.models
    moved = weights(models.reference, "reference.") if models.policy and models.keep_reference else {}
    return weights(models.policy) | moved if models.policy else {}


def first_gradient(world, folder: str, sections: dict) -> dict:
    """Returns the gradient of the first step, whole, what it says of itself, and this rank's samples and pairs."""
    run = opened(world, folder, sections)
    with run.memory.rollout_phase():
        packed = run.method.pack(run.experience(0).episodes, 0)
    with run.memory.training_phase():
        batch = balance(packed, run.world)
        pairs, stats = run.method.score(batch)
    policy, objective = run.models.policy, run.method.objective()
    shared = objective.prepare(pairs, 0)
    stats.merge(policy.gradient(policy.microbatches(pairs), objective, shared))
    found = {name: p.grad.full_tensor().detach().clone() for name, p in policy.model.named_parameters()}
    run.close()
    sums = stats.reduce(lambda x, op: all_reduce(x, op, run.world.data_group))
    found |= {f"told.{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    return found | {"samples": rows(batch), "pairs": rows(pairs)}


def rows(batch: Batch) -> list[tuple]:
    """Position, sample, reward, tokens and mask of each sequence."""
    columns = (batch.seq[name].tolist() for name in ("position", "sample", "reward"))
    tokens = (batch.token[name].split(batch.lengths.tolist()) for name in ("tokens", "mask"))
    return list(zip(*columns, *tokens, strict=True))


LAYOUTS = [
    (2, {"policy": {"max_tokens_per_microbatch": 64, "share_prompts": False}}),
    (2, {"parallel": {"sp": 2}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]
CASES = {
    "dpo": ({}, LAYOUTS),
    "weighted list": ({"loss": ("sppo_hard", "sft=0.5"), "weighted": True, "gap": 0.3}, LAYOUTS[2:]),
    "sorted": ({"loss": ("aot",)}, LAYOUTS[2:]),
    "raft": ({"method": "raft", "least_reward": 0.4}, LAYOUTS[1:]),
}
SHARED = {"share_prompts": True, "max_tokens_per_microbatch": 48}


@pytest.mark.parametrize("case", CASES)
def test_layout_does_not_change_the_gradient_of_own_pairs(case, reference, tmp_path):
    chosen, layouts = CASES[case]
    sections = {"preference": chosen} | ({} if case == "raft" else {"reference": {"path": reference}})
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), sections)
    assert 0 < len(want.pop("pairs")) <= 16 and len(want.pop("samples")) == 32
    for number, (size, more) in enumerate(layouts):
        for got in run_ranks(first_gradient, size, str(tmp_path / str(number)), sections | more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_layout_with_a_reward_model_shared_prompts_and_ranks_without_a_prompt(reference, tmp_path):
    """Two prompts on four ranks, rewards of a function and a model together, a prompt once for both sides."""
    model = small_model(tmp_path / "model", seed=9, scalar=True)
    sections = {"reward": {"function": f"{LETTERS}:compute_score", "model": model, "model_coef": 0.1}}
    sections |= {"reference": {"path": reference}, "policy": SHARED}
    sections["rollout"] = {"prompts_per_step": 2, "samples_per_prompt": 6}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), sections)
    samples, pairs = want.pop("samples"), want.pop("pairs")
    assert len(samples) == 12 and len(pairs) in (2, 4) and want["told.reward/model"].abs() > 0
    fifths = [row[2] * 5 for row in samples]
    assert any(abs(x - round(x)) > 1e-6 for x in fifths), "the model's score is in the reward"
    for got in run_ranks(first_gradient, 4, str(tmp_path / "four"), sections):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_layout_two_ranks_that_score_have_reward_model_and_reference(reference, tmp_path):
    model = small_model(tmp_path / "model", seed=9, scalar=True)
    more = {"reward": {"function": f"{LETTERS}:compute_score", "model": model}, "reference": {"path": reference}}
    more["run"] = {"steps": 2}
    (one,) = run_ranks(trained, 1, str(tmp_path / "one"), more)
    apart = {"parallel": {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 2}}
    weights = [each for each in run_ranks(trained, 4, str(tmp_path / "four"), more | apart) if each]
    assert len(weights) == 1
    for name, value in one.items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-6, atol=1e-8)


def test_parity_pairs_are_the_extremes_and_their_loss_is_that_of_transformers(reference, tmp_path):
    """log p at the temperature of sampling, from full logits; the first of the best and of the worst samples."""
    from transformers import AutoModelForCausalLM

    more = {"reference": {"path": reference}, "preference": {"beta": 0.3, "gap": 0.2}}
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "run"), more)
    groups: dict[int, list[tuple]] = {}
    for row in got["samples"]:
        groups.setdefault(row[0], []).append(row)
    models = [AutoModelForCausalLM.from_pretrained(x, dtype=torch.float64) for x in (resolve("tiny"), reference)]

    def ratio(row: tuple) -> torch.Tensor:
        *_, tokens, mask = row
        sums = []
        for model in models:
            logp = torch.log_softmax(model(tokens[None]).logits[0, :-1] / 0.8, -1)
            sums.append(logp.gather(1, tokens[1:, None])[:, 0][mask[1:]].sum())
        return sums[0] - sums[1].detach()

    losses, sides = [], []
    for group in groups.values():
        best, worst = max(group, key=lambda x: x[2]), min(group, key=lambda x: x[2])
        # Rewards are fifths.
        if round(5 * best[2]) - round(5 * worst[2]) > 1:
            losses.append(-torch.nn.functional.logsigmoid(0.3 * (ratio(best) - ratio(worst))))
            sides += [(best, CHOSEN), (worst, REJECTED)]
    assert 2 < len(losses) < 8, "some prompts are left out"
    for (position, sample, reward, tokens, _), (row, side) in zip(got["pairs"], sides, strict=True):
        assert (position, sample, reward) == (row[0], side, row[2]) and torch.equal(tokens, row[3])
    want = torch.stack(losses).mean()
    want.backward()
    assert got["told.loss"].item() == pytest.approx(want.item(), rel=1e-9)
    assert got["told.pairs/kept"].item() == pytest.approx(len(losses) / 8)
    assert got["told.logp_diff/mean"].item() < 1e-5, "the engine's log p is the policy's"
    for name, p in models[0].named_parameters():
        if (mine := got.get(f"hf.{name}")) is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_resume_with_a_reference_that_moves_is_exact(dtype, tmp_path):
    """In bfloat16 the average is kept in float32, here and in the checkpoint."""
    more = {"reference": {"refresh_every": 1, "mix": 0.05}, "checkpoint": {"at_end": False, "every": 1}}
    more["model"] = {"path": "tiny", "dtype": dtype}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), more)
    run_ranks(trained, 1, str(tmp_path / "cut"), more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), more)
    moved = [value for name, value in whole.items() if name.startswith("reference.")]
    assert any((value != value.bfloat16()).any() for value in moved)
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))


def test_layout_split_placement_and_a_reference_on_its_own_rank_learn_the_same(reference, tmp_path):
    more = {"reference": {"path": reference}}
    (one,) = run_ranks(trained, 1, str(tmp_path / "one"), more)
    apart = {"parallel": {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 1}}
    weights = [each for each in run_ranks(trained, 4, str(tmp_path / "four"), more | apart) if each]
    assert len(weights) == 2
    for each in weights:
        for name, value in one.items():
            torch.testing.assert_close(each[name], value, rtol=1e-6, atol=1e-8)


def test_without_a_pair_nothing_is_learnt(tmp_path):
    """All samples of a prompt have one reward: neither weights nor their version move."""
    (got,) = run_ranks(trained, 1, str(tmp_path / "run"), {"preference": {"gap": 1.0}})
    before = weights_of_start()
    for name, value in got.items():
        assert torch.equal(value, before[name]), name
    for row in metrics(tmp_path / "run"):
        assert row["pairs/kept"] == 0 and row["updates_skipped"] == 1 and row["version"] == 0


def weights_of_start() -> dict[str, torch.Tensor]:
    """Weights of the policy that ships."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).state_dict()


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--preference.loss kto", "--preference.loss kto: needs labelled responses; take a loss that compares pairs"),
        ("--preference.loss dpoo", "--preference.loss dpoo: unknown loss"),
        ("--preference.method raft --preference.gap 0.1", "--preference.gap: only the best sample"),
        ("--preference.gap -1", "--preference.gap -1.0: must be 0 or more"),
        ("--reference.refresh-every 2 --lora.rank 4", "--reference.refresh-every: the reference has no adapters"),
        ("--rollout.samples-per-prompt 1", "--rollout.samples-per-prompt 1: must be at least 2, for a pair"),
        ("--preference.least-reward nan", "--preference.least-reward nan: must be a finite number"),
        (
            "--policy.max-tokens-per-microbatch 600 --policy.no-share-prompts",
            "--policy.max-tokens-per-microbatch 600: must hold a pair, so at least 1040",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags, said):
    config = from_command_line(flags.split(), schema=OnlinePreferenceConfig).config
    with pytest.raises(ConfigError) as error:
        check_online_preference(config, 1)
    assert said in str(error.value)
