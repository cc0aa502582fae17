"""Rows of preference data: their forms, what is refused of them, and the sequences that they give."""

import dataclasses
import json

import pytest
import torch

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.preference import PreferenceConfig, PreferenceDataConfig, check_preference
from spmdrl.config.reward_model import ScoredDataConfig
from spmdrl.data.builtin import builtin_rows
from spmdrl.data.microbatch import units_of
from spmdrl.data.preferences import CHOSEN, REJECTED, PreferenceColumns, preference_of
from spmdrl.data.row_columns import RowError
from spmdrl.data.tokens import Masked
from spmdrl.supervised.build import Start
from spmdrl.supervised.pair_encoder import PairEncoder, pack_pair_sides
from spmdrl.supervised.preview import preview, shown
from spmdrl.supervised.rows import open_mixture
from tests.unit.dialogues import tokenizer_for
from tests.unit.test_sft_rows import CHATML

ASKED = [{"role": "user", "content": "one"}]
MORE = [*ASKED, {"role": "assistant", "content": "and?"}, {"role": "user", "content": "two"}]
GOOD, BAD = {"role": "assistant", "content": "right"}, {"role": "assistant", "content": "wrong"}
SIDED, NAMES = {"chosen": GOOD, "rejected": BAD}, {"user": "human", "assistant": "gpt"}


def encoder(pairs: bool = True, beside: bool = False, **values) -> PairEncoder:
    data = dataclasses.replace(PreferenceDataConfig(), **values)
    return PairEncoder(data, tokenizer_for(CHATML), data.max_tokens, pairs, beside)


def told(encode: PairEncoder, row: dict, before: dict | None = None) -> dict[int, str]:
    """The sequences of a row by sample, the trained text in [[ ]]."""
    found = encode(row, before)
    return {i: shown(s, encode.encoder.tokenizer, False) for i, s in zip(found.samples, found.sequences, strict=True)}


def chatml(*messages: dict, said: str) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{text}<|im_start|>assistant\n[[{said}<|im_end|>]]"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*MORE, GOOD], "rejected": [*MORE, BAD]},
        {"prompt": MORE, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": MORE, "chosen": "right", "rejected": "wrong"},
        {"prompt": "two", "chosen": [*MORE, GOOD], "rejected": [*MORE, BAD], "score_chosen": 8.0},
        {
            "chosen": [
                {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in [*MORE, GOOD]
            ],
            "rejected": [
                {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in [*MORE, BAD]
            ],
        },
    ],
)
def test_pairs_of_dialogues_train_what_differs(row):
    want = {CHOSEN: chatml(*MORE, said="right"), REJECTED: chatml(*MORE, said="wrong")}
    assert told(encoder(), row) == want


def test_responses_of_several_turns_are_trained_whole():
    longer = [GOOD, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    sides = told(encoder(), {"prompt": ASKED, "chosen": longer, "rejected": [BAD]})
    assert sides[CHOSEN].count("[[") == 2 and "[[right<|im_end|>]]" in sides[CHOSEN]
    assert sides[REJECTED] == chatml(*ASKED, said="wrong")


def test_text_goes_through_the_template_or_not():
    row = {"prompt": "one", "chosen": "right", "rejected": "wrong"}
    assert told(encoder(), row) == {CHOSEN: chatml(*ASKED, said="right"), REJECTED: chatml(*ASKED, said="wrong")}
    encode = encoder(chat="off")
    end = encode.encoder.tokenizer.eos_token
    assert told(encode, row) == {CHOSEN: f"one[[right{end}]]", REJECTED: f"one[[wrong{end}]]"}


def test_texts_without_a_prompt_part_before_a_word_and_stay_as_they_are():
    row = {"chosen": "Human: one Assistant: right it is", "rejected": "Human: one Assistant: rather not"}
    sides = told(encoder(), row)
    assert sides == told(encoder(chat="off"), row)
    assert sides[CHOSEN].startswith("Human: one Assistant:[[ right it is")
    assert sides[REJECTED].startswith("Human: one Assistant:[[ rather not")


def test_labelled_responses_and_responses_to_other_prompts():
    row = {"prompt": ASKED, "completion": [GOOD], "label": True}
    before = {"prompt": "zero", "completion": "nought", "label": 0}
    assert told(encoder(pairs=False), row) == {CHOSEN: chatml(*ASKED, said="right")}
    assert list(told(encoder(pairs=False), row | {"label": False})) == [REJECTED]
    found = told(encoder(pairs=False, beside=True), row, before)
    assert found == {CHOSEN: chatml(*ASKED, said="right"), 2: chatml(*ASKED, said="nought")}
    pair = {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}
    assert list(told(encoder(pairs=False, beside=True), pair, pair)) == [CHOSEN, REJECTED, 2, 3]
    # A row before it that cannot be used gives nothing.
    assert list(told(encoder(pairs=False, beside=True), row, {"odd": 1})) == [CHOSEN]
    silent = {"prompt": ASKED, "completion": [GOOD | {"weight": 0}], "label": 1}
    assert list(told(encoder(pairs=False, beside=True), row, silent)) == [CHOSEN]
    # The response of a dialogue, to a prompt of several turns.
    assert told(encoder(pairs=False, beside=True), {"prompt": MORE, "completion": [BAD], "label": 0}, row)[2] == chatml(
        *MORE, said="right"
    )


WHOLE = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
EMPTY = BAD | {"content": ""}
BAD_ROWS = {
    "its chosen and rejected sides are equal": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, GOOD]},
    r"its sides answer different prompts: message 1 \(user\) differs": {
        "chosen": [*ASKED, GOOD],
        "rejected": [{"role": "user", "content": "else"}, BAD],
    },
    "its rejected side ends where the other continues": {"chosen": [*ASKED, GOOD], "rejected": ASKED},
    "its sides do not answer its prompt 'else'": {
        "prompt": "else",
        "chosen": [*ASKED, GOOD],
        "rejected": [*ASKED, BAD],
    },
    "its sides do not begin with its prompt": {"prompt": MORE, **WHOLE},
    r"its rejected side: message 2 \(assistant\) is empty": {"prompt": "one", "chosen": [GOOD], "rejected": [EMPTY]},
    "its rejected side: its completion is empty": {"prompt": "one", "chosen": "right", "rejected": ""},
    "has the role 'wizard'": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, {"role": "wizard", "content": "x"}]},
    "its chosen side is list": {"chosen": [*ASKED, GOOD], "rejected": "wrong"},
    "it needs chosen and rejected, or a prompt": {"chosen": "right"},
    "its label is str": {"prompt": "one", "completion": "two", "label": "yes"},
    "its margin is str": {"prompt": "one", "chosen": "right", "rejected": "wrong", "margin": "much"},
    "its chosen and rejected texts begin differently": {"chosen": "right", "rejected": "wrong"},
    "its sides have no message in common": {"chosen": [GOOD], "rejected": [BAD]},
    "its sides are int": {"prompt": "one", "chosen": 3, "rejected": 5},
    "its sides are dict": {"chosen": {"a": 1}, "rejected": {"b": 2}},
    "its margin is list": {"prompt": "one", "chosen": "right", "rejected": "wrong", "margin": [0.3]},
    "its margin is bool": {"prompt": "one", "chosen": "right", "rejected": "wrong", "margin": True},
}


@pytest.mark.parametrize("why", BAD_ROWS)
def test_bad_rows_are_refused_by_name(why):
    with pytest.raises(RowError, match=why):
        preference_of(BAD_ROWS[why], PreferenceColumns())


def test_pairs_that_cannot_be_compared_are_refused():
    with pytest.raises(RowError, match="it holds one labelled response, and this loss needs pairs"):
        encoder()({"prompt": "one", "completion": "two", "label": 1})
    row = {"prompt": "one", "chosen": "right " * 50 + "a", "rejected": "right " * 50 + "b"}
    with pytest.raises(RowError, match=r"have the same tokens up to token 40 \(--data.max-tokens\)"):
        encoder(max_tokens=40)(row)
    found = encoder(max_tokens=60, too_long="drop")(row | {"rejected": "no"})
    assert not found.sequences and found.notes["dropped"] == 1


def test_packed_sides_stay_together_and_share_their_prompt():
    data = ScoredDataConfig()
    encode = PairEncoder(data, tokenizer_for(CHATML), data.max_tokens, True)
    placed = []
    for place, text in enumerate(("right", "better")):
        found = encode({"prompt": MORE, "chosen": text, "rejected": "wrong", "margin": place + 0.5})
        placed += [(place, i, s) for i, s in zip(found.samples, found.sequences, strict=True)]
    batch = pack_pair_sides(placed[::-1], pairs=True, share=True, numbers={"margin": 0.0})
    assert batch.seq["unit"].tolist() == [0, 0, 1, 1] and batch.seq["sample"].tolist() == [0, 1, 0, 1]
    assert batch.seq["margin"].tolist() == [0.5, 0.5, 1.5, 1.5]
    prompt = len(encode.encoder.tokenizer(chatml(*MORE, said="").split("[[")[0], add_special_tokens=False).input_ids)
    assert batch.seq["common"].tolist() == [prompt] * 4
    assert torch.equal(batch.seq["work"], batch.lengths)


def test_pairs_of_one_prompt_fill_a_micro_batch_and_no_more():
    """Three pairs that share their prompt: 10 tokens and two sides of 30 each; a budget holds two of them."""
    placed = []
    for place in range(3):
        for side in (0, 1):
            tokens = torch.cat([torch.arange(10), torch.full((30,), 10 + 2 * place + side)])
            placed.append((place, side, Masked(tokens, torch.arange(40) >= 10)))
    batch = pack_pair_sides(placed, pairs=True, share=True)
    assert [(u.members, u.tokens) for u in units_of(batch, 130, True)] == [([0, 1, 2, 3], 130), ([4, 5], 70)]
    assert [(u.members, u.tokens) for u in units_of(batch, 129, True)] == [([0, 1], 70), ([2, 3], 70), ([4, 5], 70)]
    assert [u.tokens for u in units_of(batch, 80, False)] == [80, 80, 80]


def test_the_task_that_ships_here_has_one_right_side():
    for held_out in (False, True):
        rows = builtin_rows("reverse-pairs", held_out)
        assert len(rows) > 450 and all(row["chosen"] == row["prompt"][:-1][::-1] for row in rows)
        assert all(
            sorted(row["chosen"]) == sorted(row["rejected"]) and row["chosen"] != row["rejected"] for row in rows
        )
    held, train = ({row["prompt"] for row in builtin_rows("reverse-pairs", side)} for side in (True, False))
    assert not held & train


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--preference.loss sigmod", "unknown loss. Valid: sigmoid"),
        ("--preference.loss sigmoid=-1", "--preference.loss sigmoid=-1: the weight after = must be a number above 0"),
        ("--preference.loss kto sigmoid", "kto cannot be combined with other losses"),
        ("--preference.loss exo_pair", "exo_pair needs a value above 0, such as 0.1"),
        ("--data.max-tokens 5000", "the 10000 tokens of a row must fit --policy.max-tokens-per-microbatch 8192"),
        (
            "--preference.method simpo --preference.loss ipo",
            "--preference.loss names the losses; leave one of them out",
        ),
        ("--preference.weighted --preference.loss aot", "aot compares responses of different pairs"),
        ("--preference.loss sigmoid sigmoid=0.5", "sigmoid is named twice"),
        ("--preference.loss kto --data.rows-per-step 1", "kto compares responses to different rows of the step"),
        ("--reference.refresh-every 4 --lora.rank 2", "the reference has no adapters"),
        ("--preference.label-smoothing 0.5", "must lie in [0, 0.5)"),
        ("--reference.mix 0 --reference.refresh-every 4", "must be above 0 and at most 1"),
        (
            "--reference.precompute --data.train stream:a/b",
            "a stream's rows are not known before training (stream:a/b)",
        ),
        (
            "--reference.precompute --preference.method kto",
            "kto needs the reference's logp of responses to other rows'",
        ),
        ("--reference.precompute --reference.refresh-every 4", "the reference moves"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words, why):
    config = from_command_line(words.split(), "python -m spmdrl.preference", PreferenceConfig).config
    with pytest.raises(ConfigError) as error:
        check_preference(config, 1)
    assert why in str(error.value) and "1 setting to change" in str(error.value)


def test_rows_of_published_sets():
    """The columns of UltraFeedback (binarized) and of Orca's pairs."""
    dialogue = lambda said: [{"role": "user", "content": "why?"}, {"role": "assistant", "content": said}]  # noqa: E731
    ultra = {
        "prompt": "why?",
        "prompt_id": "x",
        "chosen": dialogue("a"),
        "rejected": dialogue("b"),
        "messages": dialogue("a"),
    }
    orca = {"system": "", "question": "why?", "chosen": "a", "rejected": "b"}
    for row in (ultra, orca):
        got = told(encoder(), json.loads(json.dumps(row)))
        assert got[CHOSEN].endswith("[[a<|im_end|>]]") and got[REJECTED].endswith("[[b<|im_end|>]]")


def test_dry_run_shows_both_sides_of_a_pair(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "one", "chosen": "right", "rejected": "wrong"}) + "\n")
    cfg = dataclasses.replace(PreferenceConfig(), data=dataclasses.replace(PreferenceDataConfig(), train=(str(file),)))
    encode = encoder()
    begun = Start(tmp_path, encode.encoder.tokenizer, cfg.data.max_tokens, encode)
    lines = preview(begun.encode, begun.tokenizer, open_mixture(cfg), colour=False)
    asked = [f"  {line}" for line in chatml(*ASKED, said="right").split("\n")]
    assert lines[-2 * len(asked) - 1 :] == [*asked, "  ---", *asked[:-1], asked[-1].replace("right", "wrong")]


def test_a_text_pair_without_a_prompt_is_cut_before_the_blank_of_a_word():
    """So that the first word of a response is the token that a model says after the prompt."""
    row = {"chosen": "Human: why? Assistant: It is so", "rejected": "Human: why? Assistant: It was"}
    sides = preference_of(row, PreferenceColumns()).sides
    assert {i: (side.prompt, side.text) for i, side in sides.items()} == {
        CHOSEN: ("Human: why? Assistant: It", " is so"),
        REJECTED: ("Human: why? Assistant: It", " was"),
    }
    with pytest.raises(RowError, match="it has no prompt"):
        preference_of({"chosen": " a b", "rejected": " c d"}, PreferenceColumns())
