"""Rows of supervised fine-tuning as tokens with a loss mask, their counts, and the settings that say how."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.resume import may_change
from spmdrl.config.sft import SFTConfig, check_sft
from spmdrl.config.supervised import split_weight
from spmdrl.data.mixture import Drawn
from spmdrl.data.rendering import TemplateError
from spmdrl.data.row_columns import RowError
from spmdrl.supervised.build import evaluation_rows
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.entry import with_template
from spmdrl.supervised.preview import shown
from spmdrl.supervised.rows import encoded, open_mixture, rows_due
from spmdrl.supervised.sft import begin_sft
from tests.unit.dialogues import tokenizer_for

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A: ' }}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ 'U: ' + m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
DROPS = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


def encoder(template: str = CHATML, **sections) -> Encoder:
    cfg = SFTConfig()
    for name, values in sections.items():
        cfg = dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **values)})
    return Encoder(cfg.data, tokenizer_for(template), cfg.data.max_tokens, cfg.sft.train_on)


def trained(encode: Encoder, row: dict) -> list[str]:
    """The trained text of each sequence, a part for each stretch."""
    out = []
    for sequence in encode(row).sequences:
        text = shown(sequence, encode.tokenizer, False)
        out += [part.split("]]")[0] for part in text.split("[[")[1:]]
    return out


def test_the_assistants_turns_are_trained_with_their_end_token():
    assert trained(encoder(), {"messages": TALK}) == ["first<|im_end|>", "second<|im_end|>"]
    assert trained(encoder(sft={"train_on": "last"}), {"messages": TALK}) == ["second<|im_end|>"]
    kept = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    assert trained(encoder(), {"messages": kept}) == ["second<|im_end|>"]
    first = [TALK[0], TALK[1] | {"loss": True}, TALK[2], TALK[3] | {"loss": False}]
    assert trained(encoder(sft={"train_on": "last"}), {"messages": first}) == ["first<|im_end|>"]


def test_all_trains_every_token_but_the_first():
    (sequence,) = encoder(sft={"train_on": "all"})({"messages": TALK}).sequences
    assert not sequence.mask[0] and bool(sequence.mask[1:].all())


def test_marks_of_a_template_are_taken_at_their_word():
    assert trained(encoder(MARKED), {"messages": TALK}) == ["first<|im_end|>", "second<|im_end|>"]
    odd = MARKED.replace("m['role'] == 'assistant'", "m['content'] == 'first'")
    with pytest.raises(RowError, match=r"\(parts: 1, turns: 2\)"):
        encoder(odd)({"messages": TALK})


def test_text_pairs_go_through_the_template_or_not():
    row = {"prompt": "one", "completion": " first"}
    assert trained(encoder(), row) == [" first<|im_end|>"]
    encode = encoder(data={"chat": "off"})
    (sequence,) = encode(row).sequences
    assert encode.tokenizer.decode(sequence.tokens) == "one first" + encode.tokenizer.eos_token
    assert trained(encode, row) == [" first" + encode.tokenizer.eos_token]


def test_text_is_trained_whole_and_ends_with_the_end_token():
    (sequence,) = encoder()({"text": "once upon a time"}).sequences
    assert sequence.mask.tolist() == [False, *[True] * (len(sequence) - 1)]
    assert int(sequence.tokens[-1]) == encoder().tokenizer.eos_token_id


def test_rows_that_are_too_long_keep_their_mask_or_are_dropped():
    whole = encoder()({"messages": TALK}).sequences[0]
    longest = int(whole.mask.nonzero()[0]) + 1
    encode = encoder(data={"max_tokens": longest})
    found = encode({"messages": TALK})
    assert found.notes["truncated"] == 1 and len(found.sequences[0]) == longest
    assert torch.equal(found.sequences[0].tokens, whole.tokens[:longest])
    assert torch.equal(found.sequences[0].mask, whole.mask[:longest])
    with pytest.raises(RowError, match="none of its trained tokens is within"):
        encoder(data={"max_tokens": longest - 1})({"messages": TALK})
    dropped = encoder(data={"max_tokens": longest, "too_long": "drop"})({"messages": TALK})
    assert not dropped.sequences and dropped.notes["dropped"] == 1


def test_a_row_of_which_nothing_is_trained_is_refused():
    with pytest.raises(RowError, match="none of its messages is trained"):
        encoder()({"messages": [TALK[0], TALK[1] | {"weight": 0}]})
    with pytest.raises(TemplateError, match="no message is an assistant's"):
        encoder()({"messages": TALK[:1]})


def test_a_message_that_the_template_drops_is_refused():
    row = {"messages": [{"role": "system", "content": "be short"}, *TALK]}
    with pytest.raises(TemplateError, match=r"message 1 \(system\): the chat template does not show its content"):
        encoder(DROPS)(row)


def test_rows_of_which_a_part_is_left_out_are_counted_and_named():
    more = {"role": "user", "content": "three"}
    unanswered, long = [*TALK, more], [*TALK, more, TALK[1] | {"content": "and so on " * 300}]
    drawn = [Drawn(f"rows:{i}", partial(dict, messages=said)) for i, said in enumerate((unanswered, long, TALK))]
    found = encoded(drawn, range(3), encoder(data={"max_tokens": 200}))
    assert found.counts["unanswered"] == found.counts["truncated"] == 1 and found.counts["refused"] == 0
    assert found.shortened == ["rows:0: unanswered", "rows:1: truncated"]


def test_held_out_rows_that_are_left_out_are_told_at_the_start(tmp_path, caplog):
    file, said = tmp_path / "rows.jsonl", []
    answer = TALK[1] | {"content": "and so on " * 300}
    rows = [{"messages": TALK}, {"messages": [TALK[0], answer]}, {"other": 1}, {"messages": TALK}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encode = encoder(data={"eval": str(file), "max_tokens": 200, "too_long": "drop"})
    cfg = dataclasses.replace(SFTConfig(), data=encode.data)
    session = SimpleNamespace(cfg=cfg, world=SimpleNamespace(is_first=True), note=said.append, warn=said.append)
    with caplog.at_level("INFO", logger="spmdrl"):
        assert len(evaluation_rows(session, encode)) == 2
    assert said[0].startswith("--data.eval: rows that are refused: 1; the first is") and f"{file}:3" in said[0]
    assert said[1] == f"held-out rows of {file}: 2, 1 dropped"
    assert [line.split(f"{file}:")[1][:1] for line in caplog.messages] == ["3", "2"]
    file.write_text("")
    with pytest.raises(ValueError, match="rows.jsonl holds no rows"):
        evaluation_rows(session, encode)


def test_messages_after_the_last_turn_are_left_out():
    row = {"messages": [*TALK, {"role": "user", "content": "three"}]}
    assert trained(encoder(), row) == ["first<|im_end|>", "second<|im_end|>"]
    assert "three" not in encoder().tokenizer.decode(encoder()(row).sequences[0].tokens)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--data.max-tokens 9000", "a sequence must fit --policy.max-tokens-per-microbatch 8192"),
        ("--data.train a.jsonl=0.5 b.jsonl", "give every source a weight, or none"),
        ("--data.train a.jsonl=-1", "the weight after = must be a number above 0"),
        ("--data.rows-per-step 0", "must be at least 1"),
        ("--data.max-refused 2", "must be from 0 to 1"),
        ("--generate.every 5", "its prompts come from --data.eval"),
        ("--sft.neftune 5 --policy.backend megatron", "needs --policy.backend fsdp"),
        ("--sft.add-tokens <a> --lora.rank 4", "the rows of new tokens would not be trained"),
        ("--sft.add-tokens <a> <b> <a>", "all must differ"),
        ("--parallel.tp 2", "must be 1; the fsdp backend takes"),
        ("--optimizer.schedule linear --optimizer.decay-share 0", "must be above 0"),
        ("--checkpoint.best -eval/loss", "is not measured without --data.eval"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words, why):
    config = from_command_line(words.split(), "python -m spmdrl.sft", SFTConfig).config
    with pytest.raises(ConfigError) as error:
        check_sft(config, 1)
    assert why in str(error.value) and "1 setting to change" in str(error.value)


def test_settings_of_reinforcement_learning_are_unknown():
    with pytest.raises(ConfigError, match="--rollout.tp"):
        from_command_line(["--rollout.tp", "2"], "python -m spmdrl.sft", SFTConfig)


def test_a_resume_keeps_the_rows_of_a_step_and_may_change_how_many_are_refused():
    assert not may_change(SFTConfig(), "data.rows_per_step") and may_change(SFTConfig(), "data.max_refused")


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("a.jsonl", ("a.jsonl", None)),
        ("a.jsonl=0.5", ("a.jsonl", 0.5)),
        ("dir=1/a.jsonl", ("dir=1/a.jsonl", None)),
        ("hf:a/b:c=2", ("hf:a/b:c", 2.0)),
    ],
)
def test_weights_of_sources(spec, want):
    assert split_weight(spec) == want


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([{"messages": TALK}], "chatml"),
        ([{"prompt": "ab=", "answer": "ba"}, {"text": "abc"}], ""),
        ([{"text": "abc"}, {"messages": TALK}], "chatml"),
        ([{"prompt": "ab=", "answer": "ba", "system": "s"}], "chatml"),
    ],
)
def test_a_template_that_the_tokenizer_lacks_is_a_setting_of_the_job(rows, want, tmp_path):
    """Rows of messages want one, and it is recorded and saved; without any such rows all text stays plain."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cfg = SFTConfig()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train=(str(file),)))
    assert with_template(cfg, begin_sft, open_mixture(cfg)).data.chat_template == want
    off = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, chat="off"))
    assert with_template(off, begin_sft, open_mixture(off)) == off
    if any("messages" in row for row in rows):
        with pytest.raises(
            RowError, match="no chat template that would render them: give one with --data.chat-template"
        ):
            begin_sft(cfg).encode({"messages": TALK})


@pytest.mark.parametrize("other", [{"messages": TALK}, {"prompt": "ab=", "answer": "ba", "system": "s"}])
def test_plain_pairs_do_not_become_dialogues_for_one_row_that_wants_a_template(other, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [{"prompt": "ab=", "answer": "ba"}] * 3 + [other]))
    cfg = SFTConfig()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train=(str(file),)))
    with pytest.raises(ValueError, match=r"rows.jsonl.* is a plain pair.* --data.chat-template"):
        with_template(cfg, begin_sft, open_mixture(cfg))


@pytest.mark.parametrize(
    ("epochs", "rows", "steps", "want"),
    [
        (1.0, 10, 3, [4, 4, 2]),
        (2.0, 10, 5, [4] * 5),
        (1.5, 10, 4, [4, 4, 4, 3]),
        (1.0, 3, 1, [3]),
        (1.0, 10, 4, [4] * 4),
        (1.0, None, 3, [4] * 3),
    ],
)
def test_the_last_step_of_a_job_of_epochs_takes_the_rows_that_are_left(epochs, rows, steps, want):
    """Where the number of steps is the user's own, or a stream is read, all steps are alike."""
    cfg = SFTConfig()
    data = dataclasses.replace(cfg.data, epochs=epochs, rows_per_step=4)
    cfg = dataclasses.replace(cfg, data=data, run=dataclasses.replace(cfg.run, steps=steps))
    assert [rows_due(cfg, rows, step) for step in range(steps)] == want
