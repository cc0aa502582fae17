"""Law 2 with images: mixed rows of text and images on 1 and 2 ranks give one gradient, frozen parts stay as they are,
and a saved checkpoint is the model in transformers."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from spmdrl.config.divergence import DivergenceConfig
from spmdrl.config.schema import ParallelConfig
from spmdrl.hub.encode import encode
from spmdrl.hub.vision import part_of
from spmdrl.policy.contract import LossResult
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import build_models, exclude_placeholders
from spmdrl.policy.objectives.distillation import DistillObjective, TargetReader
from spmdrl.policy.objectives.likelihood import SftObjective
from spmdrl.policy.objectives.tokens import TokenObjective
from spmdrl.policy.self_check import choose_form
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Metrics
from tests.ranks.cases import build_policy, config, full_weights, gradients_of, relative, small_model
from tests.ranks.harness import run_ranks
from tests.unit.vision_models import tiny
from tests.unit.vision_packs import ROWS, batch_of, facts, save

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "idefics3"]
SHARES = {
    "2 ranks": [[0, 1, 4, 6], [2, 3, 5]],
    "no image on a rank": [[0, 1, 2, 3, 6], [4, 5]],
    "nothing": [range(7), []],
}
"""Rows of each of two ranks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: save(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def settings(folder: str, **sections):
    return config(model={"path": folder, "dtype": "float64"} | sections.pop("model", {}), **sections)


def share(family: str, rows) -> object:
    return batch_of(family).select(torch.tensor(list(rows), dtype=torch.int64))


def gradient_of(cfg, world, batch) -> dict[str, torch.Tensor]:
    """Builds a policy and makes one step; returns its gradient."""
    policy = build_policy(cfg, world)
    objective = SftObjective("nll", world.data_peers)
    return gradients_of(policy, lambda: policy.update(batch, objective))[0]


def gradients(world, folders):
    """Returns by family and layout the gradient on this many ranks, with micro-batches of one group each and of all."""
    out = {}
    for family, folder in folders.items():
        for name, rows in SHARES.items():
            mine = range(len(ROWS)) if world.size == 1 else rows[world.rank]
            for budget in (90, 400):
                for way in ("layers", "whole"):
                    policy = {"max_tokens_per_microbatch": budget, "share_prompts": budget == 400, "gather": way}
                    cfg = settings(folder, policy=policy)
                    out[family, name, budget, way] = gradient_of(cfg, world, share(family, mine))
            if world.size == 1:
                break
    return out


def test_layout_ranks_with_and_without_images_give_one_gradient(models):
    alone, (two, _) = run_ranks(gradients, 1, models)[0], run_ranks(gradients, 2, models)
    for (family, name, budget, way), got in two.items():
        want = alone[family, "2 ranks", 400, "whole"]
        assert relative(want, got) <= 1e-6, (family, name, budget, way)
    for key, got in alone.items():
        assert relative(alone[key[0], "2 ranks", 400, "whole"], got) <= 1e-6, key


def divided(world, folders):
    """Returns gradients with packs that are divided over the ranks (Ulysses)."""
    world = world_from_group(ParallelConfig(sp=world.size), 1, world.device, world.rank)
    return {f: gradient_of(settings(folder), world, batch_of(f)) for f, folder in folders.items()}


def test_layout_packs_with_images_divided_over_ranks_give_one_gradient(models):
    alone, divided_ = run_ranks(divided, 1, models)[0], run_ranks(divided, 2, models)[0]
    assert all(relative(alone[family], divided_[family]) <= 1e-6 for family in models)


def trained(world, folder, family, out, freeze):
    """Makes two steps and saves; returns weights before and after, and log p after them."""
    cfg = settings(folder, model={"freeze": freeze})
    policy, batch = build_policy(cfg, world), batch_of(family)
    before = full_weights(policy)
    for _ in range(2):
        policy.update(batch, SftObjective("nll", world.data_peers))
    Path(out).mkdir(exist_ok=True)
    policy.save(Path(out))
    state = {name for name, p in policy.model.named_parameters() if p in policy.optimizer.state}
    resumed = build_policy(cfg, world)
    resumed.load(Path(out))
    same = all(torch.equal(x, full_weights(policy)[n]) for n, x in full_weights(resumed).items())
    return before, full_weights(policy), policy.logprobs(batch, 1.0)[0], state, same


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("freeze", [(), ("vision",), ("vision", "projector")])
def test_frozen_parts_stay_and_a_checkpoint_is_the_model(models, family, freeze, tmp_path):
    from transformers import AutoModelForImageTextToText

    from tests.unit.test_vision_policy import alone_in

    before, after, logp, state, same = run_ranks(trained, 1, models[family], family, str(tmp_path / "c"), freeze)[0]
    vision, batch = facts(family)[0], batch_of(family)
    assert same
    for name, x in after.items():
        frozen = part_of(name, vision) in freeze
        assert torch.equal(x, before[name]) == frozen, name
        assert (f"hf.{name}" in state) != frozen
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "c" / "model", dtype=torch.float64)
    assert (alone_in(saved.eval(), vision, batch) - logp).abs().max() <= 1e-10
    assert json.loads((tmp_path / "c" / "model" / "config.json").read_text())["architectures"] == [type(saved).__name__]
    assert (tmp_path / "c" / "model" / "preprocessor_config.json").exists()


class Reinforced(TokenObjective):
    """A loss with gradients of logp and entropy, whose weights of tokens differ."""

    temperature, second, columns = 1.0, "entropy", frozenset()

    def __init__(self, peers, chunked):
        self.peers, self.chunked = peers, chunked

    def losses(self, logp, entropy, x):
        return (0.1 * entropy - logp) * x["weight"] * (x["tokens"] % 5 - 1), {}

    def columns_of(self, micro, shared):
        return {"weight": self.weights(micro, shared), "tokens": micro.token["tokens"]}

    def loss(self, micro, first_T, second_T, shared):
        loss, metrics = self.losses(first_T, second_T, self.columns_of(micro, shared))[0].sum(), Metrics()
        metrics.add_sum("loss", loss)
        return LossResult(loss, metrics)

    def token_loss(self, micro, shared):
        return (self.losses, self.columns_of(micro, shared)) if self.chunked else None


def without_placeholders(world, folder, family):
    """Returns logp and entropy, gradients of updates, and what a teacher with the same weights tells a student."""
    policy, batch, vision = build_policy(settings(folder), world), batch_of(family), facts(family)[0]
    before = policy.logprobs(batch, 1.0)[0]
    policy.exclude(vision.never)
    numbers, found = policy.logprobs(batch, 1.0), []
    top = policy.read(batch, 1.0, TargetReader(3, 320, torch.float64))[0]
    reader = TargetReader(0, 320, torch.float64)
    start = [p.detach().clone() for p in policy.shards]
    for chunked in (True, False):
        run = partial(policy.update, batch, Reinforced(world.data_peers, chunked))
        found += gradients_of(policy, run)
        for p, x in zip(policy.shards, start, strict=True):
            p.data.copy_(x)
    cfg = DivergenceConfig(beta=1.0)
    objective = DistillObjective(cfg, reader, {"reference": policy.output_head()}, 1.0, world.data_peers)
    objective.add_teacher(batch, "reference", policy)
    stats = policy.update(batch, objective).reduce(lambda x, op: x)
    return before, numbers, top, found, stats["divergence/mean"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_without_placeholders_is_transformers_with_masked_logits(models, family):
    from tests.unit.test_vision_policy import numbers_alone_in

    before, (logp, entropy), top, found, divergence = run_ranks(without_placeholders, 1, models[family], family)[0]
    vision, batch = facts(family)[0], batch_of(family)
    hf = tiny(family, torch.float64)
    want = numbers_alone_in(hf, vision, batch, vision.never)
    assert max((a - b).abs().max() for a, b in zip((logp, entropy), want, strict=True)) <= 1e-10
    mask = batch.token["mask"]
    assert (logp - before)[mask].min() > 1e-6, "without placeholders, all other tokens are likelier"
    assert not torch.isin(top[mask], torch.tensor(vision.never)).any()
    factor = (batch.token["tokens"] % 5 - 1) / mask.sum()
    ((0.1 * want[1] - want[0]) * factor).sum().backward()
    gradients = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    for got in found:
        # Norms go through float32, so gradients do too.
        assert relative(gradients, got) <= 1e-5
        assert not got.get("lm_head.weight", torch.zeros(320, 1))[list(vision.never)].any()
    assert divergence == 0


def excluded_ids(world, text, folder):
    """Returns the excluded ids of the models of runs that start from a model for text, and from one that sees."""
    out = []
    for path, rank, needs in (
        (text, 0, {"reference", "critic"}),
        (folder, 0, {"reference", "process"}),
        (folder, 2, {"reference"}),
    ):
        models = build_models(settings(path, lora={"rank": rank}), world, frozenset(needs))
        exclude_placeholders(models, config(model={"path": path}))
        # The reference of a policy with adapters is the policy without them.
        found = {name: getattr(each, "policy", each).model for name, each in models.language_models().items()}
        out.append({name: each.excluded for name, each in found.items()})
    return out


def test_the_language_models_of_a_run_exclude_the_placeholders_of_its_policy(models, tmp_path):
    text, seeing, adapted = run_ranks(excluded_ids, 1, small_model(tmp_path / "m"), models["qwen3_vl"])[0]
    never = facts("qwen3_vl")[0].never
    assert text == {"policy": (), "reference": ()}
    assert seeing == {"policy": never, "reference": never, "process": never}
    assert adapted == {"policy": never, "reference": never}


def on_text(world, folder):
    """Makes a step on rows without images, and a step with adapters on rows with images; returns what they changed."""
    out = []
    for rank, rows in ((0, [4, 5]), (4, range(len(ROWS)))):
        cfg = settings(folder, lora={"rank": rank})
        policy = FsdpPolicy(cfg, world, 100, True, adapt=bool(rank))
        before = full_weights(policy)
        policy.update(share("qwen3_vl", rows), SftObjective("nll", world.data_peers))
        out.append({name for name, x in full_weights(policy).items() if not torch.equal(x, before[name])})
    return out


def test_text_alone_leaves_the_tower_as_it_is_and_adapters_are_in_the_language_model(models):
    text, adapters = run_ranks(on_text, 1, models["qwen3_vl"])[0]
    assert text and not any(".visual." in name for name in text)
    assert adapters and all("language_model" in name and ".lora_" in name for name in adapters)


def refused(world, folder):
    try:
        build_policy(config(model={"path": folder, "freeze": ("vision",)}), world)
    except ValueError as error:
        return str(error)


def test_a_part_that_the_model_lacks_is_refused(tmp_path):
    assert "--model.freeze vision" in run_ranks(refused, 1, small_model(tmp_path / "m"))[0]


def looks(world, folders):
    """Checks each family as at a job's start; returns what the check says, alone and with features out of place."""
    out = {}
    for family, folder in folders.items():
        said = []
        policy = build_policy(settings(folder, policy={"share_prompts": True}), world)
        choose_form(policy, "policy", "--model.path x", said.append)
        with patch("spmdrl.policy.heads.encode", lambda *given: shifted(encode(*given))):
            choose_form(policy, "policy", "--model.path x", said.append)
        out[family] = *said, policy.form
    return out


def shifted(given: dict) -> dict:
    """Gives every placeholder the feature of the next one, as a wrong order of images would."""
    found = given["mm_encoder_outputs"]["image"].pooler_output
    parts = [found] if torch.is_tensor(found) else list(found)
    for part in parts:
        part.copy_(part.roll(1, 0))
    return given


def test_the_self_check_looks_at_images(models):
    """Packs in which features reach other placeholders are not used; transformers' own form, one sequence each, is."""
    for family, (right, wrong, form) in run_ranks(looks, 2, models)[0].items():
        assert "packed, tree" in right, (family, right)
        assert "states of sequences with images differ by" in wrong and form == "apart", (family, wrong)
