"""Checkpoint folders as files: publishing, verification, making room, and the messages of the command line."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from spmdrl.checkpoint import files, published, store
from spmdrl.checkpoint.__main__ import main
from spmdrl.checkpoint.files import rank_files
from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import Keep, best_step, measured_value, record_measured, steps_saved
from spmdrl.config.rules import never_measured
from spmdrl.config.schema import CheckpointConfig
from spmdrl.policy.models import Models
from tests.saving import ALONE, newest_valid
from tests.saving import save as save_models


class FilePolicy:
    """Stands for a policy only in that it writes a model folder; the real one is in tests/ranks/test_resume.py."""

    def __init__(self, weights: bytes = b"x" * 100):
        self.weights = weights

    def saving(self, copy=False):
        def write(folder, world):
            (folder / "model").mkdir(parents=True, exist_ok=True)
            (folder / "model" / "config.json").write_text("{}")
            (folder / "model" / "model.safetensors").write_bytes(self.weights)

        return write


@pytest.fixture
def save(tmp_path):
    def run(step, keep=2, metrics=None, mine=None, **rules):
        content = store.content_of(step, Models(FilePolicy()), {"step": step}, mine)
        content.facts = {"metrics": metrics or {}}
        return store.write(tmp_path, content, ALONE, Keep(keep, **rules))

    return run


def test_resume_prune_never_counts_damaged_newer_ones(save, tmp_path):
    for step in range(1, 7):
        save(step, 3)
    assert steps_saved(tmp_path) == [6, 5, 4]
    for step in (5, 6):
        (tmp_path / f"step_{step}" / "model" / "model.safetensors").write_text("x")
    assert newest_valid(tmp_path).name == "step_4"
    save(5, 1)
    assert (tmp_path / "latest").resolve().name == "step_5"
    assert problems(tmp_path / "step_5") == []


@pytest.mark.parametrize(
    "manifest",
    ["[]", "{", '{"files": {}}', '{"files": []}', "null", '{"files": {"a": 1}}', "\x00\xff", "[" * 100_000, ""],
)
def test_resume_malformed_manifest_is_damage_and_falls_back(save, tmp_path, manifest):
    save(1, 2)
    save(2, 2)
    (tmp_path / "step_2" / "MANIFEST.json").write_text(manifest, encoding="latin-1")
    assert problems(tmp_path / "step_2")
    assert newest_valid(tmp_path).name == "step_1"


def test_resume_every_changed_file_is_found(save, tmp_path):
    folder = save(1, 2)
    for name in json.loads((folder / "MANIFEST.json").read_text())["files"]:
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert problems(folder), name
        path.unlink()
        assert problems(folder), name
        path.write_bytes(whole)
    assert problems(folder) == []


def test_resume_every_bit_of_the_manifest_counts(save):
    """Its own hash counts, too; no byte of the manifest can change unnoticed."""
    path = save(1, 2) / "MANIFEST.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        assert problems(path.parent), (place, whole[max(0, place - 20) : place + 20])


def sign(folder: Path, change) -> None:
    """Changes a manifest and makes its own hash right again, as a mistaken program would."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    change(manifest)
    manifest["xxh3_128"] = "0" * 32
    own = xxhash.xxh3_128_hexdigest(json.dumps(manifest, indent=1).encode())
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | {"xxh3_128": own}, indent=1))


def rename(manifest: dict, name: str) -> None:
    manifest["files"][name] = manifest["files"].pop("model/model.safetensors")


WRONG = {
    "absolute name": (lambda m: rename(m, "/etc/hostname"), "is outside of the checkpoint"),
    "name that leaves": (lambda m: rename(m, "model/../../step_1/model/config.json"), "is outside of the checkpoint"),
    "name with a zero": (lambda m: rename(m, "model/a\0b"), "is outside of the checkpoint"),
    "other step": (lambda m: m.update(step=2), "is for step 2"),
    "other world": (lambda m: m.update(world_size=3), "holds files of 1 ranks instead of 3"),
    "no world": (lambda m: m.pop("world_size"), "has no step and number of ranks"),
    "no size": (lambda m: m["files"]["model/config.json"].pop("bytes"), "has no size and hash"),
    "not listed": (lambda m: m["files"].pop("model/model.safetensors"), "model.safetensors: is not in the manifest"),
    "listed only": (lambda m: m["files"].update({"model/b": {"bytes": 1, "xxh3_128": ""}}), "model/b: missing"),
    "other size": (lambda m: m["files"]["model/config.json"].update(bytes=3), "2 bytes instead of 3"),
    "other hash": (lambda m: m["files"]["model/config.json"].update(xxh3_128="0"), "its hash is not the manifest's"),
}


@pytest.mark.parametrize("how", WRONG)
def test_resume_a_manifest_that_is_whole_and_wrong_is_refused(save, how):
    change, message = WRONG[how]
    folder = save(1, mine={"a": 1})
    assert problems(folder) == [] and len(rank_files(folder)) == 1
    sign(folder, lambda manifest: None)
    assert problems(folder) == [], "the test's own hash is right"
    sign(folder, change)
    assert any(message in line for line in problems(folder)), problems(folder)


def test_resume_files_and_links_that_the_manifest_does_not_list_are_refused(save, tmp_path):
    folder = save(1)
    extra = folder / "model" / "pytorch_model.bin"
    extra.write_bytes(b"a pickle, perhaps")
    assert problems(folder) == ["model/pytorch_model.bin: is not in the manifest"]
    extra.unlink()
    weights = folder / "model" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert problems(folder) == ["model/model.safetensors: is not a plain file"]
    weights.unlink()
    (tmp_path / "elsewhere").rename(weights)
    (folder / "more").symlink_to(tmp_path)
    assert problems(folder) == ["more: is not in the manifest"]


def test_resume_none_usable_is_refused(save, tmp_path):
    folder = save(1, 2)
    (folder / "state" / "run.json").unlink()
    with pytest.raises(ValueError, match="move the folder away"):
        newest_valid(tmp_path)


def test_resume_the_manifest_says_what_it_is_of(save, tmp_path):
    manifest = json.loads((save(7, metrics={"reward/mean": 0.5}) / "MANIFEST.json").read_text())
    total = sum(p.stat().st_size for p in (tmp_path / "step_7").rglob("*") if p.is_file() and p.name != "MANIFEST.json")
    assert manifest["step"] == 7 and manifest["world_size"] == 1 and manifest["bytes"] == total
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest["time"])
    # `torch.__version__` may name the build too (+cu130), which the version of the package leaves out.
    assert manifest["versions"]["torch"] == version("torch") and "python" in manifest["versions"]
    assert manifest["metrics"] == {"reward/mean": 0.5}
    for name, entry in manifest["files"].items():
        raw = (tmp_path / "step_7" / name).read_bytes()
        assert entry == {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}


# ── which ones stay ──────────────────────────────────────────────────────────


def test_keep_the_newest_every_nth_and_the_best(save, tmp_path):
    accuracy = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.2, 6: 0.3, 7: 0.4, 8: 0.1}
    for step, value in accuracy.items():
        save(step, 2, every=3, best="eval/accuracy")
        record_measured(tmp_path, step, {"eval/accuracy": value})
    # The two newest, multiples of 3, and of the two best the one that came first.
    assert steps_saved(tmp_path) == [8, 7, 6, 3, 2]
    assert best_step(tmp_path, [8, 7, 6, 3, 2], "eval/accuracy") == 2
    assert best_step(tmp_path, [8, 7, 6, 3, 2], "-eval/accuracy") == 8
    assert best_step(tmp_path, [8, 7], "loss") is None


def test_keep_only_what_was_measured_of_the_weights_themselves_counts(save, tmp_path):
    """The evaluation of a checkpoint's weights comes after it was saved, at the beginning of the next step."""
    rules = dict(keep=1, best="acc")
    for step, value in ((1, 0.2), (2, 0.6), (3, None), (4, 0.3), (5, 0.6)):
        save(step, **rules)
        if value is not None:
            record_measured(tmp_path, step, {"acc": value})
    assert steps_saved(tmp_path) == [5, 2], "3 was never measured; 5 is no better than 2"
    assert best_step(tmp_path, [5, 2], "acc") == 2
    record_measured(tmp_path, 5, {"acc": 0.7})
    assert best_step(tmp_path, [5, 2], "acc") == 5
    record_measured(tmp_path, 2, {"acc": 0.1})  # the run fell back to 2: what stands there of later steps is void
    assert measured_value(tmp_path, 2, "acc") == 0.1 and measured_value(tmp_path, 5, "acc") is None
    (tmp_path / "measured.json").write_text("{")
    assert measured_value(tmp_path, 2, "acc") is None, "a damaged file of measurements is none"


@pytest.mark.parametrize(
    ("every", "evaluated", "steps", "refused"),
    [
        (10, 20, 50, False),
        (30, 20, 50, True),
        (30, 20, 61, False),
        (0, 20, 50, False),
        (50, 7, 50, False),
        (9, 7, 0, False),
    ],
)
def test_keep_refuses_a_best_checkpoint_that_no_evaluation_measures(every, evaluated, steps, refused):
    problems = never_measured(CheckpointConfig(every=every, best="eval/accuracy"), evaluated, steps)
    assert bool(problems) == refused and all(f"--checkpoint.every {every} and --eval.every 20" in x for x in problems)
    assert not never_measured(CheckpointConfig(every=every, best="-loss"), evaluated, steps), "each step measures it"


def test_keep_a_checkpoint_that_reads_back_wrong_takes_nothing_away(save, tmp_path, monkeypatch):
    save(1, 1)
    flush = files.flush

    def bad_disk(path):
        if path.name == "model.safetensors":
            path.write_bytes(b"y" + path.read_bytes()[1:])
        flush(path)

    monkeypatch.setattr(files, "flush", bad_disk)
    with pytest.raises(ValueError, match="step_2 reads back damaged .*its hash is not the manifest's"):
        save(2, 1)
    assert steps_saved(tmp_path) == [1] and problems(tmp_path / "step_1") == []
    assert not list(tmp_path.glob(".incomplete*"))


def test_keep_a_kill_between_the_renames_loses_nothing(save, tmp_path):
    save(1)
    save(2)
    os.rename(tmp_path / "step_2", tmp_path / ".replaced-step_2")
    shutil.copytree(tmp_path / "step_1", tmp_path / ".incomplete-step_2")
    shutil.copytree(tmp_path / "step_1", tmp_path / ".replaced-step_1")
    published.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1", "step_2"]
    assert problems(tmp_path / "step_2") == []


# ── room ─────────────────────────────────────────────────────────────────────

Usage = namedtuple("Usage", "total used free")


def test_full_disk_is_told_before_anything_is_written(save, tmp_path, monkeypatch):
    save(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 2048, 2048))
    content = store.content_of(2, Models(FilePolicy()), {"step": 2}, None)
    content.expected_bytes = 5 << 20
    with pytest.raises(files.DiskFullError, match=r"takes 5.0 MiB and .* has 2.0 KiB free: .*--checkpoint.keep"):
        store.write(tmp_path, content, ALONE, Keep())
    assert steps_saved(tmp_path) == [1] and not list(tmp_path.glob(".incomplete*"))
    content.expected_bytes = 2000
    assert store.write(tmp_path, content, ALONE, Keep()).name == "step_2"


class FullPolicy(FilePolicy):
    """A policy that meets a full disk in the middle: a real ENOSPC, from the device made for that."""

    def saving(self, copy=False):
        before = super().saving()

        def write(folder, world):
            before(folder, world)
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"x")

        return write


def test_full_disk_in_the_middle_removes_what_is_half_written_and_nothing_else(save, tmp_path):
    save(1)
    with pytest.raises(
        files.DiskFullError, match="step_2 could not be written to .*No space left.*Earlier checkpoints"
    ):
        save_models(tmp_path, 2, Models(FullPolicy()), {}, None, ALONE)
    assert steps_saved(tmp_path) == [1] and problems(tmp_path / "step_1") == []
    assert not list(tmp_path.glob(".incomplete*"))


@pytest.mark.slow
def test_full_disk_as_safetensors_and_the_system_tell_it(tmp_path):
    """A limit on a file's size raises the same error as a full disk, here by the library itself."""
    script = """
import resource, signal, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from spmdrl.checkpoint import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with files.explain_full_disk(Path(sys.argv[1]), 3):
        save_file({"x": torch.zeros(100_000)}, sys.argv[1] + "/x.safetensors")
except files.DiskFullError as error:
    print("told", error)
"""
    run = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert done.stdout.startswith("told checkpoint step_3 could not be written"), done.stdout + done.stderr


def test_full_disk_is_not_what_another_error_is(tmp_path):
    with pytest.raises(PermissionError), files.explain_full_disk(tmp_path, 1):
        raise PermissionError(errno.EACCES, "Permission denied")


# ── the command line ─────────────────────────────────────────────────────────


@pytest.fixture
def run_folder(tmp_path):
    """Makes a run with two checkpoints that have weights."""
    for step in (1, 2):
        weights = {"a": torch.full((3, 2), 1.0 * step), "b": torch.zeros(5), "c": torch.tensor(2.0)}
        weights["a"][2, 1] += step - 1
        save_file(weights, tmp_path / "w.safetensors")
        policy = FilePolicy((tmp_path / "w.safetensors").read_bytes())
        save_models(tmp_path / "run" / "checkpoints", step, Models(policy), {"step": step, "seed": 3}, None, ALONE)
        (tmp_path / "run" / "config.yaml").write_text("optimizer: {lr: 0.1}\n")
    return tmp_path / "run"


def test_command_list_and_verify(run_folder, capsys):
    assert main(["list", str(run_folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "time", "size", "ranks", "layout", "metric", "files"]
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert lines[0].endswith("ok") and "latest" not in lines[0] and "latest" in lines[1]
    assert main(["verify", str(run_folder)]) == 0
    assert [line.rsplit(": ")[-1] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok"]
    (run_folder / "checkpoints" / "step_1" / "state" / "run.json").write_text("{}")
    (run_folder / "checkpoints" / "step_2" / "MANIFEST.json").unlink()
    assert main(["verify", str(run_folder)]) == 1
    one, two = capsys.readouterr().out.splitlines()
    assert "step_1: DAMAGED: state/run.json: 2 bytes instead of" in one
    assert "step_2: DAMAGED: MANIFEST.json: No such file" in two
    assert main(["list", str(run_folder)]) == 0
    one, two = capsys.readouterr().out.splitlines()[1:]
    assert one.endswith("DAMAGED: state/run.json: 2 bytes instead of 26") and "DAMAGED: MANIFEST.json" in two


def test_command_list_finds_the_metric_in_older_manifests(run_folder, capsys):
    root = run_folder / "checkpoints"
    sign(root / "step_1", lambda manifest: manifest.update(best="-loss", xxh3_128=manifest.pop("xxh3_128")))
    record_measured(root, 1, {"loss": 0.5})
    (root / "step_2" / "MANIFEST.json").unlink()
    assert main(["list", str(run_folder)]) == 0
    assert "loss 0.5" in capsys.readouterr().out.splitlines()[1]


def test_command_diff(run_folder, tmp_path, capsys):
    assert main(["diff", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "settings: equal" in out and "versions: equal" in out and "  step: 1 -> 2" in out and "seed" not in out
    # a: 1 -> 2 everywhere and 1 -> 3 in one place.
    assert "model: 1 of 3 tensors differ, by at most 2\n  2  a\n" in out
    other = tmp_path / "other"
    shutil.copytree(run_folder, other, symlinks=True)
    (other / "config.yaml").write_text("optimizer: {lr: 0.2, eps: 1}\n")
    assert main(["diff", str(run_folder), str(other / "checkpoints" / "step_2")]) == 0
    out = capsys.readouterr().out
    assert "  --optimizer.lr: 0.1 -> 0.2" in out and "  --optimizer.eps: missing -> 1" in out
    assert "model: 3 tensors, all equal" in out


def test_command_on_what_is_no_run_is_one_line(tmp_path, capsys):
    for words in (["list", tmp_path], ["verify", tmp_path / "no"], ["diff", tmp_path, tmp_path], ["diff", tmp_path]):
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 1 and str(tmp_path) in said.err


def test_command_needs_no_torch_to_verify(run_folder):
    script = (
        "import sys; from spmdrl.checkpoint.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    run = [sys.executable, "-c", script, "list", str(run_folder)]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode == 0 and "latest" in done.stdout, done.stderr
