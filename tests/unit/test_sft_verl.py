"""verl's parquet files of SFT, written as its examples/data_preprocess write them, are read unchanged."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.data.rowfiles import open_rows, without_gaps
from tests.unit.test_sft_rows import encoder, trained

ASKED, SAID = "Natalia sold 48 clips in April, and half as many in May. How many in all?", "48 + 24 = 72\n#### 72"
ORDER = 'Let\'s think step by step and output the final answer after "####".'
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": kind}}}},
    }
    for name, key, kind in (("add", "numbers", "array"), ("weather", "city", "string"))
]
WITH_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] }}{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def written(path, rows: list[dict]):
    """The rows as a source."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return open_rows(str(path))


def test_gsm8k_in_the_form_of_gsm8k_py(tmp_path):
    """Its `prompt` is for reinforcement learning; the pair lies in `extra_info`."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{ASKED} {ORDER}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": SAID, "question": ASKED},
    }
    (got,) = [written(tmp_path / "train.parquet", [row])[0]]
    assert got == row
    encode = encoder(data={"prompt_column": "extra_info.question", "completion_column": "extra_info.answer"})
    assert trained(encode, got) == [f"{SAID}<|im_end|>"]
    (sequence,) = encode(got).sequences
    assert encode.tokenizer.decode(sequence.tokens).startswith(f"<|im_start|>user\n{ASKED}<|im_end|>\n")
    with pytest.raises(ValueError, match="it needs messages .* other names are given by --data.messages-column"):
        encoder()(got)


def test_dialogues_in_the_form_of_multiturn_py(tmp_path):
    """Of gsm8k_multiturn_sft.py too: `messages` alone."""
    turns = [("system", "You are helpful."), ("user", "France?"), ("assistant", "Paris."), ("user", "Italy?")]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "Rome.")]]
    short = [{"role": "user", "content": f"{ASKED} {ORDER}"}, {"role": "assistant", "content": SAID}]
    rows = written(tmp_path / "train.parquet", [{"messages": messages}, {"messages": short}])
    assert [rows[i] for i in range(2)] == [{"messages": messages}, {"messages": short}]
    assert trained(encoder(), rows[0]) == ["Paris.<|im_end|>", "Rome.<|im_end|>"]
    assert trained(encoder(), rows[1]) == [f"{SAID}<|im_end|>"]


def test_calls_of_several_tools_have_their_own_arguments_alone(tmp_path, monkeypatch):
    """In a table every call has the arguments of all tools, None where it has none: they are not shown as null."""
    rows = []
    for name, arguments in (("add", {"numbers": [1, 2]}), ("weather", {"city": "Rome"})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": f"Call {name}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "It is done."},
        ]
        rows.append({"messages": messages, "tools": TOOLS, "enable_thinking": False})
    found = written(tmp_path / "tools.parquet", rows)
    assert found.group(0)["tools"].to_pylist()[0] != TOOLS, "the file itself has keys that are None"
    for i, row in enumerate(rows):
        assert found[i] == row
        text, *_ = trained(encoder(WITH_CALLS), found[i])
        (call,) = json.loads(text.removesuffix("<|im_end|>"))
        assert call["function"]["arguments"] == row["messages"][1]["tool_calls"][0]["function"]["arguments"]
        (sequence,) = encoder(WITH_CALLS)(found[i]).sequences
        assert "null" not in encoder().tokenizer.decode(sequence.tokens)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "tools.parquet").rename(tmp_path / "set" / "train.parquet")
    by_hub = open_rows(f"hf:{tmp_path / 'set'}")
    assert [by_hub[i] for i in range(2)] == rows != [dict(row) for row in by_hub.data]


def test_a_null_of_json_stays(tmp_path):
    """A line of JSON has its own keys alone, so that a null in it is meant."""
    row = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert open_rows(str(tmp_path / "rows.jsonl"))[0] == row != without_gaps(row)
