"""Rows of supervised jobs: sources that are read by index or as streams, and the order in which they come."""

import gzip
import json
from collections import Counter

import pytest

from spmdrl.data.mixture import Blocks, Mixture, Permuted
from spmdrl.data.rowfiles import Gzipped, Lines, Parquet, Table, open_rows

ROWS = [{"text": f"row {i} äö"} for i in range(25)]


@pytest.fixture
def files(tmp_path):
    """The same rows as lines, compressed lines and a table of three row groups."""
    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" + "\n" * (i % 3 == 0) for i, row in enumerate(ROWS))
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=10)
    return tmp_path


def test_indexed_sources_give_the_same_rows_in_any_order(files):
    for source in (open_rows(str(files / "rows.jsonl")), open_rows(str(files / "rows.parquet")), Table("t", ROWS)):
        assert len(source) == 25
        for i in (24, 0, 9, 10, 11, 24, 3):
            assert source[i] == ROWS[i]
    # An empty line follows the lines 1, 5 and so on.
    assert Lines(files / "rows.jsonl").where(1) == f"{files / 'rows.jsonl'}:3"
    assert Parquet(files / "rows.parquet").where(7) == f"{files / 'rows.parquet'}, row 7"


def test_streams_begin_at_any_row(files):
    stream = open_rows(str(files / "rows.jsonl.gz"))
    assert isinstance(stream, Gzipped)
    assert list(stream.rows(0)) == ROWS and list(stream.rows(20)) == ROWS[20:] and list(stream.rows(25)) == []


def test_a_stream_that_ends_early_says_where(files):
    whole = (files / "rows.jsonl.gz").read_bytes()
    (files / "cut.jsonl.gz").write_bytes(whole[: len(whole) - 9])
    with pytest.raises(ValueError, match="cut.jsonl.gz ends early, after row 24"):
        list(open_rows(str(files / "cut.jsonl.gz")).rows(0))


def test_rows_that_cannot_be_read_are_errors_of_their_own(tmp_path):
    bad = b'{"text": "a"}\nnot json\n[1]\n{"text": "b"}\n'
    (tmp_path / "bad.jsonl").write_bytes(bad)
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(bad))
    lines = open_rows(str(tmp_path / "bad.jsonl"))
    for i, why in ((1, "not JSON"), (2, "a row is a JSON object")):
        with pytest.raises(ValueError, match=why):
            lines[i]
    drawn = [Blocks(Gzipped(str(tmp_path / "bad.jsonl.gz")), 0).draw() for _ in range(1)]
    stream = Blocks(Gzipped(str(tmp_path / "bad.jsonl.gz")), 0)
    found = Counter()
    for each in (stream.draw() for _ in range(4)):
        try:
            found[each.read()["text"]] += 1
        except ValueError:
            found["refused"] += 1
    assert drawn and found == {"a": 1, "b": 1, "refused": 2}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("nowhere.jsonl", "no data file 'nowhere.jsonl'"),
        ("README.md", "is not a kind of file that is read here"),
        ("hf:a:b:c:d", "the form is hf:"),
    ],
)
def test_sources_that_do_not_exist_are_refused(spec, why):
    with pytest.raises(ValueError, match=why):
        open_rows(spec)


def texts(part, count: int) -> list[str]:
    return [part.draw().read()["text"] for _ in range(count)]


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_every_epoch_has_every_row_once_in_another_order(kind, files):
    def made():
        if kind == "indexed":
            return Permuted([Table("a", ROWS[:10]), Table("b", ROWS[10:])], 5)
        return Blocks(Gzipped(str(files / "rows.jsonl.gz")), 5, block=8)

    drawn = texts(made(), 75)
    epochs = [drawn[i : i + 25] for i in (0, 25, 50)]
    assert all(sorted(epoch) == sorted(row["text"] for row in ROWS) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3 and epochs[0] != [row["text"] for row in ROWS]
    # The same at every start, and from any place on.
    for stop in (0, 1, 7, 8, 24, 25, 26, 60):
        first, second = made(), made()
        texts(first, stop)
        second.restore(json.loads(json.dumps(first.state())))
        assert texts(second, 75 - stop) == drawn[stop:]


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_rows_that_are_not_shuffled_come_in_the_order_of_their_file_in_every_epoch(kind, files):
    def made():
        if kind == "indexed":
            return Permuted([Table("a", ROWS[:10]), Table("b", ROWS[10:])], 5, shuffle=False)
        return Blocks(Gzipped(str(files / "rows.jsonl.gz")), 5, shuffle=False, block=8)

    first, second = made(), made()
    assert texts(first, 60) == ([row["text"] for row in ROWS] * 3)[:60]
    second.restore(json.loads(json.dumps(first.state())))
    assert texts(second, 15) == [row["text"] for row in ROWS[10:]]


def test_a_stream_that_became_shorter_is_noticed_at_a_resume(files):
    first = Blocks(Gzipped(str(files / "rows.jsonl.gz")), 5)
    texts(first, 20)
    (files / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(ValueError, match="ends early: it had a row 19 before the resume"):
        Blocks(Gzipped(str(files / "rows.jsonl.gz")), 5).restore(first.state())


def test_an_empty_stream_is_named(tmp_path):
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="none.jsonl.gz holds no rows"):
        Blocks(Gzipped(str(tmp_path / "none.jsonl.gz")), 0).draw()


def test_mixtures_hold_their_shares_in_every_stretch():
    parts = [
        Permuted([Table(name, [{"text": name}] * rows)], i) for i, (name, rows) in enumerate([("a", 5), ("b", 50)])
    ]
    parts.append(Permuted([Table("c", [{"text": "c"}] * 7)], 2))
    mixture = Mixture(parts, [0.5, 0.2, 0.3])
    drawn = [each.read()["text"] for each in mixture.draw(1000)]
    for start in range(0, 1000, 50):
        counts = Counter(drawn[start : start + 50])
        assert abs(counts["a"] - 25) <= 1 and abs(counts["b"] - 10) <= 1 and abs(counts["c"] - 15) <= 1
    # b has 50 rows and a fifth of the mixture, so an epoch takes 250.
    assert mixture.rows == 250


def test_resume_of_a_mixture_is_exact():
    def made():
        return Mixture([Permuted([Table("a", ROWS)], 1), Permuted([Table("b", ROWS[::-1])], 2)], [1.0, 3.0])

    whole = [each.read()["text"] for each in made().draw(200)]
    first, second = made(), made()
    first.draw(77)
    second.restore(json.loads(json.dumps(first.state())))
    assert [each.read()["text"] for each in second.draw(123)] == whole[77:]
