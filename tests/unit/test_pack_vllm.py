"""Packing of vLLM for a machine without a network, on small libraries and wheels made here."""

import json
import lzma
import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks import pack_vllm
from benchmarks._fatbin import CUBIN, MAGIC, fat_binaries, pruned, sections

PTX = 1


def image(kind: int, arch: int, size: int = 64) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, size).ljust(28, b"\0") + struct.pack("<I", arch)
    return header.ljust(64, b"\0") + bytes([arch]) * size


def fat(*images: bytes) -> bytes:
    data = b"".join(images)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(data)) + data


def library(*parts: bytes) -> bytes:
    """An ELF file with the sections .nv_fatbin, .symtab and .shstrtab, and bytes before and after them."""
    names = b"\0.nv_fatbin\0.symtab\0.shstrtab\0"
    contents = [b"", b"\0" * 8 + b"".join(parts), b"symbols!", names]
    at, rows, body = 64, [], b""
    for name, data in zip((0, 1, 12, 20), contents, strict=True):
        rows.append(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at + len(body), len(data), 0, 0, 8, 0))
        body += data + b"\0" * (-len(data) % 8)
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", at + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(rows), 3)
    return head + body + b"".join(rows)


def images(data: bytes) -> list[list[tuple[int, int, bytes]]]:
    found = fat_binaries(data, *sections(data)[".nv_fatbin"])
    return [[(i.kind, i.arch, i.data) for i in each] for *_, each in found]


ALL = [
    fat(image(CUBIN, 80), image(CUBIN, 90, 128), image(CUBIN, 90), image(PTX, 90)),
    fat(image(PTX, 80, 256), image(CUBIN, 80, 512)),
    fat(image(CUBIN, 120, 72)),
]


def test_code_of_one_architecture_is_left_and_nothing_moves():
    before = library(*ALL)
    found = pruned(before, 90)
    assert len(found.data) == len(before) and sections(found.data) == sections(before)
    assert (found.fat_binaries, found.without, found.kept) == (3, 2, 128 + 64 + 2 * 64)
    own, other, last = images(found.data)
    assert own == [row for row in images(before)[0] if row[:2] == (CUBIN, 90)]
    # A fat binary without code for the architecture keeps one small image of another, whole.
    assert other == [(CUBIN, 80, image(CUBIN, 80))] and last == [(CUBIN, 80, image(CUBIN, 80))]
    starts = [at for at, *_ in fat_binaries(before, *sections(before)[".nv_fatbin"])]
    assert [found.data[at : at + 8] for at in starts] == [before[at : at + 8] for at in starts]
    assert b"symbols!" in before and b"symbols!" not in found.data
    (offset, size) = sections(before)[".nv_fatbin"]
    assert found.data[:offset] == before[:offset]
    symbols = sections(before)[".symtab"][0]
    assert found.data[symbols + 8 :] == before[symbols + 8 :]
    assert pruned(found.data, 90).data == found.data


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (b"not a library", "ELF"),
        (library(fat(image(CUBIN, 90))[:-8]), "longer than its section"),
        (library(MAGIC + struct.pack("<HHQ", 1, 16, 136) + image(CUBIN, 90, 128)[:136]), "inside its fat binary"),
    ],
)
def test_a_library_of_another_form_is_refused(broken, says):
    with pytest.raises(ValueError, match=says):
        pruned(broken, 90)


@pytest.fixture
def wheels(tmp_path) -> dict[str, Path]:
    """Wheels of vLLM and of one other package."""
    files = {path: library(*ALL) for path in pack_vllm.LIBRARIES.values()}
    files |= {"vllm/__init__.py": b"x = 1\n", "vllm/vllm-rs": b"program", "vllm/a/b.hpp": b"header"}
    files |= {"vllm-0.dist-info/METADATA": b"Name: vllm", "vllm-0.dist-info/RECORD": b"sums"}
    out = {}
    for name, rows in {"vllm": files, "other": {"other/one.py": b"2", "other/data.bin": b"3"}}.items():
        out[name] = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(out[name], "w") as wheel:
            for path, data in rows.items():
                wheel.writestr(path, data)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_wheels_give_the_same_bytes_and_come_back(wheels, tmp_path, capsys):
    folders = [pack_vllm.pack(tmp_path / name, wheels, [], [], 1 << 20)[0] for name in ("a", "b")]
    assert contents(folders[0]) == contents(folders[1]) and len(contents(folders[0])) == 6
    assert "3 fat binaries, of which 2 have no code for sm_90" in capsys.readouterr().out
    site = tmp_path / "site"
    assert pack_vllm.unpack(folders[0], site) == []
    there = {str(p.relative_to(site)) for p in site.rglob("*") if p.is_file()}
    assert there == {
        *pack_vllm.LIBRARIES.values(),
        "vllm/__init__.py",
        "vllm-0.dist-info/METADATA",
        "other/one.py",
        "other/data.bin",
    }
    assert (site / "vllm/cumem_allocator.abi3.so").read_bytes() == pruned(library(*ALL), 90).data


def test_libraries_can_be_taken_unchanged_and_alone(wheels, tmp_path):
    (folder,) = pack_vllm.pack(tmp_path / "a", wheels, ["cumem_allocator"], ["cumem_allocator"], 1 << 20)
    assert sorted(contents(folder)) == ["cumem_allocator.xz", "manifest.json"]
    assert pack_vllm.unpack(folder, tmp_path / "site") == []
    assert (tmp_path / "site/vllm/cumem_allocator.abi3.so").read_bytes() == library(*ALL)


def test_what_does_not_fit_goes_into_further_folders_for_one_target(wheels, tmp_path, capsys):
    (whole,) = pack_vllm.pack(tmp_path / "a", wheels, [], [], 1 << 20)
    largest = max(p.stat().st_size for p in whole.glob("*.xz"))
    for limit in (largest, largest // 2):
        folders = pack_vllm.pack(tmp_path / f"to {limit}", wheels, [], [], limit)
        assert folders[1].name == f"to {limit}-2"
        assert all(sum(len(data) for name, data in contents(f).items() if ".xz" in name) <= limit for f in folders)
        for folder in folders:
            assert pack_vllm.unpack(folder, tmp_path / str(limit)) == []
        assert ("waits for its other pieces" in capsys.readouterr().out) == (limit < largest)
        pack_vllm.unpack(whole, tmp_path / "whole")
        for path in (tmp_path / "whole").rglob("*.*"):
            again = tmp_path / str(limit) / path.relative_to(tmp_path / "whole")
            assert path.is_dir() or again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "\x80", '{"parts": {}}', '{"parts": {"a.xz": {"sha256": "0"}}}', '{"parts": {"a": 1}}'],
)
def test_a_corrupt_manifest_is_named(text, tmp_path):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    (said,) = pack_vllm.unpack(tmp_path, tmp_path / "site")
    assert said == f"{tmp_path}/manifest.json is corrupt; carry it again"


def test_a_corrupt_or_missing_part_is_named(wheels, tmp_path):
    (folder,) = pack_vllm.pack(tmp_path / "a", wheels, [], [], 1 << 20)
    data = bytearray((folder / "_vllm_fa3_C.xz").read_bytes())
    data[20] ^= 1
    (folder / "_vllm_fa3_C.xz").write_bytes(data)
    (folder / "cumem_allocator.xz").unlink()
    first, second = sorted(pack_vllm.unpack(folder, tmp_path / "site"))
    assert "_vllm_fa3_C.xz is corrupt: sha256" in first and "cumem_allocator.xz is missing" in second
    # A manifest of other contents: the part is what was packed, but not what the manifest calls for.
    manifest = json.loads((folder / "manifest.json").read_text())
    part = manifest["parts"]["_C_stable_libtorch.xz"]
    (folder / "_C_stable_libtorch.xz").write_bytes(data := lzma.compress(b"other"))
    part["sha256"] = pack_vllm.sha256(data)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert any("differs from the manifest" in line for line in pack_vllm.unpack(folder, tmp_path / "site"))
    (folder / "manifest.json").unlink()
    assert "pack it with" in pack_vllm.unpack(folder, tmp_path / "site")[0]


def test_check_covers_what_the_engine_imports():
    names = pack_vllm.engine_modules()
    assert {"vllm.config", "vllm.model_executor.model_loader.reload", "vllm.vllm_flash_attn._vllm_fa3_C"} <= {*names}
    assert not [name for name in names if "cpu" in name]
