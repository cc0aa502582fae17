"""Rows of supervised data in the forms that people publish, and what is refused of them."""

import pytest

from spmdrl.data.dialogues import Columns, as_dialogue, example_of
from spmdrl.data.rendering import Dialogue
from spmdrl.data.row_columns import RowError

ASKED, SAID = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, SAID], "prompt": None, "text": None},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversation": [{"role": "USER", "content": "2 + 2?"}, {"role": "Model", "content": "4"}]},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "4"},
        {"prompt": [ASKED], "response": "4"},
    ],
)
def test_dialogues_of_every_form_are_the_same_messages(row):
    example = example_of(row)
    assert example.dialogue and example.dialogue.messages == [ASKED, SAID]
    assert example.trained == ([None, None] if "prompt" not in row or row["prompt"] is None else [False, None])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "completion": "4"},
        {"instruction": "2 + 2?", "output": "4", "input": ""},
        {"question": "2 + 2?", "answer": "4"},
        {"extra_info": {"question": "2 + 2?", "answer": "4"}, "data_source": "x"},
    ],
)
def test_pairs_of_text(row):
    columns = (
        Columns(prompt="extra_info.question", completion="extra_info.answer") if "extra_info" in row else Columns()
    )
    example = example_of(row, columns)
    assert (example.dialogue, example.prompt, example.text) == (None, "2 + 2?", "4")
    assert as_dialogue(example).dialogue == Dialogue([ASKED, SAID])
    system = {"role": "system", "content": "Be short."}
    assert as_dialogue(example, "Be short.").dialogue == Dialogue([system, ASKED, SAID])


def test_alpaca_joins_instruction_and_input():
    assert example_of({"instruction": "Add.", "input": "2, 2", "output": "4"}).prompt == "Add.\n\n2, 2"


def test_text_is_plain():
    assert example_of({"text": "once upon a time"}).text == "once upon a time"
    assert example_of({"story": "once", "text": "other"}, Columns(text="story")).text == "once"


def test_tools_thoughts_and_variables_of_the_template():
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}], "reasoning_content": "hm"}
    tool = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "1"}
    row = {"messages": [ASKED, turn, tool, SAID], "tools": '[{"type": "function"}]', "enable_thinking": False}
    found = example_of(row | {"chat_template_kwargs": {"x": 1}}).dialogue
    assert found and found.tools == [{"type": "function"}] and found.more == {"enable_thinking": False, "x": 1}
    assert found.messages[1] == turn | {"content": ""} and found.messages[2] == tool


def test_calls_of_sharegpt_are_tool_calls():
    text = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
    said = [{"from": "human", "value": "2 + 2?"}, {"from": "function_call", "value": text}]
    said += [{"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]
    found = example_of({"conversations": said}).dialogue
    assert found and [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]


def test_system_message_where_there_is_none():
    system = {"role": "system", "content": "own"}
    for messages, want in (([ASKED, SAID], "given"), ([system, ASKED, SAID], "own")):
        found = example_of({"messages": messages}, system="given").dialogue
        assert found and found.messages[0] == {"role": "system", "content": want} and len(found.messages) == 3


def test_fields_say_which_turns_are_trained():
    turns = [SAID | {"loss": False}, SAID | {"weight": 1}, SAID | {"train": 0, "weight": 0}, SAID]
    example = example_of({"messages": [m for turn in turns for m in (ASKED | {"weight": 0}, turn)]})
    assert example.trained[1::2] == [False, True, False, None]
    assert example.dialogue and not any({"loss", "weight", "train"} & m.keys() for m in example.dialogue.messages)


def test_turns_of_a_prompt_are_not_trained():
    example = example_of({"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}, system="s")
    assert example.trained == [False, False, False, False, None]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "its columns are none: it needs messages"),
        ({"foo": 1, "bar": 2}, "its columns are foo, bar: it needs messages"),
        ({"prompt": "x"}, "it needs messages"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": {"role": "user"}}, "not a list of messages"),
        ({"messages": ["hello"]}, "message 1 is str ('hello'), not an object"),
        ({"messages": [{"content": "x"}]}, "message 1 has the role None"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "message 1 has the role 'wizard'; known roles are user"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "message 2 (assistant) is empty"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "message 2 (assistant) is empty"),
        ({"messages": [{"role": "user", "content": ""}, SAID]}, "message 1 (user) is empty"),
        ({"messages": [ASKED, {"role": "assistant", "content": 4}]}, "the content of message 2 is int ('4'), not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
            "message 1 has parts that are not text",
        ),
        ({"messages": [ASKED, SAID | {"weight": 0.5}]}, "message 2 has weight 0.5: it must be 0 or 1"),
        (
            {"messages": [ASKED | {"loss": 1}, SAID]},
            "message 1 (user) has loss 1: only an assistant's message is trained on",
        ),
        ({"messages": [ASKED, SAID | {"loss": 1, "weight": 0}]}, "which disagree"),
        ({"messages": [ASKED, SAID], "tools": "{"}, "tools: not JSON"),
        ({"messages": [ASKED, SAID], "tools": [1]}, "not a list of JSON schemas"),
        ({"prompt": "x", "completion": ""}, "its completion is empty"),
        ({"prompt": "x", "completion": " \n"}, "its completion is empty"),
        ({"text": " "}, "its text is empty"),
        ({"text": 5}, "its text is int ('5'), not text"),
        ({"messages": "[]"}, "its messages are str ('[]'), not a list of messages"),
        ({"prompt": 3, "completion": "x"}, "its prompt is int ('3')"),
        ({"text": ""}, "its text is empty"),
    ],
)
def test_rows_are_refused_with_the_reason(row, why):
    with pytest.raises(RowError) as error:
        example_of(row)
    assert why in str(error.value)


def test_a_column_that_is_named_must_be_there():
    with pytest.raises(RowError, match="it has no column 'chatlog'; its columns are messages"):
        example_of({"messages": [ASKED, SAID]}, Columns(messages="chatlog"))
