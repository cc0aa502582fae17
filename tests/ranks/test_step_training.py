"""Training of process reward models over ranks: loss and scores of transformers, the same on any layout, resumed."""

import json
from pathlib import Path

import pytest
import torch

from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.data.episode import episode_of
from spmdrl.data.mixture import drawn_indices
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.models import build_models
from spmdrl.rl.compose import compose
from spmdrl.rl.reading import reading_of
from spmdrl.sft import train
from spmdrl.supervised.reward_model import build_reward_model
from tests.ranks import given
from tests.ranks.cases import config, packed
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_shared_prompts import float64_norm
from tests.unit.reward_folders import TEMPLATE, bpe, classifier, written

SAID = ["one plus two", "is three.", "so it is 3", "abc\n", "the answer is cab", "first, then.", "日本🙂"]
LABELS = [True, 0.75, False, None, 0.2, 1, 0.5, 0]


def rows(count: int) -> list[dict]:
    """Responses of one to four steps, with labels of every kind and some without."""
    out = []
    for i in range(count):
        steps = [f"{SAID[(i + 3 * k) % 7]}" for k in range(1 + i % 4)]
        labels = [LABELS[(i + 5 * k) % 8] for k in range(len(steps))]
        labels = labels if any(label is not None for label in labels) else [0.4] * len(steps)
        out.append({"prompt": f"reverse {i}", "completions": steps, "labels": labels})
    return out


def lines(path: Path, some: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, str]:
    """A language model with a chat template, and a file of rows."""
    from transformers import Qwen2ForCausalLM

    root, tokenizer = tmp_path_factory.mktemp("made"), bpe(TEMPLATE)
    whole = classifier(root / "classifier", tokenizer, 1)
    Qwen2ForCausalLM.from_pretrained(whole, dtype=torch.float64).save_pretrained(root / "lm")
    tokenizer.save_pretrained(root / "lm")
    return {"lm": str(root / "lm"), "whole": whole, "data": lines(root / "train.jsonl", rows(24))}


def opened(world, folder: str, made: dict, sections: dict, stop_after: int = 0):
    """Opens a job of four steps."""
    base = given.small(folder, made["data"], rows=8, template="")
    more = dict(
        run={"steps": 4},
        model={"path": made["lm"], "dtype": "float64"},
        # As in test_preference.py.
        optimizer={"lr": 1e-2, "eps": 1e-2},
        policy={"max_tokens_per_microbatch": 1024},
        eval={"every": 2},
        reward_model={"rows": "steps"},
    )
    cfg = given.with_sections(RewardModelConfig(), base, more, sections)
    return given.opened(world, cfg, build_reward_model, stop_after)


def trained(world, folder: str, made: dict, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    return given.trained(opened(world, folder, made, sections, stop_after), train)


def second_gradient(world, folder: str, made: dict, sections: dict) -> dict[str, torch.Tensor]:
    return given.second_gradient(world, opened(world, folder, made, sections))


LAYOUTS = [
    (2, {}),
    (2, {"parallel": {"sp": 2}}),
    (1, {"policy": {"max_tokens_per_microbatch": 128}, "data": {"max_tokens": 128}}),
]


def test_layout_does_not_change_the_gradient_of_a_process_reward_model(made, tmp_path):
    (want,) = run_ranks(second_gradient, 1, str(tmp_path / "one"), made, {})
    assert want["stat.calibration/error"] > 0 and {"hf.score.bias", "stat.accuracy/first_wrong"} < want.keys()
    for number, (size, more) in enumerate(LAYOUTS):
        for got in run_ranks(second_gradient, size, str(tmp_path / str(number)), made, more):
            for k, value in want.items():
                torch.testing.assert_close(got[k], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=k: f"{k}: {m}")


def read(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """Tokens of a row, and the index of the token that reaches the end of each step: its last letter or line break."""
    head, text = f"<|user|>{row['prompt']}<|end|><|assistant|>", "\n\n".join(row["completions"])
    # The template trims what it shows.
    tokens = tokenizer(f"{head}{text.strip()}<|end|>").input_ids
    ends = ["\n\n".join(row["completions"][: k + 1]) + "\n\n" for k in range(len(row["completions"]) - 1)]
    ends = [end.removesuffix("\n") if end.endswith("\n\n\n") else end for end in ends] + [text.strip()]
    begun = [tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
    return tokens, [next(i for i, so_far in enumerate(begun) if so_far.startswith(head + end)) for end in ends]


def log_odds(model, tokenizer, row: dict) -> torch.Tensor:
    """Two log probabilities of each step, by transformers."""
    tokens, places = read(tokenizer, row)
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0], 1)[places]


def test_parity_the_loss_is_that_of_transformers(made, tmp_path, monkeypatch):
    from transformers import AutoModelForTokenClassification
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    (got,) = run_ranks(second_gradient, 1, str(tmp_path / "run"), made, {})
    tokenizer = load_tokenizer(Path(made["lm"]))
    model = AutoModelForTokenClassification.from_pretrained(made["lm"], dtype=torch.float64, num_labels=2).eval()
    for name, p in model.named_parameters():
        p.data.copy_(got[f"weight.{name}"])
    assert float(model.score.bias.detach().abs().max()) > 1e-3
    chosen = [rows(24)[index] for index in drawn_indices(24, 8, 8, 3)]
    steps = sum(label is not None for row in chosen for label in row["labels"])
    total, right, first, none = torch.zeros((), dtype=torch.float64), [], [], []
    for row in chosen:
        said = [
            (y, pair) for y, pair in zip(row["labels"], log_odds(model, tokenizer, row), strict=True) if y is not None
        ]
        for y, (wrong, good) in said:
            total = total - (y * good + (1 - y) * wrong) / steps
            right.append(0.5 if y == 0.5 else float((good > wrong) == (y > 0.5)))
        truth = next((i for i, (y, _) in enumerate(said) if y < 0.5), None)
        found = next((i for i, (_, (wrong, good)) in enumerate(said) if good < wrong), None)
        (none if truth is None else first).append(float(truth == found))
    total.backward()
    assert got["stat.loss"].item() == pytest.approx(total.item(), rel=1e-9)
    assert got["stat.accuracy/mean"].item() == pytest.approx(sum(right) / steps)
    assert first and got["stat.accuracy/first_wrong"].item() == pytest.approx(sum(first) / len(first))
    assert none and got["stat.accuracy/no_wrong"].item() == pytest.approx(sum(none) / len(none))
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[f"hf.{name}"], p.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def as_reward(world, made: dict, file: str) -> list[list[float]]:
    """Scores of the steps of each row that reinforcement learning reads from a saved process reward model."""
    cfg = config(
        model={"path": made["lm"], "dtype": "float64"}, reward={"model": file}, algo={"advantage": "grpo_process"}
    )
    models, tokenizer = build_models(cfg, world, compose(cfg).needs), load_tokenizer(Path(made["lm"]))
    prompts, episodes = [], []
    for i, row in enumerate(rows(24)):
        asked = [{"role": "user", "content": row["prompt"]}]
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        reply = tokenizer("\n\n".join(row["completions"]).strip() + "<|end|>").input_ids
        mask = torch.tensor([False] * len(before) + [True] * len(reply))
        prompts.append(Prompt(i, before, None, "", {}, "", asked, "", True))
        episodes.append(episode_of(i, 0, i, torch.tensor(before + reply), mask, torch.zeros(len(mask))))
    reading = reading_of(cfg, models.labels, tokenizer, PromptSet(prompts, 0, ""))
    batch = packed(cfg, world, episodes)
    assert models.reward_model is not None and reading is not None
    scores = reading.read(batch, models.reward_model)
    assert scores.process_T is not None and scores.ends_T is not None
    return [scores.process_T[(batch.seq_index == i) & (scores.ends_T != 0)].tolist() for i in range(len(batch))]


def by_policy(world, folder: str, made: dict, sections: dict) -> list[list[float]]:
    """Probabilities of the labelled steps of the first step's rows by a policy that goes on from its folder."""
    run = opened(world, folder, made, sections)
    batch = run.rows(0)
    logits = run.policy.values(batch)
    run.close()
    right = torch.softmax(logits.double(), 1)[:, 1]
    return [right[(batch.seq_index == i) & batch.token["mask"]].tolist() for i in range(len(batch))]


@pytest.mark.parametrize("own", [False, True])
def test_saved_model_scores_alike_in_transformers_as_a_reward_and_as_a_policy(own, saved, made, tmp_path):
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(saved, dtype=torch.float64).eval()
    tokenizer = load_tokenizer(Path(saved))
    assert type(model).__name__ == "Qwen2ForTokenClassification" and model.config.id2label == {0: "wrong", 1: "right"}
    with torch.no_grad():
        want = [log_odds(model, tokenizer, row).exp()[:, 1] for row in rows(24)]
    file = written(tmp_path / "rm.yaml", path=saved, steps="\n\n", tokenizer="own" if own else "auto")
    (got,) = run_ranks(as_reward, 1, made, file)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs, rtol=1e-5, atol=1e-6)
    assert torch.cat(want).std() > 1e-2
    if own:
        return
    sections = {"model": {"path": saved, "dtype": "float64"}, "eval": {"every": 0}}
    (again,) = run_ranks(by_policy, 1, str(tmp_path / "goes on"), made, sections)
    for mine, i in zip(again, drawn_indices(24, 0, 8, 3), strict=True):
        labelled = [label is not None for label in rows(24)[i]["labels"]]
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), want[i][labelled], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory) -> str:
    """The folder of a process reward model after three steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(trained, 1, str(folder), made, {"checkpoint": {"at_end": True}, "run": {"steps": 3}})
    first, *_, last = metrics(folder)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4), "a new head gives 0 to everything"
    assert first["accuracy/mean"] == 0.5 and {"eval/accuracy/first_wrong", "eval/calibration/error"} <= last.keys()
    return str(folder / "checkpoints" / "latest" / "model")


def test_resume_of_a_process_reward_model_is_exact(made, tmp_path):
    more = {"checkpoint": {"at_end": False, "every": 2}}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), made, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), made, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), made, more)
    assert "score.bias" in whole
    for k, value in whole.items():
        assert torch.equal(cut[k], value), k
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))


def test_models_of_another_class_and_rows_of_another_form_are_refused(made, saved, tmp_path):
    pair = {"prompt": "a", "chosen": "one", "rejected": "two"}
    mixed = lines(tmp_path / "mixed.jsonl", [*rows(7), pair])
    for sections, words in (
        (
            {"model": {"path": made["whole"]}},
            r"Qwen2ForSequenceClassification; --reward-model.rows steps needs",
        ),
        (
            {"model": {"path": saved}, "reward_model": {"rows": "pairs"}},
            r"Qwen2ForTokenClassification; .*rows pairs needs",
        ),
        ({"data": {"train": (mixed,)}}, r"(?s)1 of 8 rows were refused.*mixed\.jsonl:8: it holds a pair \(chosen, rej"),
        (
            {"data": {"train": (mixed,)}, "reward_model": {"rows": "pairs"}},
            r"(?s)7 of 8 rows were refused.*mixed\.jsonl:\d: it holds labelled steps .*with --reward-model.rows steps",
        ),
    ):
        with pytest.raises(RankError, match=words):
            run_ranks(trained, 1, str(tmp_path / "run"), made, {"eval": {"every": 0}} | sections)
