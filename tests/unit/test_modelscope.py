"""ModelScope as a hub: `ms:owner/name` against a stand-in of its package, and its signatures."""

import inspect
import json
import shutil
import sys

import pytest

from spmdrl.config.schema import Config
from spmdrl.data.rowfiles import open_rows
from spmdrl.data.sources import read_source
from spmdrl.hub.folder import TINY
from spmdrl.hub.resolve import HUB_FILES, HUB_LEFT_OUT, resolve
from spmdrl.tools.doctor_settings import data, model

STAND_IN = '''
"""A stand-in of the package modelscope, for tests: it gives folders of this machine and remembers what it was asked."""
from pathlib import Path

ROOT, asked, OFF = Path(__file__).parent, [], False

def _folder(kind, name, **more):
    asked.append((kind, name, more))
    found = ROOT / kind / name.replace("/", "--")
    if OFF and not more.get("local_files_only") or not found.is_dir():
        raise OSError(f"no {kind} {name} (stand-in)")
    return str(found)

def snapshot_download(model_id=None, revision=None, **more):
    return _folder("models", model_id, **more)

def dataset_snapshot_download(dataset_id=None, revision=None, **more):
    return _folder("datasets", dataset_id, **more)
'''


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in with one model and one data set; the module itself."""
    import datasets

    package = tmp_path / "stand_in" / "modelscope"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    shutil.copytree(TINY, package / "models" / "Owner--Tiny")
    rows = package / "datasets" / "Owner--Rows"
    (rows / "extra").mkdir(parents=True)
    for name in ("train", "test"):
        lines = [{"question": f"{name} {i}", "answer": str(i)} for i in range(4)]
        (rows / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delitem(sys.modules, "modelscope", raising=False)
    monkeypatch.syspath_prepend(package.parent)
    import modelscope

    assert "stand-in" in modelscope.__doc__
    yield modelscope
    sys.modules.pop("modelscope", None)


def test_a_model_of_modelscope_is_downloaded_as_one_of_the_hub(hub):
    assert resolve("ms:Owner/Tiny") == hub.ROOT / "models" / "Owner--Tiny"
    wanted = {"allow_patterns": HUB_FILES, "ignore_patterns": HUB_LEFT_OUT}
    assert hub.asked == [("models", "Owner/Tiny", wanted)]
    assert not any(pattern.endswith(".py") for pattern in HUB_FILES)
    resolve("ms:Owner/Tiny", trust_remote_code=True)
    assert hub.asked[-1][2]["allow_patterns"] == [*HUB_FILES, "*.py"]


def test_without_its_network_the_cache_of_modelscope_is_taken_if_the_model_is_whole(hub):
    hub.OFF = True
    assert resolve("ms:Owner/Tiny") == hub.ROOT / "models" / "Owner--Tiny"
    assert [more.get("local_files_only") for *_, more in hub.asked] == [None, True]
    next((hub.ROOT / "models" / "Owner--Tiny").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="safetensors"):
        resolve("ms:Owner/Tiny")


def test_what_modelscope_lacks_is_told_with_the_flag(hub):
    with pytest.raises(ValueError, match="'ms:Owner/None': the download from ModelScope failed .OSError: no models"):
        resolve("ms:Owner/None")
    for wrong in ("ms:Tiny", "ms:/Tiny", "ms:a/b/c"):
        with pytest.raises(ValueError, match="is ms:<owner>/<model>"):
            resolve(wrong)
    with pytest.raises(ValueError, match=r"could not download the dataset 'ms:Owner/None' \(--data.train.*offline"):
        open_rows("ms:Owner/None")
    with pytest.raises(ValueError, match="the form is ms:<owner>/<name>"):
        open_rows("ms:a/b:c:d:e")
    with pytest.raises(ValueError, match="could not load the dataset 'ms:Owner/Rows::nosuch'.*split 'nosuch'"):
        open_rows("ms:Owner/Rows::nosuch")


def test_rows_of_modelscope_by_index_and_as_prompts(hub):
    rows = open_rows("ms:Owner/Rows")
    assert [rows[i]["question"] for i in range(len(rows))] == [f"train {i}" for i in range(4)]
    assert rows.where(2) == "ms:Owner/Rows, row 2"
    held = read_source("ms:Owner/Rows::test", "question", "answer", 3)
    assert held.rows == [{"question": f"test {i}", "answer": str(i)} for i in range(3)] and held.name == "Owner/Rows"
    assert hub.asked[0] == ("datasets", "Owner/Rows", {"ignore_patterns": ["*.py"]})


def test_without_the_package_one_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match=r"^--model.path 'ms:a/b' needs the package: pip install modelscope"):
        resolve("ms:a/b")
    with pytest.raises(ValueError, match="^'ms:a/b' needs the package: pip install modelscope"):
        open_rows("ms:a/b")


def test_doctor_asks_for_the_package_and_not_for_the_other_hub(hub, monkeypatch):
    def ask(kind, name):
        raise AssertionError("the Hugging Face hub is not asked for it")

    for found in (model("--model.path", "ms:a/b", Config(), ask), data("--data.train", "ms:a/b", Config(), ask)):
        assert found.level == "warn" and "downloads it from ModelScope" in found.state
    monkeypatch.setattr("spmdrl.tools.doctor_settings.find_spec", lambda name: None)
    assert model("--model.path", "ms:a/b", Config(), ask).level == "fail"
    assert not hub.asked


def test_parity_the_package_takes_what_it_is_given():
    """Names of arguments, and that a local copy is asked for without a network, by the package itself."""
    package = pytest.importorskip("modelscope", reason="the package modelscope is not installed")
    for function, first in ((package.snapshot_download, "model_id"), (package.dataset_snapshot_download, "dataset_id")):
        names = list(inspect.signature(function).parameters)
        assert names[0] == first and {"allow_patterns", "ignore_patterns"} <= set(names)
    assert "local_files_only" in inspect.signature(package.snapshot_download).parameters
    with pytest.raises(Exception, match="local|cache"):
        package.snapshot_download("nobody/nothing", local_files_only=True)
