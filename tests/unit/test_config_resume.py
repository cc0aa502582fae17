"""A run folder goes on with the settings it was begun with; those that may change declare so."""

import dataclasses
import hashlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from spmdrl.checkpoint.folder import check_settings, write_config
from spmdrl.config.dump import to_yaml
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import ConfigError
from spmdrl.config.learning import resampling
from spmdrl.config.load import from_command_line
from spmdrl.config.preference import PreferenceConfig
from spmdrl.config.resume import differences, file_digests, fixed_settings, may_change
from spmdrl.config.schema import Config
from spmdrl.config.sft import SFTConfig
from spmdrl.session.checkpoints import changes_since
from spmdrl.session.job import jobs

KINDS = {name: job.settings for name, job in jobs().items() if name != "spmdrl.evaluate"}
ALONE = SimpleNamespace(is_first=True, rank=0, size=1, host_group=None)
FLAGS = ["--optimizer.lr", "0.001", "--algo.preset", "dapo", "--lora.targets", "q_proj", "v_proj"]


def load(*flags: str) -> Config:
    return from_command_line([*FLAGS, *flags]).config


@pytest.fixture
def folder(tmp_path) -> Path:
    """Makes a run folder that was begun with FLAGS."""
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, load())
    return run


def lines(folder: Path, *flags: str) -> list[str]:
    return differences(folder / "config.yaml", load(*flags)).lines


def test_resume_the_same_settings_and_what_may_change_pass(folder):
    assert lines(folder) == []
    free = "--parallel.dp-replicate 2 --run.steps 500 --rollout.max-sequences 64 --eval.every 3 --run.name x"
    assert lines(folder, *free.split()) == []
    assert fixed_settings(load()) == fixed_settings(load(*free.split())) != fixed_settings(load("--run.seed", "1"))


@pytest.mark.slow
def test_resume_with_another_engine_is_a_change_also_where_auto_takes_it(folder, monkeypatch):
    """hf and vllm draw different tokens from the same seeds; the engine that ran is compared."""

    def installed(has_vllm: bool) -> None:
        found = lambda name: ModuleSpec(name, None) if has_vllm or name != "vllm" else None  # noqa: E731
        monkeypatch.setattr("spmdrl.config.engines.importlib.util.find_spec", found)
        monkeypatch.setattr("spmdrl.config.engines.vllm_wants_gpu", lambda: False)

    installed(True)
    write_config(folder, load())
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["engine"] == "vllm"
    assert lines(folder) == lines(folder, "--rollout.engine", "vllm") == []
    assert lines(folder, "--rollout.engine", "hf") == ["--rollout.engine: vllm there, hf here"]
    installed(False)
    assert lines(folder) == ["--rollout.engine: vllm there, hf here (by auto)"]
    assert "vllm there" in " ".join(differences(folder / "config.yaml", load("--model.dtype", "float64")).lines)
    # An older folder says auto.
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("engine: vllm", "engine: auto"))
    assert lines(folder) == lines(folder, "--rollout.engine", "hf") == []
    assert lines(folder, "--rollout.engine", "vllm") == ["--rollout.engine: hf there, vllm here"]


@pytest.mark.parametrize("written, gather", [("true", "auto"), ("false", "once")])
def test_resume_and_files_read_whether_layers_stay_gathered(folder, tmp_path, written, gather):
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("  gather: auto", f"  reshard_after_forward: {written}"))
    assert "reshard" in (folder / "config.yaml").read_text() and lines(folder) == []
    assert load("--config", str(folder / "config.yaml")).policy.gather == gather
    (tmp_path / "old.yaml").write_text(f"policy: {{liger: {written}}}\n")
    assert load("--config", str(tmp_path / "old.yaml"), "--run.device", "cpu").policy.liger == {"true": "on"}.get(
        written, "off"
    )
    (tmp_path / "old.yaml").write_text("policy: {reshard_after_forward: perhaps}\n")
    with pytest.raises(ConfigError, match="mean policy.gather"):
        load("--config", str(tmp_path / "old.yaml"))


def test_resume_and_files_read_the_power_of_resampling_that_stood_apart(folder, tmp_path):
    write_config(folder, load("--filter.resample", "pow=3"))
    text = (folder / "config.yaml").read_text()
    assert "resample: pow=3" in text
    (folder / "config.yaml").write_text(text.replace("resample: pow=3", "resample: pow\n  resample_power: 3.0"))
    assert lines(folder, "--filter.resample", "pow=3.0") == [] and lines(folder, "--filter.resample", "pow") != []
    (tmp_path / "old.yaml").write_text("filter:\n  resample: pow\n  resample_power: 3.0\n")
    assert load("--config", str(tmp_path / "old.yaml")).filter.resample == "pow=3.0"
    (tmp_path / "old.yaml").write_text("filter: {resample: max_min, resample_power: 2.0}\n")
    assert load("--config", str(tmp_path / "old.yaml")).filter.resample == "max_min"
    (tmp_path / "power.yaml").write_text("filter: {resample_power: 3}\n")
    (tmp_path / "pow.yaml").write_text("filter: {resample: pow}\n")
    (tmp_path / "old.yaml").write_text("filter: {resample: max_min, resample_power: 3}\n")
    power, method, old = (["--config", str(tmp_path / f"{name}.yaml")] for name in ("power", "pow", "old"))
    for words in ((*power, *method), (*method, *power), (*power, "--filter.resample", "pow"), (*method, *old, *method)):
        assert load(*words).filter.resample == "pow=3"
    assert load(*old, "--filter.resample", "pow=4").filter.resample == "pow=4"
    assert load(*power).filter.resample == load().filter.resample
    assert resampling("pow=3.0") == ("pow", 3.0) and resampling("pow") == ("pow", 2.0)
    for wrong in ("pow=-1", "pow=x", "max_min=2", "other"):
        with pytest.raises(ValueError, match="--filter.resample"):
            resampling(wrong)


def test_resume_files_of_the_users_own_are_known_by_their_content(tmp_path):
    for name in ("reward.py", "loss.py", "advantage.py", "keep.py"):
        (tmp_path / name).write_text(f"def f(*x): return '{name}'\ncompute_score = f\n")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    flags = {
        "reward.function": "reward.py",
        "algo.loss": "loss.py:f",
        "algo.advantage": "advantage.py:f",
        "filter.keep": "keep.py:f",
        "data.chat_template": "chat.jinja",
    }
    cfg = load(*[x for name, value in flags.items() for x in (f"--{name}", f"{tmp_path}/{value}")])
    found = file_digests(cfg)
    want = {name: [f"{tmp_path}/{value.removesuffix(':f')}"] for name, value in flags.items()}
    assert {name: [path] for name, (path, _) in found.items()} == want and file_digests(load()) == {}
    for name, (path, digest) in found.items():
        assert digest == hashlib.sha256(Path(path).read_bytes()).hexdigest()
        with open(path, "a") as file:
            file.write("\n")
        assert [n for n, said in file_digests(cfg).items() if said != found[n]] == [name]
        found = file_digests(cfg)


def test_resume_on_another_device_draws_otherwise_with_vllm_alone():
    now = {"prompts": "a", "files": {}, "device": "cuda"}
    for engine, count in {"vllm": 1, "hf": 0, "sglang": 0}.items():
        cfg = dataclasses.replace(Config(), rollout=dataclasses.replace(Config().rollout, engine=engine))
        said = changes_since(cfg, Path("step_2"), now | {"device": "cpu"}, now)
        assert said == ["step_2 was made on cpu; on cuda vllm samples other tokens from the same seeds"] * count
        assert changes_since(cfg, Path("step_2"), now, now) == changes_since(cfg, Path("step_2"), {}, now) == []


def test_resume_every_other_change_is_listed(folder):
    changes = "--optimizer.lr 2e-4 --run.seed 1 --algo.clip-low 0.1 --lora.targets q_proj --data.system be_brief"
    assert lines(folder, *changes.split()) == [
        "--run.seed: 0 there, 1 here",
        "--optimizer.lr: 0.001 there, 0.0002 here",
        "--lora.targets: q_proj v_proj there, q_proj here",
        "--data.system: '' there, be_brief here",
        "--algo.clip-low: 0.2 there, 0.1 here",
    ]


def test_resume_the_length_of_a_run_counts_where_the_learning_rate_depends_on_it(folder, tmp_path):
    assert may_change(load(), "run.steps") and not may_change(load("--optimizer.schedule", "cosine"), "run.steps")
    write_config(tmp_path, load("--optimizer.schedule", "linear"))
    assert lines(tmp_path, "--optimizer.schedule", "linear", "--run.steps", "99") == ["--run.steps: 60 there, 99 here"]


def test_resume_settings_older_than_the_program_count_as_their_defaults(folder):
    path = folder / "config.yaml"
    there = yaml.safe_load(path.read_text())
    del there["optimizer"]["lr"], there["critic"], there["algo"]["clip_high"]
    there["rollout"]["gone"] = 3
    path.write_text(yaml.dump(there))
    found = differences(path, load())
    # dapo's own clip_high is a default here; lr was not given at all.
    assert found.lines == ["--optimizer.lr: 0.0002 there, 0.001 here"]
    assert found.notes == [f"{path} has settings that this version does not know: rollout.gone"]
    assert differences(path, load("--critic.lr", "1")).lines[-1] == "--critic.lr: 0.0005 there, 1.0 here"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "flags", "older", "more"),
    [
        (
            Config,
            "--data.train my.jsonl --model.path a/b",
            "--optimizer.lr 2e-4 --rollout.max-new-tokens 8 --data.eval builtin:reverse:eval --eval.every 20",
            "--rollout.max-new-tokens 9",
        ),
        (SFTConfig, "--data.train my.jsonl --model.path a/b --lora.rank 8", "--optimizer.lr 2e-5", "--optimizer.lr 1"),
        (
            PreferenceConfig,
            "--data.train my.jsonl --preference.method simpo",
            "--preference.beta 0.1 --preference.margin 0.5",
            "--preference.beta 3",
        ),
    ],
)
def test_resume_keeps_defaults_that_nobody_named(schema, flags, older, more, tmp_path):
    """A folder that was begun with other defaults goes on by the same command; a flag is still a change."""
    here = [*flags.split(), "--run.dir", str(tmp_path)]
    write_config(tmp_path, from_command_line([*here, *older.split()], schema=schema).config)
    path = tmp_path / "config.yaml"
    loaded = from_command_line(here, schema=schema)
    assert differences(path, loaded.config).lines == [] and not loaded.given & {"optimizer.lr", "preference.beta"}
    assert loaded.config == from_command_line([*here, *older.split()], schema=schema).config
    assert len(differences(path, from_command_line([*here, *more.split()], schema=schema).config).lines) == 1
    fresh = from_command_line([*here, "--run.fresh"], schema=schema).config
    assert differences(path, fresh).lines != []


@pytest.mark.parametrize("folder", ["a" * 300, "a\0b", ""])
def test_resume_from_a_folder_that_cannot_be_looked_at_is_no_matter_of_settings(folder):
    own = ["--data.train", "my.jsonl", "--model.path", "a/b", "--run.name", "no_such_run", "--run.dir", folder]
    assert from_command_line(own).config.optimizer.lr == 1e-6


def test_resume_of_a_folder_without_a_template_whose_messages_were_chatml(tmp_path):
    write_config(tmp_path, SFTConfig())
    cfg = SFTConfig()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, chat_template="chatml"))
    assert differences(tmp_path / "config.yaml", cfg).lines == []
    assert differences(tmp_path / "config.yaml", cfg, {"data.chat_template"}).lines == [
        "--data.chat-template: '' there, chatml here"
    ]
    assert check_settings(tmp_path, cfg, ALONE) == []


@pytest.mark.slow
@pytest.mark.parametrize("there", KINDS.values())
@pytest.mark.parametrize("here", KINDS.values())
def test_resume_a_run_of_another_entry_point_is_refused_by_its_name(tmp_path, there, here):
    write_config(tmp_path, there())
    cfg = here()
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, allow_changes=True))
    if there is here:
        assert check_settings(tmp_path, cfg, ALONE, kinds=KINDS) == []
        return
    name = next(name for name, schema in KINDS.items() if schema is there)
    with pytest.raises(ValueError, match=f"holds a run of {name}, which"):
        check_settings(tmp_path, cfg, ALONE, kinds=KINDS)
    with open(tmp_path / "config.yaml", "a") as file:
        file.write("section_of_another_version: {x: 1}\n")
    with pytest.raises(ValueError, match=f"holds a run of {name}, which"):
        check_settings(tmp_path, cfg, ALONE, kinds=KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00", "3", "", "{1: 2}", "optimizer: 5", "? [a]\n: b", "&a [*a]"])
def test_resume_a_file_that_is_no_config_is_told_and_counts_as_defaults(folder, text):
    path = folder / "config.yaml"
    path.write_text(text)
    found = differences(path, load())
    assert "--optimizer.lr: 0.0002 there, 0.001 here" in found.lines
    assert len(found.notes) == 1


def test_resume_is_refused_with_the_difference_and_allowed_when_asked(folder):
    with pytest.raises(ValueError) as error:
        check_settings(folder, load("--run.seed", "1"), ALONE)
    said = str(error.value)
    assert "--run.seed: 0 there, 1 here. Take the same settings, another --run.dir, --run.fresh" in said
    assert "--run.allow-changes" in said and len(said.splitlines()) == 1
    notes = check_settings(folder, load("--run.seed", "1", "--run.allow-changes"), ALONE)
    assert notes == ["--run.allow-changes: --run.seed: 0 there, 1 here"]
    assert check_settings(folder, load(), ALONE) == []
    assert check_settings(folder / "none", load("--run.seed", "1"), ALONE) == []


def test_resume_without_the_runs_own_config_that_of_the_newest_checkpoint_counts(folder):
    state = folder / "checkpoints" / "latest" / "state"
    state.mkdir(parents=True)
    (folder / "config.yaml").rename(state / "config.yaml")
    with pytest.raises(ValueError, match="--run.seed: 0 there, 1 here"):
        check_settings(folder, load("--run.seed", "1"), ALONE)


def test_resume_the_written_config_asks_for_no_new_start(tmp_path):
    cfg = load("--run.fresh", "--run.allow-changes")
    write_config(tmp_path, cfg)
    begun = load("--rollout.engine", engine_name(cfg))
    assert from_command_line(["--config", str(tmp_path / "config.yaml")]).config == begun
    assert (tmp_path / "config.yaml").read_text() == to_yaml(begun) and not list(tmp_path.glob(".*"))
