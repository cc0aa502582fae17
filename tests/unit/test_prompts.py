"""Sources of prompts, dropped prompts, messages when a source does not fit, and the prompts that a step takes."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from spmdrl.config.schema import DataConfig
from spmdrl.data.chat import CHATML
from spmdrl.data.mixture import drawn_indices
from spmdrl.data.prompts import load_prompts
from tests.unit.chars import char_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def tok():
    return char_tokenizer()


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(spec: str, tok, limit: int = 0, longest: int = 10_000, **data):
    return load_prompts(spec, DataConfig(**data), tok, longest, limit)


# -- built-in tasks ---------------------------------------------------------------------------------------------------


def test_reverse_is_raw_text_and_held_out(tok):
    train, held = load("builtin:reverse", tok), load("builtin:reverse:eval", tok)
    assert (len(train), len(held)) == (4096, 512)
    for p in train.prompts + held.prompts:
        word = p.text.removesuffix("=")
        assert len(word) == 5 and set(word) <= set("abcdefghij") and p.ground_truth == word[::-1]
    assert not {p.text for p in train.prompts} & {p.text for p in held.prompts}
    assert len({p.text for p in train.prompts}) == 4096
    assert train.prompts[7].index == 7 and train.prompts[0].data_source == "builtin:reverse"
    with_chat = load("builtin:reverse", char_tokenizer(CHATML), limit=20)
    assert with_chat.prompts == train.prompts[:20], "no chat template, and a limit takes the first rows"


@pytest.mark.parametrize(("digits", "total", "train_size", "eval_size"), [(1, 100, 80, 20), (2, 8100, 4000, 160)])
def test_addition_keeps_mirrored_pairs_on_one_side(tok, digits, total, train_size, eval_size):
    sides = [load(f"builtin:addition-{digits}{side}", tok) for side in ("", ":eval")]
    assert [len(s) for s in sides] == [train_size, eval_size]
    seen = [{(p.extra["a"], p.extra["b"]) for p in s.prompts} for s in sides]
    assert [len(s) for s in seen] == [train_size, eval_size], "no pair twice"
    assert not {frozenset(p) for p in seen[0]} & {frozenset(p) for p in seen[1]}
    assert {(b, a) for a, b in seen[1]} == seen[1], "a + b is held out with b + a"
    low = 0 if digits == 1 else 10
    assert all(low <= x < 10**digits for s in seen for pair in s for x in pair)
    assert digits == 2 or sum(map(len, seen)) == total
    p = sides[1].prompts[0]
    a, b = p.extra["a"], p.extra["b"]
    assert p.ground_truth == str(a + b) and p.text == f"What is {a} + {b}? Answer with just the number."


def test_an_environment_speaks_in_messages_whatever_the_rows_are(tok):
    data = DataConfig(chat_template=CHATML)
    with pytest.raises(ValueError, match="plain text, which no template renders"):
        load_prompts("builtin:reverse", data, tok, 9, 4)
    begun = load_prompts("builtin:reverse", data, tok, 9, 4, begun=True).prompts
    plain = load_prompts("builtin:reverse", DataConfig(), tok, 9, 4).prompts
    assert [(p.content, p.ground_truth, p.tokens, p.chat) for p in begun] == [
        (p.content, p.ground_truth, [], True) for p in plain
    ]


def test_prefill_names_columns():
    made = load("builtin:addition-1", char_tokenizer(), prefill=" The sum of {a} and {b} is", chat_template="chatml")
    p = made.prompts[0]
    a, b = p.extra["a"], p.extra["b"]
    assert p.text == (
        f"<|im_start|>user\nWhat is {a} + {b}? Answer with just the number.<|im_end|>\n"
        f"<|im_start|>assistant\n The sum of {a} and {b} is"
    )


# -- files ------------------------------------------------------------------------------------------------------------


def test_jsonl_lines_end_and_are_blank_as_in_any_text_file(tok, tmp_path):
    file = tmp_path / "x.jsonl"
    row = b'{"prompt": "a", "answer": 1}'
    file.write_bytes(b"\xef\xbb\xbf" + row + b"\r" + row + b"\r\n\xc2\xa0\n" + row)
    assert len(load(str(file), tok)) == 3
    file.write_bytes(row + b'\n{"prompt": "\xff", "answer": 1}')
    with pytest.raises(ValueError, match="x.jsonl:2: not JSON"):
        load(str(file), tok)


def test_jsonl_columns_template_and_gzip(tok, tmp_path):
    rows = [{"q": f"{i} apples?", "n": i, "level": {"hard": [i]}} for i in range(5)]
    plain = write_jsonl(tmp_path / "x.jsonl", rows)
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    how = {
        "prompt_column": "q",
        "answer_column": "n",
        "template": "Q {level[hard]}: {prompt} \\boxed{{}}",
        "prefill": "({n})",
    }
    made = load(plain, tok, **how)
    assert made.prompts[3].text == "Q [3]: 3 apples? \\boxed{}(3)"
    assert made.prompts[3].ground_truth == 3 and made.prompts[3].extra == {"level": {"hard": [3]}}
    assert [p.tokens for p in load(str(packed), tok, **how).prompts] == [p.tokens for p in made.prompts]
    assert len(load(plain, tok, limit=2, **how)) == 2
    assert load(plain, tok, prompt_column="q", answer_column="").prompts[0].ground_truth is None


def test_template_goes_around_the_users_message(tmp_path):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    spec = write_jsonl(tmp_path / "x.jsonl", [{"prompt": talk, "answer": "1"}])
    text = load(spec, char_tokenizer(CHATML), template="<{prompt}>").prompts[0].text
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<u><|im_end|>\n<|im_start|>assistant\n"


def test_long_prompts_are_dropped_and_indices_stay(tok, tmp_path):
    spec = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a" * n, "answer": n} for n in (3, 50, 4, 60, 5)])
    made = load(spec, tok, longest=6)
    assert [p.index for p in made.prompts] == [0, 2, 4] and made.dropped == 2
    with pytest.raises(ValueError, match="shortest has 4.*--rollout.max-prompt-tokens"):
        load(spec, tok, longest=3)


def test_verl_schema_is_known_by_its_columns(tok, tmp_path):
    row = {
        "data_source": "lab/x",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 9, "split": None},
    }
    spec = write_jsonl(tmp_path / "x.jsonl", [row])
    (p,) = load(spec, tok, prompt_column="not_used").prompts
    assert (p.text, p.ground_truth, p.data_source, p.extra) == ("1+1?", "2", "lab/x", {"index": 9, "split": None})


def test_parquet_and_values_that_json_lacks(tok, tmp_path):
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "answer": [decimal.Decimal("1.5"), None],
            "day": [datetime.date(2024, 5, 1)] * 2,
            "raw": [b"\x89PNG"] * 2,
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    made = load(str(tmp_path / "x.parquet"), tok)
    assert [p.ground_truth for p in made.prompts] == ["1.5", None]
    assert made.prompts[0].extra == {"day": "2024-05-01"}, "bytes are not carried along"
    assert len(load(str(tmp_path / "x.parquet"), tok, limit=1)) == 1


def test_aime_parquet_of_verl():
    file = SHARED / "aime24" / "aime-2024.dapo.parquet"
    if not file.is_file():
        pytest.skip(f"the AIME 2024 file is not at {file}")
    made = load(str(file), char_tokenizer(CHATML), limit=64)
    p = made.prompts[0]
    assert len(made) == 64 and p.data_source == "math_dapo" and p.ground_truth == "540"
    assert p.text.startswith("<|im_start|>user\nSolve the following math problem") and p.extra["index"] == 2
    json.dumps([p.ground_truth, p.extra])


def test_gsm8k_jsonl(tok):
    file = SHARED / "gsm8k" / "test.jsonl"
    if not file.is_file():
        pytest.skip(f"GSM8K is not at {file}")
    made = load(str(file), tok, prompt_column="question", longest=400)
    assert len(made) + made.dropped == 1319 and made.dropped > 0
    assert "####" in str(made.prompts[0].ground_truth), "the raw answer; the gsm8k reward reads it"
    with pytest.raises(ValueError, match="no column 'prompt'; there are question, answer.*--data.prompt-column"):
        load(str(file), tok)


def test_hf_local_folder(tok, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"prompt": f"t{i}", "answer": i} for i in range(3)])
    write_jsonl(folder / "test.jsonl", [{"prompt": f"e{i}", "answer": i} for i in range(2)])
    assert [p.text for p in load(f"hf:{folder}", tok).prompts] == ["t0", "t1", "t2"]
    assert [p.text for p in load(f"hf:{folder}::test", tok).prompts] == ["e0", "e1"]
    datasets.Dataset.from_list([{"prompt": "d", "answer": "x"}]).save_to_disk(str(tmp_path / "disk"))
    (p,) = load(f"hf:{tmp_path / 'disk'}", tok).prompts
    assert p.text == "d" and p.data_source == str(tmp_path / "disk")
    with pytest.raises(ValueError, match="split 'nosuch'"):
        load(f"hf:{folder}::nosuch", tok)


def test_reasoning_gym_rows_carry_their_entry(tok):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    train = load("reasoning-gym:spell_backward?size=6&seed=3&max_word_len=5", tok)
    held = load("reasoning-gym:spell_backward:eval?size=6&seed=3&max_word_len=5", tok)
    assert len(train) == len(held) == 6 and train.digest() != held.digest()
    assert train.digest() == load("reasoning-gym:spell_backward?size=6&seed=3&max_word_len=5", tok).digest()
    p = train.prompts[0]
    assert p.text == p.extra["entry"]["question"] and p.ground_truth == p.extra["entry"]["answer"]
    json.dumps(p.extra)
    assert len(load("reasoning-gym:gcd", tok, limit=4)) == 4


def test_reasoning_gym_refuses(tok, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for spec, says in {
        "reasoning-gym:spel_backward": "did you mean 'spell_backward'",
        "reasoning-gym:gcd?size=many": "size must be a whole number",
        "reasoning-gym:gcd?colour=red": "refuses.*colour",
        "reasoning-gym:word_ladder": "PYTHONHASHSEED=0",
    }.items():
        with pytest.raises(ValueError, match=says):
            load(spec, tok)


@pytest.mark.parametrize(
    ("text", "data", "says"),
    [
        ('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"', {}, r"x.jsonl:3: not JSON"),
        ("[1, 2]\n", {}, r"x.jsonl:1: a row is a JSON object"),
        ("\n", {}, "holds no rows"),
        ('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"}', {}, r"x.jsonl:3: no column 'answer'.*--data.answer-column"),
        ('{"prompt": 5, "answer": 1}', {}, "is int, not text or messages.*--data.prompt-column"),
        ('{"prompt": ["a"], "answer": 1}', {}, "not of chat messages"),
        (
            '{"prompt": "a", "answer": 1}',
            {"template": "{question}"},
            "--data.template.*no column 'question'; there are",
        ),
        ('{"prompt": "a", "answer": 1}', {"template": "{prompt} \\boxed{}"}, "--data.template.*{{ and }}"),
        ('{"prompt": "a", "answer": 1}', {"prefill": "{prompt"}, "--data.prefill"),
        ('{"prompt": "a", "answer": 1}', {"chat_template": "nosuch.jinja"}, "--data.chat-template: cannot read"),
        ('{"prompt": [], "reward_model": {"style": "rule"}}', {}, "reward_model with a ground_truth"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tok, tmp_path, text, data, says):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        load(str(tmp_path / "x.jsonl"), tok, **data)


def test_what_is_wrong_with_a_source_is_said(tok, tmp_path):
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.parquet").write_text("no parquet")
    (tmp_path / "x.jsonl.gz").write_text("no gzip")
    for spec, says in {
        "builtin:revers": "did you mean 'reverse'.*--data.train",
        "gsm8k": "no data file 'gsm8k'.*hf:<name",
        "missing.jsonl": "no data file",
        str(tmp_path / "x.csv"): "not a kind of file",
        str(tmp_path / "x.parquet"): "cannot read .* as parquet",
        str(tmp_path / "x.jsonl.gz"): "cannot read",
        "hf:": "the form is hf:",
    }.items():
        with pytest.raises(ValueError, match=says):
            load(spec, tok)


def test_an_empty_prompt_is_refused(tmp_path):
    spec = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "", "answer": 1}])
    assert load(spec, char_tokenizer()).prompts[0].tokens == [1], "a start token is enough to begin from"
    empty = char_tokenizer("{{ '' }}")
    with pytest.raises(ValueError, match="x.jsonl:1: the prompt is empty"):
        load(spec, empty)


def test_rows_with_images_are_refused(tok, tmp_path):
    rows = [{"prompt": "q", "answer": "a", "images": []}] * 30 + [
        {"prompt": "<image>q", "answer": 1, "images": ["a.png"]}
    ]
    prompts = load(write_jsonl(tmp_path / "x.jsonl", rows), tok)
    assert len(prompts.prompts) == 30
    assert any("the first is" in line and "x.jsonl:31: it has images" in line for line in prompts.left)
    with pytest.raises(ValueError, match="x.jsonl:1: it has images or videos, and the model reads text only"):
        load(write_jsonl(tmp_path / "x.jsonl", rows[-1:]), tok)


# -- which prompts a step takes ---------------------------------------------------------------------------------------


def step_indices(n, per_step, step, seed):
    return drawn_indices(n, step * per_step, per_step, seed)


@pytest.mark.parametrize(("n", "per_step"), [(10, 4), (7, 7), (3, 8), (1, 2), (100, 9)])
def test_steps_cut_one_line_of_permutations(n, per_step):
    epochs = 4 * per_step  # a whole number of steps
    line = [i for step in range(epochs * n // per_step) for i in step_indices(n, per_step, step, seed=5)]
    for epoch in range(epochs):
        assert Counter(line[epoch * n : (epoch + 1) * n]) == Counter(range(n))


def test_order_is_keyed_by_seed_and_step_alone():
    steps = list(range(30))
    once = {s: step_indices(50, 8, s, seed=1) for s in steps}
    random.Random(0).shuffle(steps)
    assert {s: step_indices(50, 8, s, seed=1) for s in steps} == once
    assert step_indices(50, 8, 0, seed=2) != once[0]
    first, second = (sum((once[s] for s in range(k, k + 6)), []) for k in (0, 7))
    assert first != second
    with pytest.raises(ValueError):
        step_indices(0, 8, 0, seed=1)


def test_prompts_that_are_not_shuffled_are_drawn_in_the_order_of_their_file():
    assert drawn_indices(5, 3, 8, seed=1, shuffle=False) == [3, 4, 0, 1, 2, 3, 4, 0]
