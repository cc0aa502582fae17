"""Supervised fine-tuning over ranks: the loss of Hugging Face, the same on any layout, resumed exactly."""

import json
import random
from pathlib import Path

import pytest
import torch

from spmdrl.config.sft import SFTConfig
from spmdrl.data.distribute import balance
from spmdrl.hub.resolve import resolve
from spmdrl.sft import train
from spmdrl.supervised.sft import build_sft
from tests.ranks import given
from tests.ranks.cases import small_model
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.unit.test_kernel_distill import definition

ASKED = ["reverse abc", "say it twice", "what is 2 + 3", "the capital of France", "count to five"]
SAID = ["cba", "it it", "5", "Paris, which lies on the Seine", "1 2 3 4 5"]


def rows(count: int) -> list[dict]:
    """Dialogues of one to three turns, of different lengths."""
    out = []
    for i in range(count):
        messages = []
        for k in range(1 + i % 3):
            messages.append({"role": "user", "content": f"{ASKED[(i + k) % 5]} {i}"})
            messages.append({"role": "assistant", "content": f"{SAID[(i + k) % 5]} " * (1 + (i * 7 + k) % 4) + "."})
        out.append({"messages": messages})
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """A file with 48 dialogues."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(48)))
    return str(path)


def opened(world, folder: str, data: str, sections: dict, stop_after: int = 0):
    """Opens a job of six steps."""
    base = given.small(folder, data, rows=12, template="chatml")
    more = dict(
        run={"steps": 6},
        model={"dtype": "float32"},
        optimizer={"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
        policy={"max_tokens_per_microbatch": 512},
        eval={"every": 3},
    )
    return given.opened(world, given.with_sections(SFTConfig(), base, more, sections), build_sft, stop_after)


def trained(world, folder: str, data: str, sections: dict, stop_after: int = 0) -> dict[str, torch.Tensor]:
    return given.trained(opened(world, folder, data, sections, stop_after), train)


def first_gradient(world, folder: str, data: str, sections: dict) -> dict[str, torch.Tensor]:
    """Returns the gradient of the first step, whole, and what it says of itself."""
    run = opened(world, folder, data, sections)
    batch = balance(run.rows(0), world)
    run.score(batch)
    return given.gradient(world, run, batch)


DOUBLE = {"model": {"path": "tiny", "dtype": "float64"}}
LAYOUTS = [
    (1, {"policy": {"max_tokens_per_microbatch": 8192}}),
    (2, {}),
    (2, {"parallel": {"sp": 2}}),
    (2, {"policy": {"max_tokens_per_microbatch": 600, "chunked_loss": False, "share_prompts": False}}),
    (4, {"parallel": {"dp_replicate": 2, "sp": 2}}),
]


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_layout_does_not_change_the_gradient_of_sft(loss, data, tmp_path):
    sections = DOUBLE | {"sft": {"loss": loss}}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), data, sections)
    assert all(value.abs().max() > 0 for value in want.values())
    for number, (size, more) in enumerate(LAYOUTS):
        for got in run_ranks(first_gradient, size, str(tmp_path / str(number)), data, sections | more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_parity_the_loss_is_that_of_hugging_face(data, tmp_path):
    """ChatML, cross-entropy of the assistant's tokens and its end token, by plain transformers."""
    from transformers import AutoModelForCausalLM

    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "run"), data, DOUBLE)
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny", False), dtype=torch.float64).eval()
    loss, accuracy = plain_loss(model)
    loss.backward()
    assert got["loss"].item() == pytest.approx(loss.item(), rel=1e-9)
    assert got["accuracy/mean"].item() == pytest.approx(accuracy, rel=1e-12)
    for name, p in model.named_parameters():
        mine = got.get(f"hf.{name}")
        if mine is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def plain_loss(model) -> tuple[torch.Tensor, float]:
    """Loss and accuracy of a transformers model on the rows of the first step."""
    from transformers import AutoTokenizer

    from spmdrl.data.mixture import drawn_indices

    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny", False))
    total, right, count = torch.zeros((), dtype=torch.float64), 0, 0
    for index in drawn_indices(48, 0, 12, 3):
        ids, labels = [], []
        for message in rows(48)[index]["messages"]:
            head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False).input_ids
            body = tokenizer(f"{message['content']}<|im_end|>", add_special_tokens=False).input_ids
            tail = tokenizer("\n", add_special_tokens=False).input_ids
            learnt = message["role"] == "assistant"
            ids += head + body + tail
            labels += [-100] * len(head) + (body if learnt else [-100] * len(body)) + [-100] * len(tail)
        # The tiny model takes 128 tokens.
        logits = model(torch.tensor([ids[:128]])).logits[0, :-1]
        aim = torch.tensor(labels[:128])[1:]
        total = total + torch.nn.functional.cross_entropy(logits, aim, ignore_index=-100, reduction="sum")
        right += int(((logits.argmax(-1) == aim) & (aim != -100)).sum())
        count += int((aim != -100).sum())
    return total / count, right / count


def test_layout_noise_on_embeddings_belongs_to_the_row(data, tmp_path):
    """NEFTune: the same gradient on any layout, and another one than without it."""
    sections = DOUBLE | {"sft": {"neftune": 5.0}}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), data, sections)
    (plain,) = run_ranks(first_gradient, 1, str(tmp_path / "plain"), data, DOUBLE)
    assert abs(want["loss"] - plain["loss"]) > 1e-6
    for number, more in enumerate(({}, {"parallel": {"sp": 2}})):
        for got in run_ranks(first_gradient, 2, str(tmp_path / str(number)), data, sections | more):
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_evaluation_has_no_noise(data, tmp_path):
    losses = []
    for noise in (0.0, 5.0):
        more = {"sft": {"neftune": noise}, "run": {"steps": 2}}
        run_ranks(trained, 1, str(tmp_path / str(noise)), data, more)
        losses.append(metrics(tmp_path / str(noise))[0])
    assert losses[0]["eval/loss"] == losses[1]["eval/loss"] and losses[0]["loss"] != losses[1]["loss"]


def test_added_tokens_are_trained_and_saved_and_answers_end_where_turns_do(tmp_path):
    """ChatML's control tokens on the tiny model: its engine and plain transformers stop at the end that it learnt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    new, asked = ("<|im_start|>", "<|im_end|>"), [{"role": "user", "content": "ab"}]
    file = tmp_path / "short.jsonl"
    file.write_text(f"{json.dumps({'messages': [*asked, {'role': 'assistant', 'content': 'ba'}]})}\n" * 48)
    more = {"sft": {"add_tokens": new}, "checkpoint": {"at_end": True}, "optimizer": {"lr": 1e-2}}
    more |= {"generate": {"every": 3, "prompts": 3, "max_new_tokens": 16, "engine": "hf", "temperature": 0.0}}
    run_ranks(trained, 2, str(tmp_path / "run"), str(file), more)
    saved = tmp_path / "run" / "checkpoints" / "latest" / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(saved), AutoModelForCausalLM.from_pretrained(saved)
    ids = tokenizer.convert_tokens_to_ids(list(new))
    table, before = model.get_input_embeddings().weight, AutoModelForCausalLM.from_pretrained(resolve("tiny"))
    old = before.get_input_embeddings().weight
    assert ids == [len(old), len(old) + 1] and len(table) == len(old) + 2
    start = old.double().mean(0)
    for i in ids:
        far = (table[i].double() - start).abs().max().item()
        assert 0 < far < 0.1, "it began as the mean of the others, and has learnt"
    said = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in said] == [1] * 3 + [4] * 3 + [6] * 3
    assert said[0]["prompt"].endswith("<|im_start|>assistant\n") or "assistant" in said[0]["prompt"]
    assert [row["completion"] for row in said[-3:]] == ["b"] * 3
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert made == [*tokenizer("b", add_special_tokens=False).input_ids, ids[1]]
    assert model.generation_config.eos_token_id == [2, ids[1]]


def loads(world, folder: str, data: str, sections: dict) -> list[int]:
    """Returns this rank's tokens of each step."""
    run = opened(world, folder, data, sections)
    found = [balance(run.rows(step), world).n_tokens for step in range(6)]
    run.close()
    return found


def test_layout_two_ranks_wait_less_than_2_percent(tmp_path):
    """Lengths spread as those of GSM8K's answers, a fifth as long for the context of this model."""
    spread = [20 + int(random.Random(i).lognormvariate(3.5, 0.358)) for i in range(192)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * min(n, 120)}) + "\n" for n in spread))
    more = {"data": {"rows_per_step": 32}, "eval": {"every": 0}, "policy": {"max_tokens_per_microbatch": 256}}
    run_ranks(trained, 2, str(tmp_path / "run"), str(file), more)
    ranks = run_ranks(loads, 2, str(tmp_path / "loads"), str(file), more)
    rows = metrics(tmp_path / "run")
    for row, *mine in zip(rows, *ranks, strict=True):
        assert row["packing/waste"] == pytest.approx(1 - sum(mine) / (2 * max(mine)), abs=1e-9)
        assert row["packing/waste"] <= 0.02 and row["microbatches"] <= -(-max(mine) // 256) + 1
    assert len({row["tokens/all"] for row in rows}) > 3


def test_layout_same_rows_and_weights_on_two_ranks(data, tmp_path):
    (one,) = run_ranks(trained, 1, str(tmp_path / "one"), data, DOUBLE)
    two, _ = run_ranks(trained, 2, str(tmp_path / "two"), data, DOUBLE)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-7, atol=1e-9)
    left, right = (untimed(metrics(tmp_path / name)) for name in ("one", "two"))
    for a, b in zip(left, right, strict=True):
        for name in a.keys() - {"packing/waste", "microbatches"}:
            assert a[name] == pytest.approx(b[name], rel=1e-7, abs=1e-9), name
    assert left[0]["eval/loss"] > left[-1]["eval/loss"]


@pytest.mark.parametrize("kind", ["file", "stream", "mixture"])
def test_resume_in_mid_epoch_is_exact(kind, data, tmp_path):
    """Six steps in one go, or killed after four and resumed from the checkpoint of step three."""
    import gzip

    packed = tmp_path / "train.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(data).read_bytes()))
    train = {"file": (data,), "stream": (str(packed),), "mixture": (f"{data}=0.25", "builtin:reverse=0.75")}[kind]
    more = {"data": {"train": train, "chat_template": "chatml"}, "checkpoint": {"at_end": False, "every": 3}}
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), data, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), data, more, 4)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), data, more)
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name
    assert untimed(metrics(tmp_path / "cut")) == untimed(metrics(tmp_path / "whole"))


def test_refused_rows_are_named_counted_and_end_the_job(data, tmp_path):
    bad = tmp_path / "bad.jsonl"
    broken = [*rows(20), {"messages": [{"role": "wizard", "content": "x"}]}, {"messages": []}, {"other": 1}]
    bad.write_text("".join(json.dumps(row) + "\n" for row in broken) + "{not json\n")
    more = {"data": {"train": (str(bad),), "max_refused": 0.5}, "run": {"steps": 2}, "eval": {"every": 0}}
    run_ranks(trained, 2, str(tmp_path / "run"), data, more)
    assert sum(row["data/refused"] for row in metrics(tmp_path / "run")) == 4
    with pytest.raises(RankError) as error:
        run_ranks(trained, 2, str(tmp_path / "ends"), data, more | {"data": {"train": (str(bad),)}})
    assert "--data.max-refused allows a share of 0.05" in str(error.value)
    # Those of the first step, three of them here, with their places.
    why = {21: "message 1 has the role 'wizard'", 22: "not a list of messages", 23: "it needs messages", 24: "not JSON"}
    told = [line for line, said in why.items() if said in str(error.value) and f"{bad}:{line}: " in str(error.value)]
    assert len(told) == 3


def test_a_bad_row_among_the_first_ends_no_job_whose_share_of_them_is_small(data, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(row) + "\n" for row in [{"other": 1}, *rows(40)]))
    more = {"data": {"train": (str(bad),), "shuffle": False, "rows_per_step": 8}, "eval": {"every": 0}}
    run_ranks(trained, 1, str(tmp_path / "run"), data, more | {"run": {"steps": 2}})
    assert [row["data/refused"] for row in metrics(tmp_path / "run")] == [1, 0]


def first_rows(world, folder: str, data: str, sections: dict) -> list:
    """Returns tokens and mask of the sequences of the first step."""
    run = opened(world, folder, data, sections)
    batch = run.rows(0)
    run.close()
    lengths = batch.lengths.tolist()
    return list(zip(*(batch.token[name].split(lengths) for name in ("tokens", "mask")), strict=True))


@pytest.mark.parametrize("teacher", [{"beta": 0.5, "temperature": 2.0}, {"top_k": 46, "temperature": 2.0}], ids=str)
def test_parity_a_teacher_of_given_rows_is_that_of_transformers_on_any_layout(teacher, data, tmp_path):
    """By full logits over the 47 tokens; 46 of them and the bucket of the last one are all."""
    from transformers import AutoModelForCausalLM

    theirs = small_model(tmp_path / "teacher", seed=5, hidden_size=48, vocab_size=64)
    sections = DOUBLE | {"teacher": {"path": theirs} | teacher}
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), data, sections)
    (rows,) = run_ranks(first_rows, 1, str(tmp_path / "rows"), data, sections)
    paths = (resolve("tiny"), theirs)
    student, frozen = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in paths)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, mask in rows:
        at = mask[1:].nonzero().flatten()
        s, t = (torch.log_softmax(m(tokens[None]).logits[0, at, :47] / 2, -1) for m in (student, frozen))
        total = total + definition(s, t.detach(), teacher.get("beta", 0.0)).sum()
        count += len(at)
    (total / count).backward()
    assert got["loss"].item() == pytest.approx((total / count).item(), rel=1e-9)
    for name, p in student.named_parameters():
        if f"hf.{name}" in got:
            torch.testing.assert_close(got[f"hf.{name}"], p.grad, rtol=1e-7, atol=1e-10)
    if not teacher.get("top_k"):
        for other in run_ranks(first_gradient, 2, str(tmp_path / "two"), data, sections):
            for name, value in got.items():
                torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12)
    more = {"teacher": sections["teacher"], "sft": {"neftune": 5.0}}
    run_ranks(trained, 2, str(tmp_path / "learns"), data, more)
    losses = [row["divergence/mean"] for row in metrics(tmp_path / "learns")]
    assert losses[-1] < 0.9 * losses[0]
