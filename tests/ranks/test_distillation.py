"""Distillation over ranks: the divergence of transformers, the same on any layout, none from itself."""

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.schema import ParallelConfig
from spmdrl.data.distribute import balance
from spmdrl.hub.resolve import resolve
from spmdrl.rl.build import build_run
from spmdrl.rl.distillation import Distillation
from spmdrl.session.session import Session
from spmdrl.spmd.mesh import world_from_group
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import small_model
from tests.ranks.demo import Interrupted, dying, metrics, untimed
from tests.ranks.given import small_run, with_sections
from tests.ranks.harness import RankError, run_ranks
from tests.unit.test_kernel_distill import definition


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A teacher of another width than the student, whose vocabulary is padded from 47 tokens to 64."""
    folder = tmp_path_factory.mktemp("teacher")
    return small_model(folder, seed=5, hidden_size=48, vocab_size=64, tie_word_embeddings=False)


def settings(folder, teacher: str, **sections) -> DistillationConfig:
    """Settings of a job of four steps on the demo's prompts."""
    more = dict(reference={"path": teacher}, optimizer={"lr": 1e-3})
    return with_sections(DistillationConfig(), small_run(folder), more, sections)


def opened(world, folder: str, teacher: str, sections: dict, stop_after: int = 0):
    Path(folder).mkdir(exist_ok=True)
    if parallel := sections.get("parallel"):
        world = world_from_group(ParallelConfig(**parallel), 1, torch.device("cpu"), world.rank, timedelta(seconds=60))
    return dying(build_run(Session(settings(folder, teacher, **sections), world, Timer()), Distillation), stop_after)


def trained(world, folder: str, teacher: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    """Trains; returns the weights, whole, of a rank that trains."""
    run = opened(world, folder, teacher, sections, stop_after)
    with suppress(Interrupted):
        train(run)
    run.close()
    policy = run.models.policy
    return {name: p.full_tensor().detach().clone() for name, p in policy.named_weights()} if policy else {}


def how_far_the_teacher_is(world, folder: str, teacher: str, sections: dict) -> float:
    """Trains; returns the largest difference between a weight of the teacher and of the student."""
    run = opened(world, folder, teacher, sections)
    train(run)
    run.close()
    both = (dict(model.named_weights()) for model in (run.models.reference, run.models.policy))
    left, right = ({name: p.full_tensor() for name, p in named.items()} for named in both)
    return max((left[name] - right[name]).abs().max().item() for name in left)


def first_gradient(world, folder: str, teacher: str, sections: dict) -> dict[str, torch.Tensor]:
    """Returns the gradient of the first step, whole, what it says of itself, and the sequences of this rank."""
    run = opened(world, folder, teacher, sections)
    with run.memory.rollout_phase():
        fresh = run.method.pack(run.experience(0).episodes, 0)
    with run.memory.training_phase():
        batch = balance(fresh, run.world)
        run.method.score(batch)
    policy = run.models.policy
    objective = run.method.objective()
    stats = policy.gradient(policy.microbatches(batch), objective, objective.prepare(batch, 0))
    found = {name: p.grad.full_tensor().detach().clone() for name, p in policy.model.named_parameters()}
    run.close()
    sums = stats.reduce(lambda x, op: run.world.data_peers.sum(x) if op == "sum" else x)
    found |= {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    lengths = batch.lengths.tolist()
    asked = {prompt.index: prompt for prompt in run.prompts.prompts}
    prompts = [asked[i] for i in batch.seq["prompt"].tolist()]
    columns = (batch.token[name].split(lengths) for name in ("tokens", "mask"))
    return found | {"rows": list(zip(*columns, prompts, batch.seq["position"].tolist(), strict=True))}


LAYOUTS = [
    (2, {"policy": {"max_tokens_per_microbatch": 64}}),
    (2, {"parallel": {"sp": 2}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]
CASES = {
    "reverse KL": ({"beta": 1.0}, LAYOUTS),
    "JSD of the likeliest": ({"beta": 0.3, "top_k": 8}, LAYOUTS[2:]),
    "told and given": (
        {"beta": 0.5, "given_per_step": 5, "teacher_template": "{prompt} {answer} {prompt}"},
        LAYOUTS[1:],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_does_not_change_the_gradient_of_distillation(case, teacher, tmp_path):
    distill, layouts = CASES[case]
    sections = {"distill": distill}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), teacher, sections)
    rows = want.pop("rows")
    assert len(rows) == 16 + distill.get("given_per_step", 0) and all(value.abs().max() > 0 for value in want.values())
    for number, (size, more) in enumerate(layouts):
        for got in run_ranks(first_gradient, size, str(tmp_path / str(number)), teacher, sections | more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def expected(rows: list, teachers: list, distill: dict):
    """The student in transformers, the sum of its divergences with their weights, by full logits, and the tokens.

    rows: tokens, mask, prompt and position of each sequence. teachers: folder, and weight as a function of the source.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    folders = [resolve("tiny"), *(folder for folder, _ in teachers)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for folder in folders]
    total, count, given = torch.zeros((), dtype=torch.float64), 0, 0
    for tokens, mask, prompt, position in rows:
        response, own = tokens[mask], tokens[~mask].tolist()
        told = own
        if "teacher_template" in distill:
            told = tokenizer(f"{prompt.content} {prompt.ground_truth} {prompt.content}").input_ids
        if position >= 8:
            said = [*tokenizer(prompt.ground_truth, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            assert response.tolist() == said[:8]
            given += 1
        logp = []
        for model in models:
            lead = told if logp else own
            logits = model(torch.cat([torch.tensor(lead), response])[None]).logits[0, len(lead) - 1 : -1, :47]
            logp.append(torch.log_softmax(logits / 0.8, -1))
        for (_, weight), theirs in zip(teachers, logp[1:], strict=True):
            divergence = definition(logp[0], theirs.detach(), distill["beta"]).sum()
            total = total + weight(prompt.data_source) * divergence
        count += len(response)
    assert given == distill.get("given_per_step", 0)
    return models[0], total, count


def alike(got: dict, student, want: torch.Tensor) -> None:
    """The loss and the gradient of the student are those of `want`."""
    want.backward()
    assert got["loss"].item() == pytest.approx(want.item(), rel=1e-9)
    assert got["divergence/mean"].item() == pytest.approx(want.item(), rel=1e-9)
    for name, p in student.named_parameters():
        mine = got.get(f"hf.{name}")
        if mine is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


PARITY = [
    {"beta": 0.0},
    {"beta": 0.5},
    # All tokens but one, and that one as the bucket of the others, are all tokens.
    {"beta": 1.0, "top_k": 46},
    {"beta": 1.0, "given_per_step": 6, "teacher_template": "{prompt} {answer} {prompt}"},
]


@pytest.mark.parametrize("distill", PARITY, ids=str)
def test_parity_the_divergence_is_that_of_full_logits_in_transformers(distill, teacher, tmp_path):
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "run"), teacher, {"distill": distill})
    student, total, count = expected(got["rows"], [(teacher, lambda source: 1.0)], distill)
    alike(got, student, total / count)


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
    # With 32 prompts a step the mean divergence is known well enough for its fall to show.
    more = {"distill": {"beta": 0.5, "top_k": 8}, "rollout": {"prompts_per_step": 32}, "optimizer": {"lr": 3e-3}}
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


TOLD = {"teacher_template": "{prompt} {answer} {prompt}"}


def test_a_student_teaches_itself_what_only_its_teacher_is_told(tmp_path):
    """Its own weights, the answer in the prompt: there is something to learn. The teacher follows every two steps."""
    more = {"distill": TOLD, "run": {"steps": 3}, "optimizer": {"lr": 1e-3}}
    stays = run_ranks(how_far_the_teacher_is, 1, str(tmp_path / "stays"), "tiny", more)
    follows = more | {"reference": {"path": "tiny", "refresh_every": 2}, "run": {"steps": 4}}
    gaps = run_ranks(how_far_the_teacher_is, 1, str(tmp_path / "follows"), "tiny", follows)
    assert stays[0] > 1e-4 and gaps == [0.0]
    assert all(row["divergence/mean"] > 1e-3 for row in metrics(tmp_path / "follows"))


def averaged(world, folder: str, teacher: str, sections: dict, stop_after: int = 0) -> dict:
    """Trains; returns the teacher's weights, whole, at the end, and the student's before each step and at the end."""
    run = opened(world, folder, teacher, sections, stop_after)
    whole = lambda model: {n: p.full_tensor().detach().clone() for n, p in model.named_weights()}  # noqa: E731
    log, seen = run.log, [whole(run.models.policy)]

    def logged(*args):
        seen.append(whole(run.models.policy))
        log(*args)

    run.log = logged
    with suppress(Interrupted):
        train(run)
    run.close()
    return {"teacher": whole(run.models.reference), "students": seen}


MOVES = {"path": "tiny", "refresh_every": 2, "mix": 0.3}


def test_a_teacher_is_the_moving_average_of_the_student_on_any_layout_and_after_a_resume(tmp_path):
    """Every two of five steps, teacher <- 0.7 teacher + 0.3 student, computed by hand from the student's weights."""
    more = {"distill": TOLD, "run": {"steps": 5}, "reference": MOVES, "checkpoint": {"at_end": False, "every": 3}}
    (one,) = run_ranks(averaged, 1, str(tmp_path / "one"), "tiny", more)
    students = one["students"]
    assert len(students) == 6
    for name, got in one["teacher"].items():
        want = students[0][name]
        for student in (students[2], students[4]):
            want = 0.7 * want + 0.3 * student[name]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert max((one["teacher"][n] - students[0][n]).abs().max() for n in students[0]) > 1e-4, "it moves"
    for two in run_ranks(averaged, 2, str(tmp_path / "two"), "tiny", more):
        for name, value in one["teacher"].items():
            torch.testing.assert_close(two["teacher"][name], value, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(two["students"][-1][name], students[-1][name], rtol=1e-8, atol=1e-10)
    run_ranks(averaged, 1, str(tmp_path / "cut"), "tiny", more, 4)
    (cut,) = run_ranks(averaged, 1, str(tmp_path / "cut"), "tiny", more)
    assert len(cut["students"]) == 3, "it goes on from step 3, behind the first move"
    for name, value in one["teacher"].items():
        assert torch.equal(cut["teacher"][name], value), name
        assert torch.equal(cut["students"][-1][name], students[-1][name]), name
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "one"))


def test_a_small_share_of_the_student_is_not_rounded_away_in_bfloat16(tmp_path):
    """The average is kept in float32, of which the models compute in bfloat16."""
    more = {"distill": TOLD, "run": {"steps": 1}, "model": {"dtype": "bfloat16"}}
    more["reference"] = MOVES | {"refresh_every": 1, "mix": 1e-3}
    (got,) = run_ranks(averaged, 1, str(tmp_path / "run"), "tiny", more)
    first, last = got["students"]
    moved = 0
    for name, value in got["teacher"].items():
        torch.testing.assert_close(value, (1 - 1e-3) * first[name] + 1e-3 * last[name], rtol=0, atol=1e-7)
        moved += bool((last[name] != first[name]).any() and (value != first[name]).any())
    assert value.dtype == torch.float32 and moved > 10


def test_a_teacher_of_another_architecture_cannot_follow(teacher, tmp_path):
    with pytest.raises(RankError, match="--reference.path must have the policy's architecture"):
        run_ranks(trained, 1, str(tmp_path / "run"), teacher, {"reference": {"refresh_every": 1, "mix": 0.5}})


@pytest.mark.parametrize(
    "distill, said",
    [
        ({"given_per_step": 1, "given_column": "said"}, "--distill.given-column said: row"),
        ({"teacher_template": "{prompt}" * 40}, "--distill.teacher-template: with it"),
        ({"top_k": 47}, "--distill.top-k 47: student and teacher share 47 tokens"),
    ],
)
def test_distillation_is_refused_where_models_or_data_do_not_fit(distill, said, teacher, tmp_path):
    with pytest.raises(RankError) as error:
        run_ranks(trained, 1, str(tmp_path / "run"), teacher, {"distill": distill})
    assert said in str(error.value)


def test_parity_several_teachers_are_mixed_or_teach_a_source_alone(teacher, tmp_path):
    """Rows of source a: the first teacher with weight 1, the second with 3. Rows of source b: the third alone."""
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "abcdefgh"[i % 5 :], "answer": "x", "data_source": "ab"[i % 2]} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second, third = small_model(tmp_path / "second", seed=6), small_model(tmp_path / "third", seed=7)
    distill = {"beta": 0.5, "more_teachers": (f"{second}=3", f"{third}@b")}
    more = {"data": {"train": str(data)}, "distill": distill}
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), teacher, more)
    shares = [(teacher, 0.25, 0.0), (second, 0.75, 0.0), (third, 0.0, 1.0)]
    teachers = [(folder, lambda source, a=a, b=b: {"a": a, "b": b}[source]) for folder, a, b in shares]
    assert {prompt.data_source for *_, prompt, _ in got["rows"]} == {"a", "b"}
    student, total, count = expected(got.pop("rows"), teachers, distill)
    alike(got, student, total / count)
    for other in run_ranks(first_gradient, 4, str(tmp_path / "four"), teacher, more | LAYOUTS[2][1]):
        for name, value in got.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    more["distill"] = distill | {"top_k": 8}
    (one,) = run_ranks(trained, 1, str(tmp_path / "top"), teacher, more)
    apart = {"parallel": {"placement": "split", "rollout_ranks": 1, "scoring_ranks": 1}}
    weights = run_ranks(trained, 3, str(tmp_path / "apart"), teacher, more | apart)
    for name, value in one.items():
        torch.testing.assert_close(next(filter(None, weights))[name], value, rtol=1e-6, atol=1e-8)
    with pytest.raises(RankError, match="no row of --data.train has the data_source c; its rows have a, b"):
        run_ranks(trained, 1, str(tmp_path / "no"), teacher, more | {"distill": {"more_teachers": (f"{third}@c",)}})
