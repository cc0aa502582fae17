"""Distillation over ranks: the divergence of transformers, the same on any layout, none from itself."""

import dataclasses
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.schema import ParallelConfig
from spmdrl.data.batch import balance
from spmdrl.distill import train
from spmdrl.hub.resolve import resolve
from spmdrl.rl.build import build_run
from spmdrl.rl.distillation import DistillObjective, reader_of, teach
from spmdrl.session.session import Session
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Timer
from tests.ranks.cases import small_model
from tests.ranks.demo import Interrupted, dying, metrics, untimed
from tests.ranks.harness import run_ranks
from tests.unit.test_kernel_distill import definition


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A teacher of another width than the student, whose vocabulary is padded from 47 tokens to 64."""
    folder = tmp_path_factory.mktemp("teacher")
    return small_model(folder, seed=5, hidden_size=48, vocab_size=64, tie_word_embeddings=False)


def settings(folder, teacher: str, **sections) -> DistillationConfig:
    """Settings of a job of four steps on the demo's prompts."""
    base = dict(
        run={"dir": str(folder), "steps": 4, "seed": 3},
        model={"path": "tiny", "dtype": "float64"},
        reference={"path": teacher},
        optimizer={"lr": 1e-3},
        # Qwen2's norms go through float32, where shared prompts round otherwise: see test_shared_prompts.
        policy={"max_tokens_per_microbatch": 256, "share_prompts": False},
        rollout={
            "engine": "hf",
            "prompts_per_step": 8,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "max_prompt_tokens": 16,
            "assignment": "static",
            "temperature": 0.8,
        },
        eval={"every": 0},
        checkpoint={"at_end": False},
        tracking={"trackers": ("jsonl",)},
        data={"limit": 64},
    )
    cfg = DistillationConfig()
    for name in base.keys() | sections.keys():
        values = base.get(name, {}) | sections.get(name, {})
        cfg = dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **values)})
    return cfg


def opened(world, folder: str, teacher: str, sections: dict, stop_after: int = 0):
    Path(folder).mkdir(exist_ok=True)
    if parallel := sections.get("parallel"):
        world = world_from_group(ParallelConfig(**parallel), 1, torch.device("cpu"), world.rank, timedelta(seconds=60))
    return dying(build_run(Session(settings(folder, teacher, **sections), world, Timer())), stop_after)


def trained(world, folder: str, teacher: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    """Trains; returns the weights, whole, of a rank that trains."""
    run = opened(world, folder, teacher, sections, stop_after)
    with suppress(Interrupted):
        train(run)
    run.close()
    policy = run.models.policy
    return {name: p.full_tensor().detach().clone() for name, p in policy.named_weights()} if policy else {}


def first_gradient(world, folder: str, teacher: str, sections: dict) -> dict[str, torch.Tensor]:
    """Returns the gradient of the first step, whole, what it says of itself, and the sequences of this rank."""
    run = opened(world, folder, teacher, sections)
    with run.memory.rollout_phase():
        done = run.experience(0)
    with run.memory.training_phase():
        batch = balance(run.pack(done.episodes, 0), run.world)
        teach(batch, run.models, run.cfg)
    policy, reader = run.models.policy, reader_of(run.cfg)
    head = None if run.cfg.distill.top_k else run.models.reference.output_head()
    objective = DistillObjective(run.cfg, reader, head, run.peers)
    stats = policy.gradient(policy.microbatches(batch), objective, objective.prepare(batch, 0))
    found = {name: p.grad.full_tensor().detach().clone() for name, p in policy.model.named_parameters()}
    run.close()
    sums = stats.reduce(lambda x, op: run.world.data_peers.sum(x) if op == "sum" else x)
    found |= {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    lengths = batch.lengths.tolist()
    return found | {"rows": list(zip(*(batch.token[k].split(lengths) for k in ("tokens", "mask")), strict=True))}


LAYOUTS = [
    (2, {"policy": {"max_tokens_per_microbatch": 64}}),
    (2, {"parallel": {"sp": 2}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]
CASES = {
    "reverse KL": ({"beta": 1.0}, LAYOUTS),
    "JSD of the likeliest": ({"beta": 0.3, "top_k": 8}, LAYOUTS[2:]),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_does_not_change_the_gradient_of_distillation(case, teacher, tmp_path):
    distill, layouts = CASES[case]
    sections = {"distill": distill}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), teacher, sections)
    rows = want.pop("rows")
    assert len(rows) == 16 and all(value.abs().max() > 0 for value in want.values())
    for number, (size, more) in enumerate(layouts):
        for got in run_ranks(first_gradient, size, str(tmp_path / str(number)), teacher, sections | more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("distill", [{"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0, "top_k": 46}], ids=str)
def test_parity_the_divergence_is_that_of_full_logits_in_transformers(distill, teacher, tmp_path):
    """All tokens but one, and that one as the bucket of the others, are all tokens."""
    from transformers import AutoModelForCausalLM

    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "run"), teacher, {"distill": distill})
    student, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        for folder in (resolve("tiny"), teacher)
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, mask in got["rows"]:
        logp = [
            torch.log_softmax(model(tokens[None]).logits[0, :-1, :47] / 0.8, -1)[mask[1:]]
            for model in (student, theirs)
        ]
        total = total + definition(logp[0], logp[1].detach(), distill["beta"]).sum()
        count += int(mask.sum())
    (total / count).backward()
    assert got["loss"].item() == pytest.approx((total / count).item(), rel=1e-9)
    assert got["divergence/mean"].item() == pytest.approx((total / count).item(), rel=1e-9)
    for name, p in student.named_parameters():
        mine = got.get(f"hf.{name}")
        if mine is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distill", [{"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0, "top_k": 4}], ids=str)
def test_a_student_that_is_its_teacher_learns_nothing(distill, dtype, tmp_path):
    """To the last bit: no step is taken, so the weights and their version stay."""
    more = {"distill": distill, "model": {"dtype": dtype}, "run": {"steps": 2}, "policy": {"offload": "none"}}
    two = run_ranks(trained, 2, str(tmp_path / "run"), "tiny", more)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32).state_dict()
    for name, value in two[0].items():
        assert torch.equal(value, plain[name]), name
    for row in metrics(tmp_path / "run"):
        assert row["grad_norm"] == 0 and row["updates_skipped"] == 1 and row["version"] == 0
        assert abs(row["divergence/mean"]) < 1e-6


def test_layout_a_teacher_on_ranks_of_its_own_teaches_the_same(teacher, tmp_path):
    more = {"distill": {"beta": 0.5, "top_k": 8}}
    (one,) = run_ranks(trained, 1, str(tmp_path / "one"), teacher, more)
    apart = {"parallel": {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 1}}
    four = run_ranks(trained, 4, str(tmp_path / "four"), teacher, more | apart)
    assert sum(bool(weights) for weights in four) == 2
    for weights in filter(None, four):
        for name, value in one.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-8)
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "four"), strict=True):
        assert a["divergence/mean"] == pytest.approx(b["divergence/mean"], rel=1e-6)
    rows = metrics(tmp_path / "one")
    assert rows[-1]["divergence/mean"] < rows[0]["divergence/mean"] - 0.01, "it learns"


def test_resume_of_a_distillation_is_exact(teacher, tmp_path):
    more = {"distill": {"beta": 0.5}, "checkpoint": {"at_end": False, "every": 2}}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), teacher, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), teacher, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), teacher, more)
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))
