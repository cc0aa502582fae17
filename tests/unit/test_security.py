"""Law 8: nothing from outside is trusted. Every bomb here writes a file when it goes off; none may."""

import dataclasses
import gzip
import json
import logging
import os
import pickle
import shutil
import sys
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from spmdrl.checkpoint import treefile
from spmdrl.checkpoint.folder import take_folder, write_config
from spmdrl.checkpoint.manifest import problems, write_manifest
from spmdrl.config import checks
from spmdrl.config.dump import REDACTED, redact_text, to_dict, to_yaml
from spmdrl.config.fields import ConfigError
from spmdrl.config.load import load_or_exit
from spmdrl.config.paths import FOLDERS, WRITTEN, check_run_folder, inside
from spmdrl.config.schema import Config, DataConfig
from spmdrl.data.prompts import load_prompts
from spmdrl.data.sources import read_source
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.safe_pickle import vet
from spmdrl.tracking.console import Console
from spmdrl.tracking.logs import setup_logging
from spmdrl.tracking.trackers import keep_wandb_id
from tests.ranks.harness import RankError, run_ranks


class Bomb:
    """An object that writes a file when it is unpickled."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return Path.write_text, (self.place, "went off")


def copy_tiny(folder: Path) -> Path:
    shutil.copytree(TINY, folder)
    return folder


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ── models ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["config", "model"])
def test_code_that_comes_with_a_model_is_refused_and_does_not_run(tmp_path, what):
    folder, place = copy_tiny(tmp_path / "m"), tmp_path / "bomb"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(place)!r}).write_text('went off')\n")
    if what == "config":
        edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    else:
        edit(folder / "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ValueError) as error:
        load_tokenizer(resolve(str(folder)))
        build_model(folder, "float32")
    if what != "model":
        assert "--model.trust-remote-code" in str(error.value) and "own Python code" in str(error.value)
    assert str(folder) in str(error.value)
    assert not place.exists()
    # The same folder is read with the flag: the code would run, so the test can detect a run.
    if what == "config":
        with pytest.raises(ValueError):
            resolve(str(folder), trust_remote_code=True)
        assert place.exists()


def test_code_beside_a_known_model_does_not_run(tmp_path):
    """transformers has the class itself; `auto_map` offers another one."""
    folder, place = copy_tiny(tmp_path / "m"), tmp_path / "bomb"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(place)!r}).write_text('went off')\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.T", None]})
    assert resolve(str(folder)) == folder
    build_model(folder, "float32")
    load_tokenizer(folder)
    assert not place.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickled_weights_are_refused_and_not_opened(tmp_path, name):
    folder, place = copy_tiny(tmp_path / "m"), tmp_path / "bomb"
    (folder / "model.safetensors").unlink()
    torch.save({"w": Bomb(place)}, folder / name)
    with pytest.raises(ValueError, match="pickled weights .* convert them to safetensors"):
        resolve(str(folder))
    with pytest.raises(ValueError):
        build_model(folder, "float32")
    assert not place.exists()
    torch.load(folder / name, weights_only=False)
    assert place.exists(), "the bomb is one"


def test_weights_do_not_lie_outside_their_folder(tmp_path):
    folder = copy_tiny(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="lacks 1 of 1 shards"):
        resolve(str(folder))


# ── checkpoints ──────────────────────────────────────────────────────────────


def saved_state(folder: Path) -> Path:
    """Writes optimizer state as a run does, in one process without a group."""
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_state_of_a_run_passes(tmp_path):
    vet(saved_state(tmp_path / "state"))


@pytest.mark.parametrize("where", ["index", "index beside", "value", "common"])
def test_bomb_in_optimizer_state_does_not_go_off(tmp_path, where):
    folder, place = saved_state(tmp_path / "state"), tmp_path / "bomb"
    index = folder / ".metadata"
    if where == "index":
        index.write_bytes(pickle.dumps(Bomb(place)))
    elif where == "index beside":
        metadata = pickle.loads(index.read_bytes())
        metadata.planner_data = Bomb(place)
        index.write_bytes(pickle.dumps(metadata))
    elif where == "value":
        metadata = pickle.loads(index.read_bytes())
        kinds = metadata.state_dict_metadata
        key = next(k for k in metadata.storage_data if type(kinds[k.fqn]).__name__ == "BytesStorageMetadata")
        with open(folder / "bomb.distcp", "wb") as file:
            torch.save(Bomb(place), file)
        info = dataclasses.replace(
            metadata.storage_data[key],
            relative_path="bomb.distcp",
            offset=0,
            length=(folder / "bomb.distcp").stat().st_size,
        )
        metadata.storage_data[key] = info
        index.write_bytes(pickle.dumps(metadata))
    else:
        torch.save({"content": Bomb(place)}, folder / "common.pt")
    with pytest.raises(ValueError, match="is not optimizer state that is safe to read .*--model.path"):
        vet(folder)
    assert not place.exists()
    if where == "value":
        # torch itself does this with the file.
        import torch.distributed.checkpoint as dcp

        dcp.load({key.fqn: None}, checkpoint_id=str(folder), no_dist=True)
        assert place.exists(), "the bomb is one"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda info: dataclasses.replace(info, relative_path="../outside"), "is outside of the folder"),
        (lambda info: dataclasses.replace(info, length=1 << 40), "bytes"),
        (lambda info: dataclasses.replace(info, transform_descriptors=["zstd"]), "extensions"),
    ],
)
def test_index_that_points_elsewhere_is_refused(tmp_path, change, message):
    folder = saved_state(tmp_path / "state")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    kinds = metadata.state_dict_metadata
    key = next(k for k in metadata.storage_data if type(kinds[k.fqn]).__name__ == "BytesStorageMetadata")
    metadata.storage_data[key] = change(metadata.storage_data[key])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        vet(folder)


def resumed(world, folder: str) -> int:
    from tests.ranks.demo import open_demo

    run = open_demo(world, folder, {"run": {"steps": 2}, "eval": {"every": 0}, "checkpoint": {"every": 1}})
    run.close()
    return run.checkpoints.start_step


def trained(world, folder: str) -> None:
    from tests.ranks.demo import train_demo

    train_demo(world, folder, {"run": {"steps": 1}, "eval": {"every": 0}, "checkpoint": {"every": 1}})


@pytest.fixture(scope="module")
def run_of_one_step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / "run"
    run_ranks(trained, 1, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["none", "of the true file", "of the bomb"])
def test_checkpoint_of_a_stranger_does_not_run_its_index(run_of_one_step, tmp_path, manifest):
    """The manifest does not help: one that was made to fit the bomb is as good as any."""
    folder, place = tmp_path / "run", tmp_path / "bomb"
    shutil.copytree(run_of_one_step, folder, symlinks=True)
    step = folder / "checkpoints" / "step_1"
    (step / "state" / "optimizer" / ".metadata").write_bytes(pickle.dumps(Bomb(place)))
    if manifest == "none":
        (step / "MANIFEST.json").unlink()
    elif manifest == "of the bomb":
        write_manifest(step, 1, 1)
        assert problems(step) == []
    with pytest.raises(RankError, match="MANIFEST|hash|bytes|safe to read"):
        run_ranks(resumed, 1, str(folder))
    assert not place.exists()


@pytest.mark.slow
def test_own_checkpoint_is_resumed(run_of_one_step, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_of_one_step, folder, symlinks=True)
    assert run_ranks(resumed, 1, str(folder)) == [1]


def test_tree_files_are_no_pickles(tmp_path):
    file, place = tmp_path / "rank_00000.safetensors", tmp_path / "bomb"
    file.write_bytes(pickle.dumps(Bomb(place)))
    with pytest.raises(ValueError, match="not a readable tree file"):
        treefile.read(file)
    assert not place.exists()


# ── data ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["script", "pickle"])
def test_dataset_folders_with_code_are_refused_and_do_not_run(tmp_path, kind):
    folder, place = tmp_path / "bombs", tmp_path / "bomb"
    folder.mkdir()
    if kind == "script":
        text = f"import datasets, pathlib\npathlib.Path({str(place)!r}).write_text('went off')\n"
        (folder / "bombs.py").write_text(text)
    else:
        (folder / "train.pkl").write_bytes(pickle.dumps(Bomb(place)))
    with pytest.raises(ValueError, match=r"could not load the dataset 'hf:.*--data.train"):
        read_source(f"hf:{folder}", "prompt", "answer")
    assert not place.exists()


@pytest.mark.parametrize("name", ["data.pkl", "data.pt", "data.npy", "data.pickle", "data.py", "data.arrow"])
def test_only_kinds_of_files_that_hold_rows_are_read(tmp_path, name):
    file, place = tmp_path / name, tmp_path / "bomb"
    file.write_bytes(pickle.dumps(Bomb(place)))
    with pytest.raises(ValueError, match="not a kind of file that is read here"):
        read_source(str(file), "prompt", "answer")
    assert not place.exists()


def test_templates_reach_no_attributes(tmp_path):
    """Texts such as `{prompt.__class__}` in a file of settings are text, and no way into the program."""
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "abc", "answer": "cba"}) + "\n")
    tokenizer = load_tokenizer(TINY)
    for template in ("{prompt.__class__}", "{prompt.__class__.__mro__[1].__subclasses__}", "{answer.__init__}"):
        with pytest.raises(ValueError, match="--data.template"):
            load_prompts(str(file), DataConfig(template=template), tokenizer, 64)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    chat = DataConfig(chat="on", chat_template=template)
    with pytest.raises(ValueError, match="chat"):
        load_prompts(str(file), chat, tokenizer, 64)


def test_data_that_unpacks_to_more_than_memory_is_no_way_in(tmp_path):
    """A limit on rows limits the work: rows behind it in the file are not unpacked."""
    file = tmp_path / "data.jsonl.gz"
    row = json.dumps({"prompt": "abc", "answer": "cba"}) + "\n"
    with gzip.open(file, "wt", compresslevel=1) as out:
        out.write(row * 3)
        out.write(" " * (1 << 20))
    assert len(read_source(str(file), "prompt", "answer", limit=2).rows) == 2


# ── secrets ──────────────────────────────────────────────────────────────────

URL = "https://me:hunter2secret@host.example/data.jsonl"
SECRETS = {
    "password in a URL": (URL, "hunter2secret"),
    "token in a URL": ("https://tok_abcdef123456@host.example/x", "tok_abcdef123456"),
    "query": ("https://host.example/x.jsonl?access_token=abc123def&v=2", "abc123def"),
    "signed": ("https://host.example/x?X-Amz-Signature=deadbeef99&v=2", "deadbeef99"),
    "hub token": ("org/hf_abcdefghijklmnopqrstuv", "hf_abcdefghijklmnopqrstuv"),
    "nvidia": ("nvapi-abcdefghijklmnop-12_34", "nvapi-abcdefghijklmnop-12_34"),
    "slack": ("xoxb-1234567890-abcdef", "xoxb-1234567890-abcdef"),
    "google": ("AIzaSyA-abcdefghijklmnopqrstuvwxyz01234-", "AIzaSyA-abcdefghijklmnopqrstuvwxyz01234-"),
    "gitlab": ("x/glpat-abcdefghijklmnop1234", "glpat-abcdefghijklmnop1234"),
    "session key": ("ASIAABCDEFGHIJKLMNOP", "ASIAABCDEFGHIJKLMNOP"),
    "variable of a secret key": ("a-9876sEcReT5432-b", "9876sEcReT5432"),
    "variable of another key": ("a-5555sEcReT6666-b", "5555sEcReT6666"),
    "key": ("sk-abcdefghijklmnop1234", "sk-abcdefghijklmnop1234"),
    "variable": ("name-with-0123sEcReT4567-in-it", "0123sEcReT4567"),
}


@pytest.mark.parametrize("value, secret", SECRETS.values(), ids=SECRETS.keys())
def test_secrets_reach_neither_dump_nor_banner_nor_log(tmp_path, capsys, monkeypatch, value, secret):
    monkeypatch.setenv("WANDB_API_KEY", "0123sEcReT4567")
    monkeypatch.setenv("MINIO_SECRET_KEY", "9876sEcReT5432")
    monkeypatch.setenv("SSH_KEY", "5555sEcReT6666")
    config = Config()
    config.data.train = config.model.path = config.run.name = value
    written = [to_yaml(config), json.dumps(to_dict(config)), redact_text(f"no data file {value!r} (--data.train)")]
    console = Console("plain")
    console.note(f"1 prompts from {value}")
    ours = setup_logging(tmp_path, 0)
    ours.warning("reading %s", value)
    try:
        raise OSError(f"cannot reach {value}")
    except OSError:
        logging.getLogger("spmdrl").exception("failed")
    with pytest.raises(SystemExit):
        load_or_exit(["--run.stepz", "3", "--data.train", value, "--run.steps", value])
    seen = capsys.readouterr()
    written += [seen.out, seen.err, (tmp_path / "logs" / "rank_0.log").read_text()]
    for text in written:
        assert text and secret not in text, text
        assert REDACTED in text, text


def test_text_without_secrets_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("MONKEY", "kl_horizon")
    monkeypatch.setenv("KEYBOARD", "kl_horizon")
    for text in (
        "https://host.example/data.jsonl?limit=3&split=train",
        "--rollout.max-new-tokens 8: 512 tokens, key=3",
        "runs/demo/spikes/step_000012/rank_00000.safetensors",
        "0123456789abcdef0123456789abcdef01234567 is a commit",
        "--algo.kl_estimator k1",
        "xoxo-and-so-on-and-so-on, AIza, nvapi-x",
    ):
        assert redact_text(text) == text


def test_last_line_of_a_failed_run_has_no_secret():
    from spmdrl.health.failure import failure_line

    assert "hunter2secret" not in failure_line(ValueError(f"no data file {URL!r} (--data.train)"))


# ── names ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/etc", "a\\b", "x\0y", "..\\..", "a/../.."])
def test_names_of_runs_and_projects_are_one_folder_name(name):
    config = Config()
    config.run.name = name
    with pytest.raises(ConfigError, match="--run.name"):
        checks.check(config, 1)
    config = Config()
    config.tracking.project = name
    with pytest.raises(ConfigError, match="--tracking.project"):
        checks.check(config, 1)


PLACES = [*(name.replace("*", "x") for name in WRITTEN), *(f"{name}/x" for name in FOLDERS), "spikes/step_1/x"]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("relative", [False, True])
def test_links_out_of_the_run_folder_are_refused(tmp_path, name, relative):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(Path("..", *([".."] * name.count("/")), "outside") if relative else outside)
    with pytest.raises(ValueError, match=f"{name} leads out of the run folder.*remove that link"):
        check_run_folder(folder)


def names_written(world, folder: str) -> list[str]:
    """Returns the names that a run opens, makes, replaces or removes at the top of its folder, as the interpreter sees
    them, when it is taken up, fails and is asked to go.
    """
    from spmdrl.checkpoint import lock
    from spmdrl.health import failure
    from spmdrl.health import flight_record as flight
    from spmdrl.health.status import rank_status
    from spmdrl.tracking.logs import setup_logging
    from tests.ranks.demo import demo, train_demo

    seen: set[str] = set()

    def note(*paths) -> None:
        for path in paths:
            with suppress(TypeError, ValueError):
                seen.update(Path(os.path.abspath(os.fsdecode(path))).relative_to(folder).parts[:1])

    def hook(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            note(args[0])
        if event in ("os.mkdir", "os.remove", "os.truncate", "os.rename", "os.symlink", "os.link"):
            note(*args[:2])

    Path(folder).mkdir()
    sys.addaudithook(hook)
    take_folder(Path(folder), False, world)
    rank_status.folder = Path(folder)
    setup_logging(folder, world.rank)
    sections = {"run": {"steps": 1}, "eval": {"every": 0}, "checkpoint": {"every": 1}}
    sections |= {"tracking": {"trackers": ("jsonl", "tensorboard"), "samples": 1}}
    train_demo(world, folder, sections)
    write_config(Path(folder), demo(folder, **sections))
    # Again from the start, with numbers of the run before.
    shutil.rmtree(Path(folder, "checkpoints"))
    train_demo(world, folder, sections)
    train_demo(world, folder, sections | {"run": {"steps": 2}})
    keep_wandb_id(folder, "an id")
    flight.write("failed")
    failure.write_preempted(None, 1)
    lock.held.pop().release()
    return sorted(seen)


@pytest.mark.slow
def test_all_that_a_run_writes_is_looked_at_before(tmp_path):
    [seen] = run_ranks(names_written, 1, str(tmp_path / "run"))
    missing = [name for name in seen if not any(fnmatchcase(name, pattern) for pattern in WRITTEN)]
    assert missing == [], "spmdrl/config/paths.py does not know of these"
    known = {"config.yaml", ".config.yaml.part", "metrics.jsonl.old", "metrics.jsonl.part", ".lock", "PREEMPTED"}
    assert known | {"checkpoints", "logs", "tensorboard", "wandb", "flight"} <= set(seen), "all of it is seen"


def test_links_inside_and_the_folder_itself_may_be_links(tmp_path):
    real, folder, outside = tmp_path / "disk", tmp_path / "run", tmp_path / "outside"
    (real / "checkpoints" / "step_3").mkdir(parents=True)
    outside.mkdir()
    folder.symlink_to(real)
    (real / "checkpoints" / "latest").symlink_to("step_3")
    check_run_folder(folder)
    check_run_folder(tmp_path / "not yet there")
    # `latest` is replaced and never followed.
    (real / "checkpoints" / "latest").unlink()
    (real / "checkpoints" / "latest").symlink_to(outside)
    check_run_folder(folder)
    (real / "checkpoints" / "step_4").symlink_to(outside)
    with pytest.raises(ValueError, match="step_4 leads out"):
        check_run_folder(folder)
    with pytest.raises(ValueError, match="leads out"):
        inside(folder, "spikes", "..", "..", "x")


@pytest.mark.slow
def test_latest_that_leads_elsewhere_is_replaced_and_not_followed(run_of_one_step, tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(run_of_one_step, folder, symlinks=True)
    outside.mkdir()
    (outside / "precious").write_text("stays")
    latest = folder / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to(outside)
    run_ranks(continued, 1, str(folder))
    assert (outside / "precious").read_text() == "stays" and len(list(outside.iterdir())) == 1
    assert latest.resolve() == (folder / "checkpoints" / "step_2").resolve()


def continued(world, folder: str) -> None:
    from tests.ranks.demo import train_demo

    train_demo(world, folder, {"run": {"steps": 2}, "eval": {"every": 0}, "checkpoint": {"every": 1}})


def test_modules_of_a_model_package_are_not_imported(tmp_path, monkeypatch):
    """`package:<name>` looks for a file in it."""
    package = tmp_path / "bomb_package"
    package.mkdir()
    (package / "__init__.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'bomb')!r}).write_text('x')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="one .gguf file"):
        resolve("package:bomb_package")
    assert not (tmp_path / "bomb").exists() and "bomb_package" not in sys.modules
