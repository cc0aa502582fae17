"""Rows of labelled steps: their forms, what is refused, where labels stand, and the numbers that tell of scores."""

import dataclasses
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from spmdrl.config.fields import ConfigError
from spmdrl.config.reward_model import RewardModelConfig, ScoredDataConfig, check_reward_model
from spmdrl.data.builtin import builtin_rows
from spmdrl.data.rendering import TemplateError
from spmdrl.data.row_columns import RowError
from spmdrl.data.steps import StepColumns, steps_of
from spmdrl.data.tokens import Masked
from spmdrl.hub.build import empty_model
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.objectives.scores import describe_steps, report
from spmdrl.supervised.preview import shown
from spmdrl.supervised.reward_model import ScoredEncoder, check_names
from spmdrl.supervised.steps import StepEncoder, pack_steps
from spmdrl.tracking.metrics import Metrics
from tests.unit.malformed import text, values
from tests.unit.reward_folders import TEMPLATE, bpe
from tests.unit.test_classifier import by_bytes

TOKENIZER = bpe(TEMPLATE)
ROW = {"prompt": "say", "completions": ["one", "two.", "three"], "labels": [1, None, 0.25]}


def settled(data: dict | None = None, **method) -> RewardModelConfig:
    cfg = RewardModelConfig(data=dataclasses.replace(ScoredDataConfig(), **(data or {})))
    return dataclasses.replace(cfg, reward_model=dataclasses.replace(cfg.reward_model, rows="steps", **method))


def encoder(data: dict | None = None, tokenizer=TOKENIZER, longest: int = 2048, **method) -> StepEncoder:
    return StepEncoder(settled(data, **method), tokenizer, longest)


def told(encode: StepEncoder, row: dict) -> list[tuple[str, float]]:
    """The text up to each token with a label, and the label."""
    (sequence,) = encode(row).sequences
    assert len(sequence.columns["label"]) == len(sequence)
    decode = encode.encoder.tokenizer.decode
    return [
        (decode(sequence.tokens[: i + 1].tolist()), sequence.columns["label"][i].item())
        for i in sequence.mask.nonzero().flatten().tolist()
    ]


# ── forms and refusals ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW | {"prompt": [{"role": "user", "content": "say"}], "chosen": None, "label": 3},
        {"question": "say"} | {k: numpy.array(ROW[k], dtype=object) for k in ("completions", "labels")},
        {"prompt": "say", "steps": ROW["completions"], "right": ROW["labels"]},
    ],
)
def test_rows_give_steps_and_labels(row):
    columns = StepColumns(steps="steps", labels="right") if "steps" in row else StepColumns()
    found = steps_of(row, columns, "\n\n")
    assert found.text == "one\n\ntwo.\n\nthree" and found.labels == [1.0, None, 0.25]
    head = "<|user|>say<|end|><|assistant|>"
    encode = encoder({"steps_column": columns.steps, "labels_column": columns.labels})
    assert told(encode, row) == [(f"{head}one\n\n", 1.0), (f"{head}one\n\ntwo.\n\nthree", 0.25)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": [1, 0]}, ["(labels: 2) as steps (completions: 3)", "null"]),
        ({"labels": [1, 0, 1, 0]}, ["labels: 4", "completions: 3"]),
        ({"labels": [1, 0, 1.5]}, ["label 3 of its labels is float ('1.5')", "[0, 1]"]),
        ({"labels": [-1, 0, 1]}, ["label 1 of its labels is int ('-1')"]),
        ({"labels": [1, "+", 1]}, ["label 2 of its labels is str", "true or false"]),
        ({"labels": [1, float("nan"), 1]}, ["label 2 of its labels is float ('nan')"]),
        ({"labels": [None] * 3}, ["none of its steps has a label", "leave the row out"]),
        ({"labels": 1}, ["its labels are int", "a list"]),
        ({"completions": []}, ["its completions are empty"]),
        ({"completions": "one"}, ["its completions are str", "a list"]),
        ({"completions": ["one", " \n", "three"]}, ["step 2 of its completions is empty"]),
        ({"completions": ["one", 2, "three"]}, ["step 2 of its completions is int"]),
        (
            {"completions": ["one", "two\n\nmore", "three"]},
            ["other steps than the row (4, not 3)", "step 2 contains the separator"],
        ),
        ({"labels": None}, ["prompt, completions", "labels", "--data.labels-column"]),
        ({"prompt": None}, ["completions, labels", "a prompt", "--data.prompt-column"]),
        ({"completions": None, "chosen": "a", "rejected": "b"}, ["holds a pair", "--reward-model.rows pairs"]),
    ],
)
def test_what_is_refused_of_a_row(change, words):
    with pytest.raises(RowError) as error:
        encoder()(ROW | change)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_task_that_ships_here_marks_the_first_wrong_step_and_those_after_it():
    for held_out in (False, True):
        rows, wrong = builtin_rows("reverse-steps", held_out), 0
        for row in rows:
            right = list(row["prompt"][:-1][::-1])
            first = next(
                (i for i, pair in enumerate(zip(row["completions"], right, strict=True)) if len({*pair}) > 1), 5
            )
            assert row["labels"] == [True] * first + [False] * (5 - first)
            assert row["completions"][first + 1 :] == right[first + 1 :]
            wrong += first < 5
        assert 0.4 < wrong / len(rows) < 0.6


def test_rows_of_steps_are_refused_where_pairs_are_learnt():
    encode = ScoredEncoder(RewardModelConfig(), TOKENIZER, 2048)
    with pytest.raises(RowError, match=r"labelled steps \(completions, labels\).*with --reward-model.rows steps"):
        encode(ROW)
    assert len(encode(ROW | {"chosen": "one", "rejected": "two"}).sequences) == 2


@pytest.mark.parametrize(
    ("there", "outputs", "refused"),
    [
        (("helpful", "safe"), ("safe", "helpful"), True),
        (("helpful", "safe"), ("kind", "safe"), True),
        (("helpful", "safe"), ("helpful", "safe"), False),
        (("LABEL_0", "LABEL_1"), ("safe", "helpful"), False),
        (("reward",), (), False),
    ],
)
def test_scores_that_have_names_keep_them(there, outputs, refused):
    config = LlamaConfig(id2label=dict(enumerate(there)), num_labels=len(there))
    with pytest.raises(ValueError, match="its scores are helpful, safe; give") if refused else nullcontext():
        check_names(config, "--model.path x", outputs)


def test_the_last_step_alone():
    assert [label for _, label in told(encoder(last_step=True), ROW)] == [0.25]
    with pytest.raises(RowError, match="its last step has no label, and --reward-model.last-step trains only"):
        encoder(last_step=True)(ROW | {"labels": [1, 1, None]})


@pytest.mark.parametrize(
    ("method", "data", "word"),
    [
        ({"separator": ""}, {}, "--reward-model.separator: is empty"),
        ({}, {"train": ("builtin:reverse-pairs",)}, "builtin:reverse-pairs holds pairs"),
    ],
)
def test_settings_that_do_not_fit(method, data, word):
    check_reward_model(settled({"train": ("steps.jsonl",)}), 1)
    cfg = settled({"train": ("steps.jsonl",)} | data)
    cfg = dataclasses.replace(cfg, reward_model=dataclasses.replace(cfg.reward_model, **method))
    with pytest.raises(ConfigError, match=word):
        check_reward_model(cfg, 1)


@pytest.mark.parametrize(
    ("family", "small", "word"),
    [
        ("Granite", {"hidden_size": 16, "num_hidden_layers": 1}, "transformers has no classifier for granite, .*llama"),
        (
            "GPT2",
            {"n_embd": 16, "n_layer": 1, "n_head": 2},
            "GPT2ForTokenClassification has no linear head named score",
        ),
        ("Olmo2", {"hidden_size": 16, "num_hidden_layers": 1}, "no token classifier for olmo2"),
    ],
)
def test_families_without_such_a_classifier_are_named(family, small, word, tmp_path):
    import transformers

    config = getattr(transformers, f"{family}Config")(vocab_size=32, **small)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=word):
        empty_model(tmp_path, "float32", head="value" if family == "Granite" else "steps", labels=2)


WORDS = st.sampled_from(["one", "two.", "so\n\n", " x", "é日本", "a=b"]) | text
PAIRS = st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 0.5, True, None])), min_size=1, max_size=3)
COLUMNS = PAIRS.map(lambda pairs: tuple(map(list, zip(*pairs, strict=True))))
TINY = load_tokenizer(resolve("tiny"))


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.just("say") | values,
    columns=COLUMNS | st.tuples(values, values) | st.tuples(st.lists(values, max_size=3), st.lists(values, max_size=3)),
    tiny=st.booleans(),
)
def test_every_row_is_read_or_refused_by_a_message(prompt, columns, tiny):
    """The shipped tokenizer leaves out characters that it does not know."""
    (steps, labels), encode = columns, encoder(tokenizer=TINY if tiny else TOKENIZER)
    try:
        (sequence,) = encode({"prompt": prompt, "completions": steps, "labels": labels}).sequences
    except (RowError, TemplateError) as error:
        assert len(str(error)) > 10
        return
    given_labels = [label for label in labels if label is not None]
    assert sequence.columns["label"][sequence.mask].tolist() == [float(label) for label in given_labels]


# ── places ───────────────────────────────────────────────────────────────────

STEP = st.lists(st.sampled_from([" ", "one", " plus", "é", "🙂", "ab", "c.", "日本", "\n"]), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(STEP.filter(lambda some: "".join(some).strip()), min_size=1, max_size=5),
    chat=st.booleans(),
    separator=st.sampled_from(["\n\n", "ки", ">"]),
)
def test_a_label_stands_at_the_token_with_the_last_byte_of_its_step(parts, chat, separator):
    """The steps hold line breaks, so that some are not what the separator makes; the row is then refused."""
    steps = ["".join(some).strip() for some in parts]
    labels = [(i + 1) / 8 for i in range(len(steps))]
    encode = encoder({"chat": "auto" if chat else "off"}, separator=separator)
    row = {"prompt": "say", "completions": steps, "labels": labels}
    if any(separator in step for step in steps):
        with pytest.raises(RowError, match="has other steps than the row"):
            encode(row)
        return
    (sequence,) = encode(row).sequences
    tokens = sequence.tokens.tolist()
    head = "<|user|>say<|end|><|assistant|>" if chat else "say"
    text = TOKENIZER.decode(tokens)
    assert text == head + separator.join(steps) + ("<|end|>" if chat else "<eos>")
    ends = [len(head + separator.join(steps[: k + 1]) + separator) for k in range(len(steps) - 1)]
    want = [by_bytes(tokens, text, end) for end in [*ends, len(head + separator.join(steps))]]
    assert sequence.mask.nonzero().flatten().tolist() == want
    assert sequence.columns["label"][sequence.mask].tolist() == labels


def test_steps_with_white_space_of_their_own_keep_their_labels():
    row = {"prompt": "say", "completions": ["one\n", "\n\ntwo\n\n", "three \n"], "labels": [0, 1, 0.5]}
    # Of the five line breaks behind the first step two separators are its end, and the last one begins the second.
    assert [(said.rpartition("|>")[2], y) for said, y in told(encoder(), row)] == [
        ("one\n\n\n\n", 0.0),
        ("one\n\n\n\n\ntwo\n\n", 1.0),
        ("one\n\n\n\n\ntwo\n\nthree", 0.5),
    ]


def test_a_template_with_an_empty_thought_moves_the_ends_and_one_that_cuts_is_refused():
    thought = TEMPLATE.replace(
        "+ m['content']", "+ ('<think>\n\n</think>\n\n' if m['role'] != 'user' else '') + m['content']"
    )
    head = "<|user|>say<|end|><|assistant|><think>\n\n</think>\n\n"
    assert told(encoder(tokenizer=bpe(thought)), ROW) == [
        (f"{head}one\n\n", 1.0),
        (f"{head}one\n\ntwo.\n\nthree", 0.25),
    ]
    cuts = TEMPLATE.replace("m['content'] | trim", "m['content'].split('</think>')[-1]")
    assert [y for _, y in told(encoder(tokenizer=bpe(cuts)), ROW)] == [1.0, 0.25]
    with pytest.raises(ValueError, match="the chat template drops the thought before </think> in its content"):
        encoder(tokenizer=bpe(cuts))(ROW | {"completions": ["one", "</think>two", "three"]})


def test_steps_are_those_of_the_text_that_a_run_decodes():
    """A tokenizer that gives the words back without what stands between them."""
    row = {"prompt": "p", "completions": ["x  y", " y\tz"], "labels": [0.25, 1]}
    found = told(encoder(tokenizer=words("p", "x", "y", "z", ">"), separator=" >"), row)
    assert found == [("p x y >", 0.25), ("p x y > y z", 1.0)]


def words(*known: str):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", "<eos>", *known))}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")


def test_two_steps_that_end_in_one_token_are_refused():
    row = {"prompt": "p ", "completions": ["x", "y", "z"], "labels": [1, 0, 1]}
    with pytest.raises(RowError, match=r"its steps 1 and 2 end in the same token.*--reward-model.separator"):
        encoder(tokenizer=words("p", "x>y>", "z", "x>y>z"), separator=">")(row)


def test_what_is_too_long_keeps_the_labels_of_what_is_left():
    (whole,) = encoder()(ROW).sequences
    first, last = whole.mask.nonzero().flatten().tolist()
    found = encoder(longest=last)(ROW)
    assert found.notes["truncated"] == 1
    (cut,) = found.sequences
    assert len(cut) == last and cut.mask.nonzero().flatten().tolist() == [first]
    assert torch.equal(cut.columns["label"], whole.columns["label"][:last])
    with pytest.raises(RowError, match=f"none of its trained tokens is within the first {first} tokens"):
        encoder(longest=first)(ROW)
    dropped = encoder({"too_long": "drop"}, longest=last)(ROW)
    assert not dropped.sequences and dropped.notes["dropped"] == 1


def test_packed_steps_keep_their_labels():
    placed = [(place, 0, encoder()(ROW | {"labels": [place / 4, None, 1]}).sequences[0]) for place in range(3)]
    batch = pack_steps(placed[::-1], 0)
    assert batch.token["label"][batch.token["mask"]].tolist() == [0.0, 1.0, 0.25, 1.0, 0.5, 1.0]
    assert batch.token["label"].dtype == torch.float64 and pack_steps([], 0).token["label"].dtype == torch.float64


def test_the_preview_shows_the_tokens_that_end_steps():
    (sequence,) = encoder({"chat": "off"}, tokenizer=bpe("", 262), separator=">")(ROW).sequences
    assert shown(sequence, TOKENIZER, False) == "sayone[[>]]two.>thre[[e]]<eos>"


# ── numbers ──────────────────────────────────────────────────────────────────


def by_hand(rows: list[list[tuple[float, float]]]) -> dict[str, float]:
    """The metrics of responses, each a list of (probability, label)."""
    every = [pair for row in rows for pair in row]
    right = [0.5 if 0.5 in pair else float((pair[0] > 0.5) == (pair[1] > 0.5)) for pair in every]
    firsts = [[next((i for i, pair in enumerate(row) if pair[k] < 0.5), None) for k in (0, 1)] for row in rows]
    wrong = [float(p == y) for p, y in firsts if y is not None]
    none = [float(p == y) for p, y in firsts if y is None]
    bins = {b: [p - y for p, y in every if min(int(p * 10), 9) == b] for b in range(10)}
    sides = {"right": [p for p, y in every if y > 0.5], "wrong": [p for p, y in every if y < 0.5]}
    out = {"accuracy/mean": right, "accuracy/first_wrong": wrong, "accuracy/no_wrong": none}
    out |= {f"score/{name}": some for name, some in sides.items()}
    means = {name: sum(some) / len(some) for name, some in out.items() if some}
    return means | {"calibration/error": sum(abs(sum(some)) for some in bins.values()) / len(every)}


@pytest.mark.parametrize("seed", range(8))
def test_metrics_of_steps_are_those_of_a_count_by_hand(seed):
    draw, metrics, rows = random.Random(seed), Metrics(), []
    for size in (3, 1, 0, 4):
        some = [
            [
                (draw.choice([0.5, draw.random()]), draw.choice([0, 1, 0.5, draw.random()]))
                for _ in range(draw.randint(1, 4))
            ]
            for _ in range(size)
        ]
        rows += some
        pairs = torch.tensor([pair for row in some for pair in row], dtype=torch.float64).reshape(-1, 2)
        seq = torch.tensor([i for i, row in enumerate(some) for _ in row], dtype=torch.int64)
        describe_steps(metrics, pairs[:, 0], pairs[:, 1], seq, size)
    assert report(metrics.reduce(lambda x, op: x)) == pytest.approx(by_hand(rows), rel=1e-12)


def test_first_tokens_keep_their_columns():
    whole = Masked(torch.arange(4), torch.ones(4, dtype=torch.bool), {"a": 1.0}, {"label": torch.arange(4.0)})
    cut = whole.first(2)
    assert cut.tokens.tolist() == [0, 1] and cut.numbers == {"a": 1.0} and cut.columns["label"].tolist() == [0, 1]
