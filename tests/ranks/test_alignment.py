"""Distillation over two tokenizers: the distance of full probabilities in transformers, the same on any layout."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spmdrl.data.distribute import balance
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from tests.ranks.cases import small_model
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_distillation import LAYOUTS, first_gradient, opened, trained
from tests.unit.test_kernel_distill import definition


def speaker(folder: Path, seed: int, merges: int, word: str = "", **changes) -> str:
    """A small model with a BPE tokenizer of its own, over the letters of the demo. word: is one token."""
    from transformers import PreTrainedTokenizerFast

    words = load_tokenizer(resolve("tiny")).get_vocab()
    letters = sorted(word for word in words if len(word) == 1)
    draw = random.Random(seed)
    texts = ["".join(draw.choices(letters, k=200)) for _ in range(100)]
    texts += [word] * (1000 * bool(word))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = f"<end {seed}>"
    trainer = trainers.BpeTrainer(vocab_size=2 + len(letters) + merges, special_tokens=[end, "<pad>"])
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token="<pad>")
    found = small_model(
        folder, seed, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=1, **changes
    )
    tokenizer.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    """A student, and a teacher of another width, vocabulary and padding."""
    folder = tmp_path_factory.mktemp("pair")
    student = speaker(folder / "student", 3, 60)
    return student, speaker(folder / "teacher", 4, 700, hidden_size=48, tie_word_embeddings=False)


def asked(pair: tuple[str, str], distill: dict, **more) -> tuple[str, dict]:
    """The teacher, and the sections of a run."""
    return pair[1], {"model": {"path": pair[0], "dtype": "float64"}, "distill": distill} | more


def ends_of(tokenizer, tokens: list[int]) -> list[int]:
    return [len(tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]


def expected(rows: list, pair: tuple[str, str], distill: dict):
    """The student in transformers, the mean distance of the spans by full probabilities, and the numbers of spans."""
    from transformers import AutoModelForCausalLM

    tokenizers = [load_tokenizer(Path(folder)) for folder in pair]
    both = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for folder in pair]
    words = [tokenizer.get_vocab() for tokenizer in tokenizers]
    pairs = {(words[0][word], words[1][word]) for word in words[0].keys() & words[1].keys() if word[:4] != "<end"}
    # transformers names a token beside those that were trained, which the models lack.
    pairs = {(a, b) for a, b in pairs if a < both[0].config.vocab_size and b < both[1].config.vocab_size}
    taken = [torch.tensor(sorted(pairs | {(0, 0)})).unbind(1)[side] for side in (0, 1)]
    distances, several, left = [], [0, 0], 0
    for tokens, mask, prompt, _ in rows:
        body = tokens[mask].tolist()
        ended = body[-1] == 0
        body = body[: len(body) - ended]
        if {0, 1} & set(body):
            left += 1
            continue
        text = tokenizers[0].decode(body)
        other = tokenizers[1](text, add_special_tokens=False).input_ids
        marks = ends_of(tokenizers[0], body), ends_of(tokenizers[1], other)
        assert (marks[0] or [0])[-1] == (marks[1] or [0])[-1] == len(text)
        sides = [body + [0] * ended, other + [0] * ended]
        prompts = tokens[~mask].tolist(), tokenizers[1](prompt.content).input_ids
        logp = []
        for model, said, lead in zip(both, sides, prompts, strict=True):
            logits = model(torch.tensor([lead + said])).logits[0, len(lead) - 1 : -1]
            logp.append(torch.log_softmax(logits / 0.8, -1))
        cuts = sorted(set(marks[0]) & set(marks[1]))
        spans = [
            [[i for i, end in enumerate(m) if a < end <= b] for m in marks]
            for a, b in zip([0, *cuts], cuts, strict=False)
        ]
        for places in [*spans, *([[[len(body)], [len(other)]]] * ended)]:
            merged = []
            for side in (0, 1):
                base = places[side][-1 if distill.get("merge") == "last" else 0]
                factor = sum(logp[side][i, sides[side][i]] for i in places[side] if i != base)
                merged.append(logp[side][base] + factor)
                several[side] += len(places[side]) > 1
            s, t = merged[0], merged[1].detach()
            share = direct = 0.0
            if distill["align"] == "gold":
                share = len(taken[0]) / len(t)
                direct = definition(s[taken[0]], t[taken[1]], distill["beta"])
                s, t = (
                    x[[i for i in range(len(x)) if i not in set(ids.tolist())]]
                    for x, ids in zip((s, t), taken, strict=True)
                )
            s, t = (x.exp().sort(descending=True).values for x in (s, t))
            apart = torch.nn.functional.pad(s, (0, max(0, len(t) - len(s)))) - torch.nn.functional.pad(
                t, (0, max(0, len(s) - len(t)))
            )
            distances.append(share * direct + (1 - share) * apart.abs().sum())
    return both[0], torch.stack(distances).mean(), several, left / len(rows)


CASES = [
    {"align": "uld"},
    {"align": "uld", "merge": "last"},
    {"align": "gold", "beta": 0.5, "given_per_step": 3},
]


@pytest.mark.parametrize("distill", CASES, ids=str)
def test_parity_the_distance_is_that_of_full_probabilities_in_transformers_on_any_layout(distill, pair, tmp_path):
    teacher, sections = asked(pair, distill)
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), teacher, sections)
    rows = got.pop("rows")
    student, want, several, left = expected(rows, pair, distill)
    assert min(several) > 5 and len(rows) == 16 + distill.get("given_per_step", 0), several
    want.backward()
    assert got["loss"].item() == pytest.approx(want.item(), rel=1e-9)
    assert got["divergence/mean"].item() == pytest.approx(want.item(), rel=1e-9)
    moved = 0
    for name, p in student.named_parameters():
        mine = got.get(f"hf.{name}")
        if mine is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
            moved += bool(mine.any())
    assert moved > 10
    layouts = {0: LAYOUTS[:1], 1: [], 2: LAYOUTS[2:]}[CASES.index(distill)]
    for number, (size, axes) in enumerate(layouts):
        for other in run_ranks(first_gradient, size, str(tmp_path / str(number)), teacher, sections | axes):
            for name, value in got.items():
                torch.testing.assert_close(
                    other[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("merge, sp", [("first", 4), ("last", 4)])
def test_layout_spans_that_lie_on_several_ranks(merge, sp, pair, tmp_path):
    """Two tokens of the student's are one of the teacher's, and sp divides the sequence between some of them.

    Longer spans would be so unlikely under the student that their gradient is none.
    """
    word, data = "ab", tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "xyz"[: 1 + i % 3], "answer": word * 6}) + "\n" for i in range(9)))
    teacher = speaker(tmp_path / "teacher", 6, 40, word)
    assert len(load_tokenizer(tmp_path / "teacher")(word * 6).input_ids) == 6
    assert len(load_tokenizer(Path(pair[0]))(word).input_ids) == 2
    sections = asked((pair[0], teacher), {"align": "uld", "given_per_step": 9, "merge": merge})[1]
    sections |= {"data": {"train": str(data)}, "rollout": {"prompts_per_step": 4, "max_new_tokens": 13}}
    (want,) = run_ranks(first_gradient, 1, str(tmp_path / "one"), teacher, sections)
    want.pop("rows")
    axes = {"parallel": {"sp": sp}, "policy": {"max_tokens_per_microbatch": 64}}
    for got in run_ranks(first_gradient, sp, str(tmp_path / "sp"), teacher, sections | axes):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_it_learns_and_a_resume_is_exact(pair, tmp_path):
    teacher, more = asked(pair, {"align": "uld"}, checkpoint={"at_end": False, "every": 2})
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), teacher, more)
    run_ranks(trained, 1, str(tmp_path / "cut"), teacher, more, 3)
    (cut,) = run_ranks(trained, 1, str(tmp_path / "cut"), teacher, more)
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name
    rows = metrics(tmp_path / "whole")
    assert untimed(metrics(tmp_path / "cut")) == untimed(rows)
    assert rows[-1]["divergence/mean"] < rows[0]["divergence/mean"] - 0.01
    assert all(0 < row["align/tokens"] <= 1 and row["align/span"] >= 1 for row in rows)


def test_responses_that_cannot_be_aligned_are_counted_and_teach_nothing(pair, tmp_path):
    """A teacher that knows no digits, of rows whose given responses are digits; one that knows nothing at all."""
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": "abc", "answer": "123" if i % 2 else "abc"}) + "\n" for i in range(16))
    )
    folder = tmp_path / "odd"
    teacher = speaker(folder, 5, 10)
    told = json.loads((folder / "tokenizer.json").read_text())
    gone = set("0123456789")
    told["model"]["vocab"] = {word: i for word, i in told["model"]["vocab"].items() if not gone & set(word)}
    told["model"]["merges"] = [both for both in told["model"]["merges"] if not gone & set("".join(both))]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    _, more = asked((pair[0], teacher), {"align": "uld", "given_per_step": 6}, data={"train": str(data)})
    more["run"], more["rollout"] = {"steps": 1}, {"prompts_per_step": 1, "samples_per_prompt": 1}
    (got,) = run_ranks(first_gradient, 1, str(tmp_path / "run"), teacher, more)
    student = load_tokenizer(Path(pair[0]))
    texts = [student.decode(tokens[mask][:-1]) for tokens, mask, *_ in got["rows"][1:]]
    assert set(texts) == {"123", "abc"}
    counted = run_ranks(left_out, 1, str(tmp_path / "counted"), teacher, more)[0]
    assert counted[1:] == [text == "123" for text in texts]


def left_out(world, folder: str, teacher: str, sections: dict) -> list[bool]:
    """Which sequences of the first step have no span."""
    run = opened(world, folder, teacher, sections)
    with run.memory.rollout_phase():
        packed = run.method.pack(run.experience(0).episodes, 0)
    with run.memory.training_phase():
        batch = balance(packed, run.world)
        _, stats = run.method.score(batch)
    run.close()
    found = [not (lead >= 0).any() for lead in batch.token["reference/lead"].split(batch.lengths.tolist())]
    assert stats.reduce(lambda x, op: x)["align/left_out"] == sum(found) / len(found)
    return found


def test_a_teacher_of_other_tokens_is_refused_without_it_and_one_without_a_tokenizer_with_it(pair, tmp_path):
    teacher, more = asked(pair, {})
    with pytest.raises(
        RankError, match="gives .* another id .*; or let the teacher read the student's text: --distill.align uld"
    ):
        run_ranks(trained, 1, str(tmp_path / "off"), teacher, more)
    bare = small_model(tmp_path / "bare")
    with pytest.raises(RankError, match="the folder has no tokenizer, which --distill.align uld needs"):
        run_ranks(trained, 1, str(tmp_path / "bare run"), bare, asked(pair, {"align": "uld"})[1])
    long = {"teacher_template": "{prompt}" * 60, "align": "uld"}
    with pytest.raises(RankError, match="--distill.teacher-template: with it"):
        run_ranks(trained, 1, str(tmp_path / "long"), teacher, asked(pair, long)[1])
