"""Columns of rows that every job reads, those that nothing reads, and texts that no tokenizer takes."""

import dataclasses
import json
import math
from codecs import BOM_UTF8
from types import SimpleNamespace

import pytest

from spmdrl.checkpoint.folder import first_day, write_first_day
from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.environment import EnvironmentConfig
from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.preference import PreferenceConfig
from spmdrl.config.schema import Config, DataConfig
from spmdrl.config.sft import SFTConfig, check_sft
from spmdrl.data.chat import Today
from spmdrl.data.dialogues import as_dialogue, example_of
from spmdrl.data.mixture import Drawn
from spmdrl.data.preferences import PreferenceColumns, preference_of
from spmdrl.data.prompts import load_prompts
from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.row_columns import Row, RowError
from spmdrl.data.rowfiles import open_rows
from spmdrl.data.turns import sequences_of
from spmdrl.env.messages import prompt_of
from spmdrl.plan.dry import data_lines, dry_lines
from spmdrl.rl.conversation_state import opening_of
from spmdrl.rl.teachers import teacher_prompts
from spmdrl.supervised.encoder import Encoder
from spmdrl.supervised.preview import preview
from spmdrl.supervised.rows import Rows, encoded, open_mixture
from spmdrl.train import JOB
from tests.unit.chars import char_tokenizer
from tests.unit.dialogues import templates, tokenizer_for

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% if not enable_thinking | default(true) %}<think></think>"
    "{% endif %}{% endif %}"
)
ASKED = "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def roles(messages: list[dict]) -> str:
    return " ".join(f"{m['role'][0]}:{m['content']}" for m in messages)


def prompts(tmp_path, rows: list[dict], jinja: str = TEMPLATE, **data):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(str(file), DataConfig(**data), char_tokenizer(jinja), 10_000)


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("columns", "want"),
    [
        ({"system": "s"}, [SYSTEM, USER]),
        ({"system_prompt": "s", "history": [["x", "y"]]},
         [SYSTEM, USER | {"content": "x"}, SAID | {"content": "y"}, USER]),
        ({"developer": "d"}, [{"role": "developer", "content": "d"}, USER]),
        ({"tools": [TOOL], "history": "of a patient", "system": {"id": 1}}, None),
        ({}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["q", [USER]])
def test_an_environment_finds_the_messages_before_the_prompt_of_its_row(tmp_path, columns, want, asked):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": asked, "answer": "a"} | columns))
    found = load_prompts(str(file), DataConfig(), char_tokenizer(TEMPLATE), 99, begun=True).prompts[0]
    row = opening_of(EnvironmentConfig("tools.py:TOOLS"), found, "answer", 0).row
    assert row.get("prompt_messages") == want and row["prompt"] == asked
    assert prompt_of(row) == (want or [USER])


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"system_prompt": "s", "question": "q", "response": "a"}, "s:s u:q a:a"),
        ({"system": "s", "conversations": [USER, SAID]}, "s:s u:q a:a"),
        ({"system": "s", "prompt": [USER], "completion": [SAID]}, "s:s u:q a:a"),
        ({"system": "", "messages": [USER, SAID]}, "s:run u:q a:a"),
        ({"developer": "d", "messages": [USER, SAID]}, "d:d u:q a:a"),
        ({"instruction": "q", "output": "a", "history": [["x", "y"]], "system": "s"}, "s:s u:x a:y u:q a:a"),
        ({"instruction": "q", "output": "a", "history": []}, "s:run u:q a:a"),
        ({"system": "s", "messages": [{"role": "system", "content": "s"}, USER, SAID]}, "s:s u:q a:a"),
    ],
)
def test_messages_of_the_system_and_earlier_exchanges_are_read(row, want):
    example = example_of(row, system="run")
    example = example if example.dialogue else as_dialogue(example, "run")
    assert example.dialogue and roles(example.dialogue.messages) == want
    assert len(example.trained) == len(example.dialogue.messages)


def test_preference_rows_read_the_messages_of_the_system_and_earlier_exchanges():
    row = {"system": "s", "history": [["x", "y"]], "prompt": "q", "chosen": "a", "rejected": "b"}
    sides = preference_of(row, PreferenceColumns()).sides
    told = [as_dialogue(example).dialogue for example in sides.values()]
    assert [roles(each.messages) for each in told if each] == ["s:s u:x a:y u:q a:a", "s:s u:x a:y u:q a:b"]
    dialogues = {"system": "s", "chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "b"}]}
    first = preference_of(dialogues, PreferenceColumns()).sides[0].dialogue
    assert first and roles(first.messages) == "s:s u:q a:a"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"system": "s", "system_prompt": "t", "prompt": "q", "completion": "a"}, "system and system_prompt differ"),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}, USER, SAID]}, "and its messages differ"),
        ({"system": ["s"], "messages": [USER, SAID]}, "its system message is list"),
        ({"history": ["x"], "prompt": "q", "completion": "a"}, "pairs of a question and its answer"),
        ({"messages": [USER, SAID | {"tool_calls": "{"}]}, "the tool_calls of message 2: not JSON"),
        ({"messages": [USER, SAID | {"tool_calls": "[1]"}]}, "tool_calls of message 2 are list"),
        ({"messages": [USER, SAID | {"content": "a\ud83d"}]}, r"'a' is followed by half of a surrogate pair \(\\ud83d"),
    ],
)
def test_columns_that_cannot_be_used_are_refused_with_the_reason(row, why):
    with pytest.raises(RowError, match=why):
        example_of(row)


def test_calls_as_json_text_and_tools_that_answer_nothing_are_read():
    row = [USER, {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}]
    example = example_of({"messages": [*row, {"role": "tool", "content": ""}, SAID]})
    assert example.dialogue and example.dialogue.messages[1]["tool_calls"] == [CALL]
    assert example.dialogue.messages[2]["content"] == ""


def test_a_dialogue_that_begins_with_the_assistant_is_refused_by_name_where_the_template_needs_a_question():
    template = TEMPLATE.replace(
        "{% for m", "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{% for m", 1
    )
    tokenizer = tokenizer_for(template)
    with pytest.raises(
        TemplateError, match="the chat template refuses the messages.*; the dialogue begins with an assistant's turn"
    ):
        sequences_of(Renderer(tokenizer, template), Dialogue([SAID, USER, SAID]))


def test_a_message_of_the_system_without_a_template_is_refused():
    encode = Encoder(SFTConfig().data, char_tokenizer(""), 99)
    with pytest.raises(RowError, match="its system message needs a chat template"):
        encode({"prompt": "q", "completion": "a", "system": "s"})


def test_columns_that_nothing_reads_are_named():
    row = Row({"id": 7, "source": "x", "messages": [USER, SAID], "prompt": "q", "tools": [], "note": ""})
    example_of(row)
    assert row.unread == ["id", "source", "prompt"]
    pair = Row({"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1.0, "margin": 2.0, "system": "s"})
    preference_of(pair, PreferenceColumns())
    assert pair.unread == ["score_chosen"]


def test_columns_that_nothing_reads_are_named_before_a_job_and_at_its_first_step(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [USER, SAID], "id": 7}) + "\n")
    cfg = SFTConfig()
    cfg.data = dataclasses.replace(cfg.data, train=(str(file),))
    encode = Encoder(cfg.data, tokenizer_for(TEMPLATE), 99)
    lines = preview(encode, encode.tokenizer, open_mixture(cfg), False)
    assert "columns  nothing reads these columns: id" in lines
    drawn = [Drawn("rows:1", lambda: {"messages": [USER, SAID], "id": 7})]
    assert list(encoded(drawn, range(1), encode).unread) == ["id"]


# -- reinforcement learning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "data", "want"),
    [
        ({}, {}, "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:"),
        ({"enable_thinking": False}, {}, "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:<think></think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, "assistant:<think></think>"),
        ({}, {"template_kwargs": '{"enable_thinking": false}'}, "assistant:<think></think>"),
        ({"enable_thinking": True}, {"template_kwargs": '{"enable_thinking": false}'}, "assistant:"),
        ({"system": "s"}, {}, f"<|im_start|>system:s<|im_end|>\n{ASKED}"),
        ({"developer": "d"}, {}, f"<|im_start|>developer:d<|im_end|>\n{ASKED}"),
        ({"history": [["x", "y"]]}, {}, f"user:x<|im_end|>\n<|im_start|>assistant:y<|im_end|>\n{ASKED}"),
        ({"tools": [TOOL]}, {}, "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verl", [False, True])
def test_prompts_read_what_supervised_rows_say_to_the_template(tmp_path, columns, data, want, verl):
    row = {"prompt": [USER], "reward_model": {"ground_truth": "a"}} if verl else {"prompt": "q", "answer": "a"}
    prompt = prompts(tmp_path, [row | columns], **data).prompts[0]
    assert prompt.text.endswith(want) and ("<|tools|>" in prompt.text) == ("tools" in columns)
    if "tools" in columns:
        assert prompt.tools == [TOOL] and '"name": "add"' in prompt.text
    if "system" in columns:
        assert prompt.content == [{"role": "system", "content": "s"}, USER], "what a judge reads"


@pytest.mark.parametrize(
    ("columns", "jinja", "data", "why"),
    [
        ({"documents": [{"id": 1}]}, "", {}, "no chat template renders it"),
        ({"documents": "see page 3"}, TEMPLATE, {}, "its documents are str ('see page 3'), not a list of objects"),
        ({"history": "The patient had flu"}, "", {"template": "{history}\n{prompt}"}, ""),
        ({"history": "The patient had flu"}, TEMPLATE, {"template": "{history}\n{prompt}"}, ""),
        ({"history": "The patient had flu"}, TEMPLATE, {}, "its history must be messages, or pairs"),
        ({"history": [{"year": 1990}]}, TEMPLATE, {}, "message 1 has the role None"),
        ({"tools": ["search", "calc"]}, TEMPLATE, {}, "its tools are list"),
        ({"tools": "search"}, TEMPLATE, {}, "tools: not JSON"),
        ({"developer": "Valve"}, "", {}, "no chat template renders it"),
        ({"developer": 7}, TEMPLATE, {}, "its developer message is int"),
        ({"system_prompt": "s"}, "", {"template": "{system_prompt} {prompt}"}, ""),
        ({"system": "s"}, "", {"prefill": "{system}"}, ""),
        ({"enable_thinking": False}, "", {}, "no chat template renders it"),
        ({"chat_template_kwargs": "fast"}, TEMPLATE, {}, "chat_template_kwargs: not JSON"),
    ],
)
def test_ordinary_columns_with_the_names_of_a_templates_are_left_to_rewards(tmp_path, columns, jinja, data, why):
    """A row without the column gives the same tokens; where a setting names the column, it is put there only."""
    (name, value), row = next(iter(columns.items())), {"prompt": "q", "answer": "a"}
    found = prompts(tmp_path, [row | columns, row | columns], jinja, **data)
    assert found.prompts[0].extra == columns and found.beside == (() if not why else (name,))
    for key, text in data.items():
        data[key] = text.replace(f"{{{name}}}", str(value))
    assert found.prompts[0].tokens == prompts(tmp_path, [row], jinja, **data).prompts[0].tokens
    told = f"the column {name!r} stays out of the prompt and is left to rewards (rows: 2): {why}"
    assert [line[: len(told)] for line in found.left] == ([told] if why else [])


def test_a_teacher_without_a_template_is_refused_where_the_students_prompts_have_a_column(tmp_path, monkeypatch):
    monkeypatch.setattr("spmdrl.rl.teachers.room", lambda cfg: 9999)
    cfg, rows = DistillationConfig(), [{"prompt": "q", "answer": "a", "system": "s"}]
    student, same = prompts(tmp_path, rows), prompts(tmp_path, rows, "")
    cfg.data.train = str(tmp_path / "rows.jsonl")
    assert list(teacher_prompts(cfg, char_tokenizer(""), "", same)) == [0]
    with pytest.raises(ValueError, match="in the teacher's prompts the column 'system' stays out .* take a teacher"):
        teacher_prompts(cfg, char_tokenizer(""), "", student)


def test_an_environment_gets_the_columns_and_the_template_the_variables(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "answer": "a", "system": "s", "enable_thinking": False}) + "\n")
    (prompt,) = load_prompts(str(file), DataConfig(), char_tokenizer(TEMPLATE), 99, begun=True).prompts
    assert prompt.content == "q" and prompt.extra["system"] == "s" and prompt.more == {"enable_thinking": False}


def test_columns_of_prompts_that_no_reward_or_nothing_at_all_reads(tmp_path):
    row = {"prompt": "q", "answer": "a", "level": 3, "system": "s", "hint": "h", "data_source": "x", "empty": ""}
    plain = prompts(tmp_path, [row], template="{prompt} {hint}")
    assert (plain.beside, plain.unread) == (("level",), ())
    verl = {"prompt": [USER], "reward_model": {"ground_truth": "a"}, "ability": "math", "extra_info": {"i": 1}}
    assert prompts(tmp_path, [verl]).unread == ("ability",) and not prompts(tmp_path, [verl]).beside


def test_a_dry_run_of_reinforcement_learning_opens_the_data(tmp_path, capsys):
    file, cfg = tmp_path / "rows.jsonl", Config()
    cfg.data.train, cfg.data.eval, cfg.data.chat_template = str(file), "", "chatml"
    file.write_text(json.dumps({"prompt": "q", "answer": "a", "level": 1}) + "\n")
    told, _ = data_lines(cfg)
    assert "the first rows give 1 prompt" in told[0] and told[1] == "columns  only rewards and environments get level"
    assert told[2].startswith("example  <|im_start|>user")
    file.write_text(json.dumps({"prompt": "q", "answer": "a"}) + "\n" + json.dumps({"prompt": "\ud83d", "answer": ""}))
    assert "rows.jsonl:2: the text '' is followed by half of a surrogate pair" in refused(cfg, capsys)
    file.write_text("".join(json.dumps({"prompt": "q", "answer": a}) + "\n" for a in ("7", None, math.nan, 3.0)))
    cfg.reward.function = "math"
    why = "rows.jsonl:2: math cannot grade this row: the truth is empty (null)"
    assert why in (said := refused(cfg, capsys)) and "(2 of 4 rows have such a problem)" in said
    cfg.reward.function, cfg.reward.more = "none", ("gsm8k=0.5",)
    assert "rows.jsonl:2: gsm8k cannot grade this row" in refused(cfg, capsys)
    cfg.reward.more, cfg.rollout.max_new_tokens = (), 1 << 20
    assert "leaves no room for a prompt" in refused(cfg, capsys)


def test_a_few_rows_of_prompts_with_half_of_a_character_are_left_out_and_named(tmp_path):
    good, bad = {"prompt": "q", "answer": "a"}, {"prompt": "a\ud83d", "answer": "a"}
    found = prompts(tmp_path, [*[good] * 20, bad, *[good] * 19])
    assert [p.index for p in found.prompts] == [*range(20), *range(21, 40)] and found.dropped == 0
    (line,) = found.left
    assert (
        line.startswith("rows that are refused and left out: 1; the first is ")
        and "rows.jsonl:21: the text 'a' is" in line
    )
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the text 'a' is followed by half of a surrogate pair"):
        prompts(tmp_path, [*[bad] * 3, *[good] * 37])


def refused(cfg: Config, capsys) -> str:
    """Returns the message with which a dry run ends."""
    with pytest.raises(SystemExit) as ended:
        dry_lines(JOB, cfg, 3)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out.startswith("ranks    3 "), "the plan stands whatever the data are"
    return told.err


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not valid JSON"), ("[1]", "must be a JSON object"), ('{"tools": 1}', "is set by the rendering itself"),
     ('{"strftime_now": "now"}', "such as 2026-01-31")],
)  # fmt: skip
def test_variables_of_the_run_are_checked_at_start(text, why):
    config = from_command_line(["--data.template-kwargs", text], "python -m spmdrl.sft", SFTConfig).config
    with pytest.raises(ConfigError, match=why):
        check_sft(config, 1)


def test_variables_of_the_run_reach_supervised_rows_and_preferences():
    for config in (SFTConfig(), PreferenceConfig()):
        template = TEMPLATE.replace("{% for m", "{{ note }}{% for m", 1)
        data = dataclasses.replace(config.data, template_kwargs='{"note": "N1"}')
        encode = Encoder(data, tokenizer_for(template), 999)
        for row, want in (({}, "N1"), ({"chat_template_kwargs": {"note": "N2"}}, "N2")):
            tokens = encode({"messages": [USER, SAID]} | row).sequences[0].tokens
            assert encode.tokenizer.decode(tokens).startswith(want)


# -- tools and variables that the template does not show ---------------------------------------------------------------


UNREAD = {"tools": [TOOL], "enable_thinking": False, "chat_template_kwargs": {"depth": 3}}
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("jinja", "names"),
    [
        (PLAIN, ["tools", "depth", "enable_thinking"]),
        (TEMPLATE, ["depth"]),
        (f"{{{{ depth }}}}{TEMPLATE}", []),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_tools_and_variables_that_the_template_does_not_show_are_named_once(tmp_path, jinja, names, thinks):
    columns = UNREAD | {"enable_thinking": thinks}
    line = f"the chat template does not show {', '.join(names)}, which rows give"
    found = prompts(tmp_path, [{"prompt": "q", "answer": "a"} | columns] * 3, jinja)
    assert found.left == ((line,) if names else ())
    cfg, file = SFTConfig(), tmp_path / "given.jsonl"
    file.write_text(json.dumps({"messages": [USER, SAID]} | columns) + "\n")
    cfg.data = dataclasses.replace(cfg.data, train=(str(file),))
    encode = Encoder(cfg.data, tokenizer_for(jinja), 99)
    lines = preview(encode, encode.tokenizer, open_mixture(cfg), False)
    assert [each for each in lines if each.startswith("columns")] == ([f"columns  {line}"] if names else [])
    assert "not shown" not in lines[0]


def test_tools_that_the_template_does_not_show_are_named_at_the_first_step(tmp_path, caplog):
    file, cfg = tmp_path / "rows.jsonl", SFTConfig()
    file.write_text((json.dumps({"messages": [USER, SAID], "tools": [TOOL]}) + "\n") * 4)
    cfg.data = dataclasses.replace(cfg.data, train=(str(file),), rows_per_step=2)
    world = SimpleNamespace(rank=0, size=1, is_first=True, host_group=None)
    data = Rows(cfg, world, open_mixture(cfg), Encoder(cfg.data, tokenizer_for(PLAIN), 99))  # type: ignore[arg-type]
    data.take(0, last=False)
    data.take(1, last=True)
    told = [record.getMessage() for record in caplog.records if "does not show" in record.getMessage()]
    assert told == ["the chat template does not show tools, which rows give (--data.train)"]


@pytest.mark.parametrize("name", ["enable_thinking", "depth"])
def test_a_variable_of_the_whole_run_that_the_template_does_not_read_is_refused(tmp_path, name):
    kwargs = {"template_kwargs": json.dumps({name: True})}
    with pytest.raises(ValueError, match=f"--data.template-kwargs: .* the same text without '{name}': leave it out"):
        prompts(tmp_path, [{"prompt": "q", "answer": "a"}], PLAIN, **kwargs)
    with pytest.raises(ValueError, match=f"--data.template-kwargs: .* the same text without '{name}': leave it out"):
        Encoder(dataclasses.replace(SFTConfig().data, **kwargs), tokenizer_for(PLAIN), 99)
    read = f"{{% if {name} %}}x{{% endif %}}{PLAIN}"
    assert prompts(tmp_path, [{"prompt": "q", "answer": "a"}], read, **kwargs).prompts[0].text.startswith("x")
    load_prompts(str(tmp_path / "rows.jsonl"), DataConfig(**kwargs), char_tokenizer(PLAIN), 99, teacher=True)


# -- files, templates, dates ------------------------------------------------------------------------------------------


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_passed_over(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(BOM_UTF8 + json.dumps({"prompt": "q", "answer": "a"}).encode() + b"\n")
    assert load_prompts(str(file), DataConfig(), char_tokenizer(TEMPLATE), 99).prompts[0].ground_truth == "a"
    assert open_rows(str(file))[0] == {"prompt": "q", "answer": "a"}  # type: ignore[index]


def test_of_named_templates_the_one_for_tools_is_taken_where_there_are_tools():
    tokenizer = char_tokenizer("")
    tokenizer.chat_template = {
        "default": TEMPLATE.replace("<|tools|>", "D"),
        "tool_use": TEMPLATE,
        "own": "x" + TEMPLATE,
    }
    render = Renderer(tokenizer)
    assert not render(Dialogue([USER])).startswith("x")
    assert render(Dialogue([USER], [TOOL])).startswith("<|tools|>")
    assert Renderer(tokenizer, "own")(Dialogue([USER])).startswith("x")
    tokenizer.chat_template = {"own": TEMPLATE}
    with pytest.raises(ValueError, match="none named default: name one of them with --data.chat-template"):
        Renderer(tokenizer)


def test_resume_templates_show_the_date_of_the_first_start(monkeypatch):
    from datetime import date

    template = templates()["gptoss"]
    tokenizer = tokenizer_for(template)
    monkeypatch.setattr(Today, "first", date(2026, 1, 31))
    render = Renderer(tokenizer)
    assert "2026-01-31" in render(Dialogue([USER]))
    given = Renderer(tokenizer, "", {"strftime_now": "2025-02-28"})
    assert "2025-02-28" in given(Dialogue([USER]))


# -- jobs of which no row can be trained ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "refused"), [([{"messages": [USER, SAID | {"content": "a" * 99}]}] * 3, False)])
def test_a_job_whose_rows_are_all_dropped_fails_instead_of_saving(tmp_path, rows, refused):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = SFTConfig()
    cfg.data = dataclasses.replace(cfg.data, train=(str(file),), too_long="drop", max_tokens=20, rows_per_step=2)
    encode = Encoder(cfg.data, tokenizer_for(TEMPLATE), 20)
    world = SimpleNamespace(rank=0, size=1, is_first=True, host_group=None)
    data = Rows(cfg, world, open_mixture(cfg), encode)  # type: ignore[arg-type]
    data.take(0, last=False)
    with pytest.raises(ValueError, match="none of 4 rows of --data.train could be trained on: all are refused, or lon"):
        data.take(1, last=True)


def test_resume_the_day_of_the_first_start_is_kept_in_the_run_folder(tmp_path):
    from datetime import date

    world = SimpleNamespace(is_first=True, host_group=None)
    assert first_day(tmp_path, world) == date.today()  # type: ignore[arg-type]
    write_first_day(tmp_path, date(2026, 1, 31))
    assert first_day(tmp_path, world) == date(2026, 1, 31)  # type: ignore[arg-type]
