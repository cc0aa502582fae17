"""Tree files: every bit comes back, and nothing else is taken for one."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import save_file

from spmdrl.checkpoint import treefile

QUIET_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
)


def same(a, b) -> bool:
    """Returns True for values of one type and bit for bit equal, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = [x.contiguous().flatten().view(torch.uint8).tolist() if x.numel() else [] for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and as_bytes[0] == as_bytes[1]
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return a == b


TREES = {
    "leaves": [None, True, False, 0, 1, -(2**80), "", "ä\n\0\ud800", 0.1, -0.0, 5e-324, 1e308],
    "numbers that are none": (math.nan, math.inf, -math.inf, QUIET_NAN, torch.tensor([math.nan, math.inf])),
    "empty": {
        "dict": {},
        "list": [],
        "tuple": (),
        "tensor": torch.zeros(0),
        "rows": torch.zeros(0, 3, dtype=torch.int16),
    },
    "nested": {"": [{"a": (1, [2, (3.5,)])}, ()], "float": {"float": "00"}, "tensor": {"tensor": "0"}, "b": [[]]},
    "tensors": {str(d): torch.arange(7).to(d).reshape(7, 1) for d in DTYPES} | {"scalar": torch.tensor(2.5)},
    "a leaf": 3,
}


@pytest.mark.parametrize("name", TREES)
def test_every_bit_comes_back(name, tmp_path):
    path = tmp_path / "x.safetensors"
    treefile.write(path, TREES[name])
    assert same(treefile.read(path), TREES[name])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_same_tree_gives_the_same_bytes_and_views_are_copied(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"all": base, "part": base.T[1:3], "again": base, "learns": torch.nn.Parameter(base[0])}
    for name in "ab":
        treefile.write(tmp_path / name, tree)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    got = treefile.read(tmp_path / "a")
    assert torch.equal(got["part"], base.T[1:3]) and type(got["learns"]) is torch.Tensor
    # What was read lives on without its file.
    (tmp_path / "a").write_bytes(b"\xff" * (tmp_path / "a").stat().st_size)
    got["all"] += 1
    assert torch.equal(got["all"], base + 1) and torch.equal(got["again"], base)


def test_the_files_tree_is_not_looked_up_in_memory(tmp_path):
    """`same` can fail: it sees one bit, one type, one order."""
    assert not same(0.0, -0.0) and not same(math.nan, QUIET_NAN) and not same((1,), [1]) and not same(1, True)
    assert not same(torch.zeros(2), torch.zeros(2, 1)) and not same(torch.zeros(1), -torch.zeros(1))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [{1: 2}]}, r"tree\.a\[0\] has the key 1"),
        ({"a": {1, 2}}, r"tree\.a is a set"),
        ([object()], r"tree\[0\] is a object"),
        ({"x": torch.eye(2).to_sparse()}, r"tree\.x is a Tensor of layout torch.sparse_coo"),
        ({"x": 1j}, r"tree\.x is a complex"),
    ],
)
def test_what_cannot_be_held_is_named(tree, where, tmp_path):
    with pytest.raises(TypeError, match=where):
        treefile.write(tmp_path / "x", tree)
    assert not list(tmp_path.iterdir())


def made(path, skeleton, **tensors):
    save_file(tensors, path, {treefile.KEY: skeleton if isinstance(skeleton, str) else json.dumps(skeleton)})


def test_anything_else_is_refused_by_name(tmp_path):
    path = tmp_path / "x.safetensors"
    whole = tmp_path / "whole"
    treefile.write(whole, {"a": torch.arange(100), "b": "text"})
    blob = whole.read_bytes()

    def refused(say=""):
        with pytest.raises(ValueError, match=f"x.safetensors is not a readable tree file.*{say}"):
            treefile.read(path)

    refused()  # none there
    path.mkdir()
    refused()
    path.rmdir()
    for content in (b"", b"{}", b"\0" * 64, b"\xff" * 64, blob[:-1], blob[:50], blob + b"x"):
        path.write_bytes(content)
        refused()
    save_file({"a": torch.zeros(2)}, path)
    refused("no tree")
    for skeleton, say in [
        ("{", ""),
        ("NaN", "number NaN"),
        ("1.5", "number 1.5"),
        ({"float": "12"}, "'float'"),
        ({"float": "7FF8000000000000"}, "'float'"),
        ({"tensor": "1"}, "'tensor'"),
        ([{"tensor": "0"}, {"tensor": "0"}], "'tensor'"),
        ({"set": []}, "'set'"),
        ({"tuple": {}}, "'tuple'"),
        ({"dict": [], "tuple": []}, "one kind"),
        ({}, "one kind"),
        (1, "does not use the tensors 0"),
        ("[" * 100_000 + "]" * 100_000, ""),
    ]:
        made(path, skeleton, **{"0": torch.zeros(2)})
        refused(say)
