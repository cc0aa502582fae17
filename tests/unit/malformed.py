"""Mistakes that a user may make, drawn by hypothesis: settings, data files, model folders; and the outcomes allowed.

A case is good when it is read, or refused by one of our errors whose message names the file or the flag, within its
time. Anything else (a KeyError, a library's own exception, no message, no end) is a fault of ours.
"""

import copy
import gzip
import io
import json
import re
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from spmdrl.config.checks import check
from spmdrl.config.dump import to_yaml
from spmdrl.config.fields import ConfigError, flag, leaves
from spmdrl.config.load import from_command_line
from spmdrl.config.schema import Config, DataConfig
from spmdrl.data.prompts import load_prompts
from spmdrl.engines.build import prompt_limit, stop_tokens
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer

LIMIT = 120
"""Seconds for one case on a machine that does other things too."""
NAMES = sorted(leaves(Config))
TINY_PARTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

text = st.text(max_size=20)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**30, -(10**30)]),
    st.floats(),
    text,
    st.sampled_from(
        ["", "nan", "inf", "-1", "1e999", "0x10", "~", "None", "ü\u202eß\U0001f600", "../..", "a" * 5000, "\0"]
    ),
)
values = st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3), max_leaves=6)
small = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 70), st.floats(), text),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3),
    max_leaves=4,
)
"""Values without large numbers: a model built from those takes memory and time."""


class Hang(BaseException):
    """A case that did not end."""


@contextmanager
def limited(seconds: int = LIMIT):
    """Raises Hang after so many seconds. Main thread only."""

    def stop(*_):
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(read, error: type[Exception], named: re.Pattern) -> str:
    """Returns `read` or `refused`; raises AssertionError for anything else."""
    with limited():
        try:
            read()
        except error as refusal:
            message = str(refusal)
            assert named.search(message), f"the message names neither file nor flag: {message!r}"
            assert len(message) < 20_000, f"a message of {len(message)} letters"
            return "refused"
        except (Exception, SystemExit) as fault:
            raise AssertionError(f"{type(fault).__name__} instead of a message: {fault}") from fault
    return "read"


# ── broken bytes ─────────────────────────────────────────────────────────────


@st.composite
def damaged(draw, good: bytes) -> bytes:
    """Draws a file cut off, with bytes changed, put in or doubled, or something else altogether."""
    how = draw(st.sampled_from(["cut", "change", "insert", "double", "binary", "empty", "bom", "utf16", "lines"]))
    at = draw(st.integers(0, max(len(good) - 1, 0)))
    if how == "cut":
        return good[:at]
    if how == "change":
        return good[:at] + draw(st.binary(min_size=1, max_size=4)) + good[at + 1 :]
    if how == "insert":
        return good[:at] + draw(st.binary(min_size=1, max_size=30)) + good[at:]
    if how == "double":
        return good + good
    if how == "bom":
        return b"\xef\xbb\xbf" + good
    if how == "utf16":
        return good.decode("utf-8", "replace").encode("utf-16")
    if how == "lines":
        return good.replace(b"\n", b"\r\n")
    return b"" if how == "empty" else draw(st.binary(max_size=200))


def set_at(tree, path: list[int], value):
    """Returns `tree` with one of its entries, chosen by numbers, replaced or (value is ...) taken out."""
    if not isinstance(tree, dict | list) or not tree:
        return value
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[path[0] % len(keys)]
    if len(path) > 1 and isinstance(tree[key], dict | list) and tree[key]:
        tree[key] = set_at(tree[key], path[1:], value)
    elif value is ...:
        del tree[key]
    else:
        tree[key] = value
    return tree


places = st.lists(st.integers(0, 1000), min_size=1, max_size=4)


# ── settings ─────────────────────────────────────────────────────────────────


@st.composite
def yaml_files(draw) -> bytes:
    """Draws a file for --config."""
    good = to_yaml(Config())
    lines = good.splitlines()
    kind = draw(st.sampled_from(["line", "leaf", "bytes", "deep", "bomb", "loop", "double", "values", "tags"]))
    if kind == "bytes":
        return draw(damaged(good.encode()))
    if kind == "line":
        at = draw(st.integers(0, len(lines) - 1))
        new = draw(
            st.sampled_from(["  steps: *nothing", "\t- x", "? a", "  <<: {a: b}", "!!python/object:os.system x", "%"])
        )
        lines[at : at + draw(st.integers(0, 1))] = [draw(st.one_of(text, st.just(new)))]
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    if kind == "double":
        return (good + "run:\n  steps: 3\n").encode()
    if kind == "deep":
        depth = draw(st.sampled_from([5, 100, 3000, 20000]))
        opening = draw(st.sampled_from(["[", "{a: ", "- "]))
        return f"run: {opening * depth}".encode()
    if kind == "bomb":
        rows = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
        rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, draw(st.integers(2, 20)))]
        maps = [row.replace("[", "{" + "k: ", 1).replace("]", "}") for row in rows]
        return "\n".join(draw(st.sampled_from([rows, maps]))).encode()
    if kind == "loop":
        return draw(
            st.sampled_from([b"run: &a\n  steps: *a\n", b"run: &a {dir: *a}\n", b"&a [*a]", b"&a\n? *a\n: 1\n"])
        )
    if kind == "tags":
        return b"run:\n  steps: !!python/object/apply:os.system ['true']\n  seed: !!binary aGk=\n  name: !!set {a, b}\n"
    section, _, leaf = draw(st.sampled_from(NAMES)).partition(".")
    tree = {section: {leaf: draw(values)}} if kind == "leaf" else draw(values)
    try:
        return json.dumps(tree, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    except ValueError:
        return b"run: 3"


@st.composite
def flags(draw) -> list[str]:
    """Draws words of a command line."""
    words = []
    for _ in range(draw(st.integers(1, 3))):
        name = flag(draw(st.sampled_from(NAMES)))
        name = draw(
            st.sampled_from([name, name.replace("-", "_"), name[:-1], name + ".x", name.upper(), "--no" + name[1:]])
        )
        word = draw(st.one_of(text, scalars.map(str), st.lists(scalars.map(str), max_size=3).map(" ".join)))
        words += draw(st.sampled_from([[f"{name}={word}"], [name, *word.split(" ")], [name], [word]]))
    # They ask for help, or for a file.
    return [w for w in words if w not in ("-h", "--help") and not w.startswith("--config")]


def read_settings(argv: list[str]) -> None:
    """Reads settings as a run does; the settings that it writes down must read back."""
    loaded = from_command_line(argv)
    for world in (1, 2):
        check(loaded.config, world)
    to_yaml(loaded.config)


def settings_case(draw) -> str:
    """Runs one case of settings."""
    if draw(st.booleans()):
        argv = draw(flags())
        return judged(lambda: read_settings(argv), ConfigError, re.compile(r"--|unexpected word|unknown"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(draw(yaml_files()))
        argv = ["--config", str(file), *(["--run.steps", "3"] if draw(st.booleans()) else [])]
        return judged(lambda: read_settings(argv), ConfigError, re.compile(r"--|run\.yaml"))


# ── data ─────────────────────────────────────────────────────────────────────

ROWS = [{"prompt": f"ab{c}=", "answer": f"{c}ba", "extra": {"n": i}} for i, c in enumerate("cdefg")]


def jsonl(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


GOOD_PARQUET = parquet(ROWS)
CHAT = [
    [{"role": "user", "content": "abc"}],
    [{"role": "user"}],
    [{"content": 3}],
    [[]],
    [{"role": 3, "content": None}],
]


@st.composite
def data_files(draw) -> tuple[str, bytes]:
    """Draws name and bytes of a file for --data.train."""
    kind = draw(st.sampled_from(["rows", "line", "bytes", "parquet", "types", "gz", "huge", "chat", "verl"]))
    if kind == "parquet":
        return "data.parquet", draw(damaged(GOOD_PARQUET))
    if kind == "gz":
        return "data.jsonl.gz", draw(damaged(gzip.compress(jsonl(ROWS), mtime=0)))
    if kind == "bytes":
        return "data.jsonl", draw(damaged(jsonl(ROWS)))
    if kind == "huge":
        return "data.jsonl", draw(
            st.sampled_from([b'{"prompt": "' + b"a" * 3_000_000, b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000])
        )
    rows: list = copy.deepcopy(ROWS)
    at = draw(st.integers(0, len(rows) - 1))
    if kind == "chat":
        rows[at]["prompt"] = draw(st.sampled_from(CHAT))
    elif kind == "verl":
        rows = [{"prompt": "abc", "reward_model": {"ground_truth": "c"}, "extra_info": {}} for _ in range(3)]
        rows[at % 3] = set_at(rows[at % 3], draw(places), draw(values))
    elif kind == "line":
        lines = jsonl(rows).splitlines(keepends=True)
        lines[at] = draw(st.one_of(st.binary(max_size=30), text.map(lambda x: x.encode("utf-8", "replace")))) + b"\n"
        return "data.jsonl", b"".join(lines)
    else:
        rows[at] = (
            draw(values) if kind == "types" else set_at(rows[at], draw(places), draw(st.one_of(values, st.just(...))))
        )
    try:
        if draw(st.booleans()):
            return "data.parquet", parquet([row for row in rows if isinstance(row, dict)])
        return "data.jsonl", jsonl(rows)
    except Exception:  # pyarrow makes no table of it, JSON no text
        return "data.jsonl", repr(rows).encode("utf-8", "replace")


data_settings = st.builds(
    DataConfig,
    prompt_column=st.sampled_from(["prompt", "answer", "extra", "", "nothing"]),
    answer_column=st.sampled_from(["answer", "", "extra", "nothing"]),
    template=st.sampled_from(
        ["", "{prompt}", "{", "{nothing}", "{prompt.x}", "{0}", "{extra[n]}", "{prompt!z}", "{prompt:d}"]
    ),
    system=st.sampled_from(["", "be kind"]),
    prefill=st.sampled_from(["", "{answer}", "}", "{extra[q]}"]),
    chat=st.sampled_from(["auto", "on", "off"]),
    chat_template=st.sampled_from(
        ["", "chatml", "{{ x.y.z }}", "{% for", "no/such.jinja", "{{ messages[9] }}", "{{ 1/0 }}"]
    ),
)
plain_settings = st.just(DataConfig())


def data_case(draw) -> str:
    """Runs one case of a data file."""
    settings = draw(st.one_of(plain_settings, data_settings))
    limit = draw(st.sampled_from([0, 2]))
    with tempfile.TemporaryDirectory() as folder:
        name, data = draw(data_files())
        file = Path(folder) / name
        file.write_bytes(data)
        return judged(
            lambda: load_prompts(str(file), settings, tokenizer(), 64, limit),
            ValueError,
            re.compile(rf"{re.escape(str(file))}|--data\.|--rollout\."),
        )


_tokenizer: list = []


def tokenizer():
    """Tokenizer of the tiny policy, loaded once."""
    if not _tokenizer:
        _tokenizer.append(load_tokenizer(TINY))
    return _tokenizer[0]


# ── models ───────────────────────────────────────────────────────────────────


@st.composite
def model_folders(draw) -> dict[str, bytes | None]:
    """Draws file -> other bytes, or None for a missing file."""
    changes: dict[str, bytes | None] = {}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(TINY_PARTS))
        good = (TINY / name).read_bytes()
        how = draw(st.sampled_from(["gone", "bytes", "tree", "tree", "index"]))
        if how == "gone":
            changes[name] = None
        elif how == "index":
            tree = draw(st.one_of(st.just({"weight_map": {"a": "x"}}), st.just({"weight_map": {"a": 3}}), small))
            changes["model.safetensors.index.json"] = json.dumps(tree).encode("utf-8", "replace")
        elif how == "bytes" or name == "model.safetensors":
            changes[name] = draw(damaged(good))
        else:
            tree = set_at(json.loads(good), draw(places), draw(st.one_of(small, st.just(...))))
            changes[name] = json.dumps(tree).encode("utf-8", "replace")
    return changes


def read_model(folder: Path) -> None:
    """Reads a model as a run does."""
    found = resolve(str(folder))
    tokens = load_tokenizer(found)
    prompt_limit(Config(), found)
    stop_tokens(found, tokens)
    load_prompts("builtin:reverse", DataConfig(limit=2), tokens, 64, 2)
    build_model(found, "float32")


def model_case(draw) -> str:
    """Runs one case of a model folder."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        shutil.copytree(TINY, folder)
        for name, data in draw(model_folders()).items():
            (folder / name).unlink(missing_ok=True)
            if data is not None:
                (folder / name).write_bytes(data)
        named = re.compile(rf"{re.escape(str(folder))}|--model\.|--data\.|--rollout\.")
        return judged(lambda: read_model(folder), ValueError, named)


CASES = {"settings": settings_case, "data": data_case, "model": model_case}
outcomes: Counter = Counter()
"""(kind, outcome) -> number of cases."""


def one_case(draw, kind: str) -> None:
    """Runs one case and counts it."""
    outcomes[kind, CASES[kind](draw)] += 1
