"""Teachers in the run's own engine: what they say is what teachers beside the student say, on any number of ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdrl.engines.engine import ScoreRequest, StaleEngineError
from spmdrl.hub.resolve import resolve
from tests.ranks.cases import small_model
from tests.ranks.demo import metrics
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_distillation import first_gradient, opened, trained


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> tuple[str, str]:
    """Two models of the student's architecture with other weights."""
    out = []
    for seed in (1, 2):
        folder = str(tmp_path_factory.mktemp("teacher"))
        model = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.3)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve("tiny")).save_pretrained(folder)
        out.append(folder)
    return out[0], out[1]


def alike(got: dict, want: dict, rtol: float, atol: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_layout_teachers_in_the_engine_teach_as_beside_the_student(teachers, tmp_path):
    """One mixed in with weight 3, responses of the data set, temperature 0.8; engines of one rank and of two."""
    distill = {"beta": 0.5, "top_k": 8, "more_teachers": (f"{teachers[1]}=3",), "given_per_step": 3}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "beside"), teachers[0], {"distill": distill})
    rows, layouts = want.pop("rows"), [(1, {}), (2, {"rollout": {"tp": 2}}), (2, {"parallel": {"sp": 2}})]
    assert len(rows) == 19 and want["divergence/mean"] > 1e-3
    for number, (size, more) in enumerate(layouts):
        sections = {"distill": distill | {"on_engine": True}} | more
        for got in run_ranks(first_gradient, size, str(tmp_path / str(number)), teachers[0], sections):
            got.pop("rows")
            alike(got, want, rtol=1e-9, atol=1e-11)


def test_a_student_of_teachers_in_the_engine_becomes_the_same(teachers, tmp_path):
    """The student's weights are back in the engine before it samples, also for an evaluation and after a resume."""
    more = {"distill": {"beta": 0.5, "top_k": 8}, "eval": {"every": 2, "prompts": 8}}
    more |= {"checkpoint": {"at_end": False, "every": 2}, "data": {"limit": 64, "eval": "builtin:reverse:eval"}}
    (want,) = run_ranks(trained, 1, str(tmp_path / "beside"), teachers[0], more)
    more["distill"] = {"beta": 0.5, "top_k": 8, "on_engine": True}
    (got,) = run_ranks(trained, 1, str(tmp_path / "engine"), teachers[0], more)
    alike(got, want, rtol=1e-7, atol=1e-9)
    for left, right in zip(*(metrics(tmp_path / name) for name in ("beside", "engine")), strict=True):
        names = {"divergence/mean", "entropy/mean", "reward/mean", "eval/accuracy"}
        assert names & left.keys() == names & right.keys() >= names - {"eval/accuracy"}
        for name in names & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-6, abs=1e-9), name
    run_ranks(trained, 1, str(tmp_path / "cut"), teachers[0], more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), teachers[0], more)
    assert all(torch.equal(cut[name], value) for name, value in got.items())


def read(world, folder: str, teacher: str, sections: dict, sequences: list) -> list:
    """Has an engine read sequences as the teacher; returns what it says, and the models that are in memory."""
    run = opened(world, folder, teacher, sections)
    from spmdrl.rl.distillation import Distillation

    teachers = Distillation(run).on_engine
    engine = run.memory.engine
    with run.memory.rollout_phase():
        (tensors,) = teachers.models.folders.values()
        with pytest.raises(StaleEngineError):
            engine.likeliest([ScoreRequest(*sequences[0])], 8, 1.0, -2)
        run.memory.lend(tensors, -2, "teacher")
        found = engine.likeliest([ScoreRequest(*each) for each in sequences], 8, run.cfg.rollout.temperature, -2)
    # The student samples again.
    with run.memory.rollout_phase():
        assert engine.version == run.models.policy.version == 0
    run.close()
    return [*found, [name for name, _ in run.models.named()]]


SEQUENCES = [([1, 5, 9, 13, 21, 8], 3), ([1, 7], 1), ([1, 5, 9, 13, 21, 8, 30, 31, 2], 8)]


def check_read(found: list, teacher: str, temperature: float, limit: float) -> None:
    """What an engine says is what transformers computes."""
    assert found.pop() == ["policy"], "holds no teacher to move"
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    for (tokens, count), (ids, logp, rest) in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -count - 1 : -1]
        want = torch.log_softmax(logits / temperature, -1)
        assert ids.shape == logp.shape == (count, 8) and rest.shape == (count,)
        torch.testing.assert_close(logp.double(), want.topk(8).values, rtol=limit, atol=limit)
        torch.testing.assert_close(want.gather(1, ids), logp.double(), rtol=limit, atol=limit)
        torch.testing.assert_close(rest.double().exp(), 1 - want.topk(8).values.exp().sum(1), rtol=limit, atol=limit)


def test_stale_an_engine_reads_as_the_teacher_whose_weights_it_holds(teachers, tmp_path):
    more = {"distill": {"top_k": 8, "on_engine": True}}
    (found,) = run_ranks(read, 1, str(tmp_path / "run"), teachers[0], more, SEQUENCES)
    check_read(found, teachers[0], 0.8, 1e-9)


def test_a_teacher_of_another_architecture_is_refused(tmp_path):
    wide = small_model(tmp_path / "wide", hidden_size=48)
    with pytest.raises(RankError) as error:
        run_ranks(trained, 1, str(tmp_path / "run"), wide, {"distill": {"top_k": 8, "on_engine": True}})
    assert f"--reference.path {wide}: its config.json has hidden_size 48" in str(error.value)
    assert "leave --distill.on-engine out for others" in str(error.value)
