"""Training of reward models over ranks: loss and scores of transformers, the same on any layout, resumed exactly."""

import json
from pathlib import Path

import pytest
import torch

from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.data.mixture import drawn_indices
from spmdrl.hub.resolve import resolve
from spmdrl.policy.models import build_models
from spmdrl.rl.compose import compose
from spmdrl.rl.reading import AtLast
from spmdrl.sft import train
from spmdrl.supervised.reward_model import build_reward_model
from tests.ranks import given
from tests.ranks.cases import config
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_preference import TEMPLATE, rows
from tests.ranks.test_shared_prompts import float64_norm

NAMES = ("helpful", "short")


def pairs() -> list[dict]:
    """Pairs with margins, of two scores in turn."""
    return [row | {"margin": 0.25 * (i % 3), "output": NAMES[i % 2]} for i, row in enumerate(rows(24))]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    return str(path)


def opened(world, folder: str, source: str, sections: dict, stop_after: int = 0):
    """Opens a job of four steps."""
    base = given.small(folder, source, rows=8, template=TEMPLATE)
    more = dict(
        run={"steps": 4},
        model={"dtype": "float64"},
        # As in test_preference.py.
        optimizer={"lr": 1e-2, "eps": 1e-2},
        policy={"max_tokens_per_microbatch": 1024},
        eval={"every": 2},
        reward_model={"outputs": NAMES, "centre": 0.1},
    )
    cfg = given.with_sections(RewardModelConfig(), base, more, sections)
    return given.opened(world, cfg, build_reward_model, stop_after)


def trained(world, folder: str, source: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    return given.trained(opened(world, folder, source, sections, stop_after), train)


def second_gradient(world, folder: str, source: str, sections: dict) -> dict[str, torch.Tensor]:
    return given.second_gradient(world, opened(world, folder, source, sections))


LAYOUTS = [
    (2, {}),
    (2, {"parallel": {"sp": 2}}),
    (1, {"policy": {"max_tokens_per_microbatch": 300}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]


def test_layout_does_not_change_the_gradient_of_a_reward_model(data, tmp_path):
    (want,) = run_ranks(second_gradient, 1, str(tmp_path / "one"), data, {})
    assert {f"stat.accuracy/{name}" for name in NAMES} < want.keys()
    assert abs(want["stat.length/correlation"]) <= 1 and want["stat.calibration/error"] > 0
    for number, (size, more) in enumerate(LAYOUTS):
        for got in run_ranks(second_gradient, size, str(tmp_path / str(number)), data, more):
            for k, value in want.items():
                torch.testing.assert_close(got[k], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=k: f"{k}: {m}")


def score(model, tokenizer, messages: list[dict]) -> torch.Tensor:
    """Scores of a dialogue by transformers."""
    ids: list[int] = []
    for message in messages:
        ids += tokenizer(f"<{message['role'][0]}>", add_special_tokens=False).input_ids
        ids += [*tokenizer(message["content"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return model(torch.tensor([ids])).logits[0]


def test_parity_the_loss_is_that_of_transformers(data, tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    (got,) = run_ranks(second_gradient, 1, str(tmp_path / "run"), data, {})
    folder = resolve("tiny", False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, num_labels=2, pad_token_id=0
    ).eval()
    for name, p in model.named_parameters():
        p.data.copy_(got[f"weight.{name}"])
    total, right, lead, longer = torch.zeros((), dtype=torch.float64), 0, [], []
    for index in drawn_indices(24, 8, 8, 3):
        row = pairs()[index]
        chosen, rejected = (score(model, tokenizer, row[side])[index % 2] for side in ("chosen", "rejected"))
        apart = chosen - rejected
        total = total - torch.nn.functional.logsigmoid(apart - row["margin"]) / 8 + 0.1 * (chosen + rejected) ** 2 / 8
        right += bool(apart > 0)
        lead.append(apart.item())
        sizes = [
            len(tokenizer(row[side][-1]["content"], add_special_tokens=False).input_ids)
            for side in row
            if side in ("chosen", "rejected")
        ]
        longer.append(sizes[0] - sizes[1])
    total.backward()
    assert got["stat.loss"].item() == pytest.approx(total.item(), rel=1e-9)
    assert got["stat.accuracy/mean"].item() == pytest.approx(right / 8)
    together = torch.corrcoef(torch.tensor([lead, longer], dtype=torch.float64))[0, 1].item()
    assert got["stat.length/correlation"].item() == pytest.approx(together, rel=1e-9)
    for name, p in model.named_parameters():
        mine = got[f"hf.{name}"]
        torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def as_reward(world, folder: str, path: str) -> torch.Tensor:
    """The scores that reinforcement learning reads from a saved reward model: chosen and rejected of each pair."""
    cfg = config(model={"path": "tiny", "dtype": "float64"}, reward={"model": path})
    judge = build_models(cfg, world, compose(cfg).needs).reward_model
    file = str(Path(folder).parent / "rows.jsonl")
    run = opened(world, folder, file, {"reward_model": {"outputs": ()}, "eval": {"every": 0}})
    batch = run.rows(0)
    run.close()
    assert judge is not None
    return AtLast().read(batch, judge).response_B


def test_saved_model_scores_alike_in_transformers_and_as_a_reward(tmp_path):
    """One score, from a language model; its checkpoint goes on as a reward model, and is refused without its head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({k: row[k] for k in ("chosen", "rejected")}) + "\n" for row in rows(24)))
    one = {"reward_model": {"outputs": (), "centre": 0.0}, "checkpoint": {"at_end": True}, "run": {"steps": 3}}
    run_ranks(trained, 1, str(tmp_path / "run"), str(source), one)
    saved = tmp_path / "run" / "checkpoints" / "latest" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert model.config.id2label == {0: "reward"} and model.config.pad_token_id != tokenizer.eos_token_id
    want = [
        score(model, tokenizer, rows(24)[i][side])
        for i in drawn_indices(24, 0, 8, 3)
        for side in ("chosen", "rejected")
    ]
    (got,) = run_ranks(as_reward, 1, str(tmp_path / "again"), str(saved))
    torch.testing.assert_close(got, torch.cat(want).double(), rtol=1e-5, atol=1e-6)
    assert got.std() > 1e-3

    run_ranks(
        trained, 1, str(tmp_path / "goes on"), str(source), one | {"model": {"path": str(saved), "dtype": "float64"}}
    )
    first = metrics(tmp_path / "goes on")[0]
    leads = torch.cat(want)[0::2] - torch.cat(want)[1::2]
    assert first["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(leads).mean().item(), rel=1e-5)

    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    lost = tmp_path / "lost"
    lost.mkdir()
    for file in saved.iterdir():
        (lost / file.name).write_bytes(file.read_bytes())
    save_file({k: v for k, v in weights.items() if k != "score.weight"}, lost / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError, match=r"its weights have no head score\.weight"):
        run_ranks(
            trained, 1, str(tmp_path / "x"), str(source), one | {"model": {"path": str(lost), "dtype": "float64"}}
        )


def test_resume_of_a_reward_model_is_exact(data, tmp_path):
    more = {"checkpoint": {"at_end": False, "every": 2}}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), data, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), data, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), data, more)
    for k, value in whole.items():
        assert torch.equal(cut[k], value), k
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))


def test_rows_of_unknown_scores_are_refused(data, tmp_path):
    with pytest.raises(RankError, match="its output is 'helpful'; it must name one of --reward-model.outputs a, b"):
        run_ranks(
            trained, 1, str(tmp_path / "run"), data, {"reward_model": {"outputs": ("a", "b")}, "eval": {"every": 0}}
        )
