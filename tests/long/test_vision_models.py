"""Every family that reads images trains and samples right on images, or is refused by name.

Writes docs/results/vision_models.json, and from it the second table of docs/models.md; takes some minutes. Each family
is a tiny random model, trained for two steps on sequences that show no, one and two images. Numbers are compared with
plain transformers in this process, one sequence at a time; policies and engines run in processes of their own.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.policy.megatron.families import FAMILIES as CONVERTED
from tests.builds import no_vllm
from tests.engines.family_checks import Facts, relative
from tests.long.family_ranks import reason
from tests.long.model_table import ROOT, check, keep
from tests.ranks.cases import build_policy, config, full_weights, gradients_of, push_folder
from tests.ranks.harness import RankError, run_ranks
from tests.unit.test_hf_engine import run
from tests.unit.test_hf_engine_images import differs, requests_of
from tests.unit.test_vision_policy import alone_in, numbers_alone_in
from tests.unit.vision_models import FAMILIES
from tests.unit.vision_packs import batch_of, facts, save

pytestmark = pytest.mark.timeout(1800)
RESULTS, BEGIN = ROOT / "docs" / "results" / "vision_models.json", "<!-- table of families with images -->"
SHOWN: list[tuple[int, ...]] = [(), (0,), (1, 0), (2, 2)]
"""Images of the prompts that the HF engine samples from."""
SAMPLED = ("rows", "mirrored", "changed tower", "after level 2")
"""Parts of the vLLM probe whose samples are compared."""


# ── in processes of their own ────────────────────────────────────────────────


def checked(policy: Any, role: str) -> list[str]:
    """Choose a model's form as a job's start does; return the lines that it prints."""
    from spmdrl.policy.self_check import choose_form

    lines: list[str] = []
    choose_form(policy, role, f"--model.path {policy.hf_config.model_type}", lines.append)
    return lines


def trained(world: Any, family: str, folder: str, out: str, rank: int) -> dict[str, Any]:
    """Train a policy, with adapters of a rank or whole, save it to `out`, and read log p and the next gradient.

    Without adapters, the HF engine samples with the saved weights, too.
    """
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.objectives.likelihood import SftObjective

    cfg = config(
        model={"path": folder}, lora={"rank": rank, "alpha": 8} if rank else {}, policy={"share_prompts": True}
    )
    policy, batch = FsdpPolicy(cfg, world, 100, adapt=bool(rank)), batch_of(family)
    found: dict[str, Any] = {"lines": checked(policy, "policy"), "form": policy.form}
    policy.exclude(facts(family)[0].never)
    objective = SftObjective("nll", world.data_peers)
    for _ in range(2):
        policy.update(batch, objective)
    Path(out).mkdir(parents=True)
    policy.save(Path(out))
    found["logp"] = policy.logprobs(batch, 1.0)[0]
    if not rank:
        found["gradient"] = gradients_of(policy, lambda: policy.update(batch, objective))[0]
        found["samples"] = sampled(world, family, f"{out}/model")
    return found


def sampled(world: Any, family: str, folder: str) -> dict:
    """Return the HF engine's completions of `asked`."""
    from spmdrl.engines.hf.engine import HFEngine

    engine = HFEngine(config(model={"path": folder}), world, {2})
    push_folder(engine, folder)
    return run(engine, asked(family))


def asked(family: str) -> list:
    """Return sampled and greedy requests."""
    return requests_of(family, SHOWN) + requests_of(family, SHOWN, first=20, temperature=0.0)


def divided(world: Any, family: str, folder: str) -> torch.Tensor:
    """Return log p of the batch's tokens, by ranks that divide the tokens of a pack."""
    policy = build_policy(config(model={"path": folder}, parallel={"sp": world.sp_size}), world)
    checked(policy, "policy")
    policy.exclude(facts(family)[0].never)
    return policy.logprobs(batch_of(family), 1.0)[0]


def valued(world: Any, family: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values of the batch's tokens by a critic with random weights in its head, and these weights [1, H]."""
    from spmdrl.policy.fsdp.policy import FsdpPolicy

    policy = FsdpPolicy(config(model={"path": folder}, policy={"share_prompts": True}), world, 1, head="value")
    checked(policy, "critic")
    weight = policy.model.hf.score.weight
    with torch.no_grad():
        weight.to_local().copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return policy.values(batch_of(family)), full_weights(policy)["score.weight"]


# ── comparisons with plain transformers ──────────────────────────────────────


def plain(folder: Path) -> Any:
    """Load a folder by transformers alone, with plain attention, in float32."""
    from transformers import AutoModelForImageTextToText

    kind = AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def policy_facts(family: str, folder: Path, out: Path, rank: int) -> dict[str, Any]:
    """Return the facts of a policy after two steps, and of the HF engine with its weights."""
    result = Facts("policy")
    try:
        [found] = run_ranks(trained, 1, family, str(folder), str(out), rank)
    except RankError as error:
        result.error = reason(error)
        return kept(result)
    (vision, _), batch, hf = facts(family), batch_of(family), plain(out / "model")
    mask = batch.token["mask"]
    logp = numbers_alone_in(hf, vision, batch, vision.never)[0]
    (-logp.sum() / mask.sum()).backward()
    result.stage, result.form, result.lines = "", found["form"], found["lines"]
    result.trainer = (found["logp"] - logp).abs().max().item()
    result.moved = (alone_in(plain(folder), vision, batch) - alone_in(hf, vision, batch)).abs().max().item()
    if not rank:
        named = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
        result.gradient = relative(found["gradient"], named)
        # Greedy tokens are compared as well.
        result.engine, result.greedy = differs(hf, family, asked(family), found["samples"]), True
    return kept(result)


def kept(result: Facts) -> dict[str, Any]:
    """Return facts as a row of the table holds them."""
    return asdict(result) | {"wrong": result.wrong()}


def vllm_facts(file: Path) -> dict[str, Any]:
    """Return the facts of a family that vLLM's probe wrote."""
    found, result = json.loads(file.read_text()), Facts()
    if "failed" in found:
        result.stage, result.error = "start", found["failed"].strip().splitlines()[-1]
    else:
        result.engine = max(found[part]["engine_hf"] for part in SAMPLED)
    return kept(result)


def ulysses_error(family: str, folder: Path) -> float | str:
    """Return the largest difference of log p on two ranks, or why it is refused."""
    vision = facts(family)[0]
    try:
        found = run_ranks(divided, 2, family, str(folder), sp=2)[0]
    except RankError as error:
        return reason(error)
    with torch.no_grad():
        want = numbers_alone_in(plain(folder), vision, batch_of(family), vision.never)[0]
    return (found - want).abs().max().item()


def critic_error(family: str, folder: Path) -> float | str:
    """Return the largest difference of a critic's values from transformers' states times its head, or the refusal."""
    try:
        [(found, weight)] = run_ranks(valued, 1, family, str(folder))
    except RankError as error:
        return reason(error)
    hf, batch, states = plain(folder), batch_of(family), []
    # The head of the language model is the last layer: its input is what a critic's head reads.
    hf.get_output_embeddings().register_forward_pre_hook(lambda module, given: states.append(given[0][0]))
    alone_in(hf, facts(family)[0], batch)
    # A value is read before its token.
    want = torch.cat([torch.nn.functional.pad(x[:-1] @ weight[0], (1, 0)) for x in states])
    return ((found - want) * batch.token["mask"]).abs().max().item()


# ── the table ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Measure all families."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("vllm")
    if not no_vllm():
        command = [sys.executable, "-m", "tests.engines.vision_probe", str(out), *FAMILIES]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL)
    found = {}
    for family in FAMILIES:
        folder = Path(save(family, models / family))
        found[family] = {"megatron": family in CONVERTED}
        found[family] |= {"vllm": vllm_facts(out / f"{family}.json")} if not no_vllm() else {}
        for name, rank in (("hf", 0), ("lora", 4)):
            found[family][name] = policy_facts(family, folder, models / f"{family}_{name}", rank)
        found[family] |= {"ulysses": ulysses_error(family, folder), "critic": critic_error(family, folder)}
    keep(found, RESULTS, BEGIN, FAMILIES)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_a_family_is_right_on_images_or_refused(rows, family):
    check(rows[family])
    # The HF engine and the trainer refuse none.
    assert not rows[family]["hf"]["error"] and not rows[family]["lora"]["error"]
