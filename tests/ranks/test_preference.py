"""Preference learning over ranks: the loss of Hugging Face models, the same on any layout, resumed exactly."""

import json

import pytest
import torch

from spmdrl.config.preference import PreferenceConfig
from spmdrl.data.mixture import drawn_indices
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.sft import train
from spmdrl.supervised.preference import build_preference
from tests.ranks import given
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_shared_prompts import float64_norm

ASKED = ["reverse abc", "say it twice", "what is 2 + 3", "the capital of France"]
GOOD = ["cba", "it it", "5", "Paris"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""Short, because the tiny model takes 128 tokens."""
BAD = ["abc", "it or not", "7 or 8", "London, I think"]


def rows(count: int) -> list[dict]:
    """Pairs with prompts of one or two turns, and sides of different lengths."""
    out = []
    for i in range(count):
        prompt = [{"role": "user", "content": f"{ASKED[i % 4]} {i}"}]
        if i % 3 == 0:
            prompt += [{"role": "assistant", "content": "what?"}, {"role": "user", "content": f"go on {i}"}]
        good, bad = f"{GOOD[i % 4]} " * (1 + i % 3) + ".", f"{BAD[i % 4]} " * (1 + (i + 1) % 3) + "!"
        sides = {"chosen": good, "rejected": bad}
        out.append({k: [*prompt, {"role": "assistant", "content": text}] for k, text in sides.items()})
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """A file with 24 pairs."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(24)))
    return str(path)


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> str:
    """A file with single responses that are wanted or not."""
    path = tmp_path_factory.mktemp("data") / "labels.jsonl"
    out = []
    for i, row in enumerate(rows(24)):
        side = "rejected" if i % 3 == 1 else "chosen"
        out.append({"prompt": row[side][:-1], "completion": row[side][-1:], "label": side == "chosen"})
    path.write_text("".join(json.dumps(row) + "\n" for row in out))
    return str(path)


def opened(world, folder: str, source: str, sections: dict, stop_after: int = 0):
    """Opens a job of four steps."""
    base = given.small(folder, source, rows=8, template=TEMPLATE)
    more = dict(
        run={"steps": 4},
        model={"dtype": "float64"},
        # Adam divides by the gradient, whose last digits depend on the layout, where it is far below eps.
        optimizer={"lr": 1e-3, "eps": 1e-2},
        policy={"max_tokens_per_microbatch": 1024},
        eval={"every": 2},
        preference={"beta": 0.5},
    )
    cfg = given.with_sections(PreferenceConfig(), base, more, sections)
    return given.opened(world, cfg, build_preference, stop_after)


def trained(world, folder: str, source: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    return given.trained(opened(world, folder, source, sections, stop_after), train)


def second_gradient(world, folder: str, source: str, sections: dict) -> dict[str, torch.Tensor]:
    return given.second_gradient(world, opened(world, folder, source, sections))


LOSSES = {
    "list": {"preference": {"loss": ("sigmoid", "aot", "sft=0.5"), "tail": 0.5, "label_smoothing": 0.1}},
    "weighted": {"preference": {"loss": ("sigmoid", "ipo"), "weighted": True}},
    "sorted": {"preference": {"loss": ("aot_unpaired",)}},
    "kto": {"preference": {"method": "kto", "wanted_weight": 1.5}},
    "bco": {"preference": {"method": "bco"}},
    "orpo": {"preference": {"method": "orpo"}},
    "lora": {"lora": {"rank": 2}},
}
LAYOUTS = [
    (2, {}),
    (2, {"parallel": {"sp": 2}}),
    (1, {"policy": {"max_tokens_per_microbatch": 300, "share_prompts": False, "chunked_loss": False}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]


@pytest.mark.parametrize("name", LOSSES)
def test_layout_does_not_change_the_gradient_of_preferences(name, data, labels, tmp_path):
    source = labels if name in ("kto", "bco") else data
    (want,) = run_ranks(second_gradient, 1, str(tmp_path / "one"), source, LOSSES[name])
    assert sum(value.abs().max() > 0 for k, value in want.items() if not k.startswith(("stat", "weight"))) > 3
    # Every loss is on every layout of two, one of the losses on four ranks.
    for number, (size, more) in enumerate(LAYOUTS if name in ("list", "kto") else LAYOUTS[:2]):
        for got in run_ranks(second_gradient, size, str(tmp_path / str(number)), source, LOSSES[name] | more):
            for k, value in want.items():
                torch.testing.assert_close(got[k], value, rtol=1e-10, atol=1e-12, msg=lambda m, k=k: f"{k}: {m}")


def test_parity_the_loss_is_that_of_hugging_face(data, tmp_path, monkeypatch):
    """DPO by plain transformers: sums of log p of the responses and their end tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    monkeypatch.setattr(Qwen2RMSNorm, "forward", float64_norm)
    (got,) = run_ranks(second_gradient, 1, str(tmp_path / "run"), data, {})
    folder = resolve("tiny", False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    weights = {k.removeprefix("weight."): v for k, v in got.items() if k.startswith("weight.")}
    for name, p in model.named_parameters():
        p.data.copy_(weights[name] if name in weights else weights[f"hf.{name}"])

    def logp(of, messages) -> torch.Tensor:
        ids, start = [], 0
        for message in messages:
            ids += tokenizer(f"<{message['role'][0]}>", add_special_tokens=False).input_ids
            start = len(ids)
            ids += [*tokenizer(message["content"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        assert len(ids) <= 128
        table = of(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return table[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])].sum()

    total, right = torch.zeros((), dtype=torch.float64), 0
    for index in drawn_indices(24, 8, 8, 3):
        row = rows(24)[index]
        with torch.no_grad():
            before = logp(reference, row["chosen"]) - logp(reference, row["rejected"])
        apart = logp(model, row["chosen"]) - logp(model, row["rejected"]) - before
        total = total - torch.nn.functional.logsigmoid(0.5 * apart) / 8
        right += bool(apart > 0)
    total.backward()
    assert got["stat.loss"].item() == pytest.approx(total.item(), rel=1e-8)
    assert got["stat.accuracy/mean"].item() == pytest.approx(right / 8)
    compared = 0
    for name, p in model.named_parameters():
        mine = got.get(f"hf.{name}")
        if mine is not None:
            compared += 1
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert compared > 10


@pytest.mark.parametrize("name", ["bco", "moving"])
def test_resume_is_exact(name, data, tmp_path):
    """Four steps in one go, or killed after three and resumed from the checkpoint of step two."""
    more = {"checkpoint": {"at_end": False, "every": 2}, "run": {"steps": 5}}
    more |= {"reference": {"refresh_every": 2, "mix": 0.6}} if name == "moving" else {"preference": {"method": "bco"}}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), data, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), data, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), data, more)
    assert whole.keys() == cut.keys()
    for k, value in whole.items():
        assert torch.equal(cut[k], value), k
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))


def test_moving_reference_takes_its_share_of_the_policy(data, tmp_path):
    """TR-DPO: one step of the policy, of which the reference takes 0.6."""
    more = {"reference": {"refresh_every": 1, "mix": 0.6}, "run": {"steps": 1}}
    (got,) = run_ranks(trained, 1, str(tmp_path / "run"), data, more)
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).named_parameters())
    moved = 0
    for k, value in got.items():
        if k.startswith("reference."):
            name = k.removeprefix("reference.")
            before = start[name.removeprefix("hf.")].detach()
            moved += bool((value - before).abs().max() > 1e-5)
            torch.testing.assert_close(value, 0.4 * before + 0.6 * got[name], rtol=1e-12, atol=1e-14)
    assert moved > 10


def test_layout_a_reference_that_is_computed_ahead_teaches_the_same(data, tmp_path):
    """On one rank, two, and two that divide sequences; and in a run that is killed and goes on."""
    more = {"reference": {"precompute": True}, "checkpoint": {"at_end": False, "every": 2}}
    (want,) = run_ranks(trained, 1, str(tmp_path / "beside"), data, {})
    for number, (size, axes) in enumerate([(1, {}), (2, {}), (2, {"parallel": {"sp": 2}})]):
        for got in run_ranks(trained, size, str(tmp_path / str(number)), data, more | axes):
            for k, value in want.items():
                torch.testing.assert_close(got[k], value, rtol=1e-9, atol=1e-12)
    beside, ahead = (untimed(metrics(tmp_path / name)) for name in ("beside", "0"))
    for left, right in zip(beside, ahead, strict=True):
        assert left.keys() == right.keys()
        for k in left:
            assert left[k] == pytest.approx(right[k], rel=1e-9, abs=1e-12), k
    run_ranks(trained, 1, str(tmp_path / "cut"), data, more, 3)
    kept = tmp_path / "cut" / "reference_logp" / "0_0.safetensors"
    before = kept.stat().st_mtime_ns
    (cut, _) = run_ranks(trained, 2, str(tmp_path / "cut"), data, more)
    assert kept.stat().st_mtime_ns == before, "the reference does not read the rows again, on two ranks instead of one"
    for k, value in want.items():
        torch.testing.assert_close(cut[k], value, rtol=1e-9, atol=1e-12)


def test_answers_during_the_job_stand_beside_the_chosen_responses(data, tmp_path):
    """With KTO, whose held-out rows also have responses to other prompts."""
    asked = {"every": 2, "prompts": 2, "max_new_tokens": 3, "engine": "hf"}
    more = {"generate": asked, "preference": {"method": "kto"}, "run": {"steps": 2}}
    run_ranks(trained, 2, str(tmp_path / "run"), data, more | {"model": {"path": "tiny", "dtype": "float32"}})
    said = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(said) == 4 and {row["step"] for row in said} == {1, 2}
    chosen = [row["chosen"][-1]["content"] for row in rows(2)]
    tokens = load_tokenizer(resolve("tiny"))
    want = [
        tokens.decode(tokens(text, add_special_tokens=False).input_ids, skip_special_tokens=True) for text in chosen
    ]
    assert [row["reference"] for row in said[:2]] == want


def test_bad_pairs_are_named_counted_and_end_the_job(data, tmp_path):
    good, bad = rows(20), tmp_path / "bad.jsonl"
    same = good[0] | {"rejected": good[0]["chosen"]}
    other = good[0] | {"rejected": [{"role": "user", "content": "else"}, good[0]["rejected"][-1]]}
    cut = good[0] | {"rejected": good[0]["chosen"][:-1]}
    bad.write_text("".join(json.dumps(row) + "\n" for row in [*good, same, other, cut, {"chosen": "x"}]))
    more = {"data": {"train": (str(bad),), "max_refused": 0.5}, "run": {"steps": 3}, "eval": {"every": 0}}
    run_ranks(trained, 2, str(tmp_path / "run"), data, more)
    assert sum(row["data/refused"] for row in metrics(tmp_path / "run")) == 4
    with pytest.raises(RankError) as error:
        more = {"data": {"train": (str(bad),), "rows_per_step": 24}, "run": {"steps": 1}, "eval": {"every": 0}}
        run_ranks(trained, 2, str(tmp_path / "ends"), data, more)
    told = str(error.value)
    assert "4 of 24 rows were refused" in told
    for line, why in {
        21: "its chosen and rejected sides are equal",
        22: "its sides answer different prompts: message 1 (user) differs",
        23: "its rejected side ends where the other continues",
        24: "its columns are chosen: it needs chosen and rejected, or a prompt",
    }.items():
        assert f"{bad}:{line}: {why}" in told
