"""A setting that a run would not read is refused at the start, with a way to make something read it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.losses import LOSSES
from spmdrl.config.checks import check
from spmdrl.config.distillation import DistillationConfig
from spmdrl.config.dump import to_yaml
from spmdrl.config.fields import ConfigError, get, leaves
from spmdrl.config.load import from_command_line, load_or_exit
from spmdrl.config.online_preference import OnlinePreferenceConfig
from spmdrl.config.parameters import only_of, read_by
from spmdrl.config.preference import PreferenceConfig
from spmdrl.config.presets import PRESETS
from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.config.schema import Config
from spmdrl.config.sft import SFTConfig
from spmdrl.config.use import changed, check_use, is_read, single_changes, would_read
from spmdrl.evaluate import JOB
from spmdrl.rl.compose import compose
from spmdrl.session.job import jobs
from spmdrl.session.launch import launch
from tests.rehearsal import ELSEWHERE, is_covered, settings_read
from tests.unit.test_docs_algorithms import YAMLS, job_of
from tests.watch import watch

ROOT = Path(__file__).resolve().parents[2]
TRAINED = [path for path in YAMLS if job_of(path) == "train"]
"""Those of other entry points are loaded by test_docs_algorithms.py alone."""


def refusal(*words: str) -> str:
    """Returns the message with which flags are refused; empty where they are accepted."""
    loaded = from_command_line(words)
    check(loaded.config, 1)
    try:
        check_use(loaded)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("needs", ["('turns',)", "'turn'", "('values', 3)"])
def test_an_estimator_that_needs_what_samples_do_not_have_is_refused(needs, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"def estimate(x):\n    return x.rewards, x.rewards\n\n\nestimate.needs = {needs}\n")
    config = from_command_line(["--algo.advantage", f"{file}:estimate"]).config
    with pytest.raises(ValueError, match="its `needs` must be a tuple of names from values, baseline, parts, logp"):
        compose(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unread", "reader"),
    [
        ("--algo.loss gspo --algo.dual-clip 3", "--algo.dual-clip 3.0", "--algo.loss ppo"),
        ("--algo.gamma 0.9", "--algo.gamma 0.9", "--algo.advantage gae"),
        ("--algo.lam 0.9", "--algo.lam 0.9", "--algo.advantage gae"),
        ("--algo.beta 0.3", "--algo.beta 0.3", "--algo.loss dro"),
        ("--algo.part-weights a=1", "--algo.part-weights a=1", "--algo.advantage gdpo"),
        ("--reference.path other", "--reference.path other", "--algo.kl-coef above 0"),
        ("--reference.refresh-every 3", "--reference.refresh-every 3", "--reference.enabled on"),
        ("--correction.kind none --correction.high 3", "--correction.high 3.0", "--correction.kind tis_token"),
        ("--filter.metric x", "--filter.metric x", "--filter.keep mixed"),
        ("--filter.max-rounds 3", "--filter.max-rounds 3", "--filter.keep mixed"),
        ("--filter.keep mixed --filter.low 0.1", "--filter.low 0.1", "--filter.keep accuracy_range"),
        ("--critic.lr 1e-4", "--critic.lr 0.0001", "--algo.advantage gae"),
        ("--critic.clip 0.3", "--critic.clip 0.3", "--algo.advantage gae"),
        ("--critic.path other", "--critic.path other", "--algo.advantage gae"),
        ("--critic.warmup-steps 3", "--critic.warmup-steps 3", "--algo.advantage gae"),
        ("--process-reward.beta 0.1", "--process-reward.beta 0.1", "--algo.advantage prime"),
        ("--safety.limit 2", "--safety.limit 2.0", "--safety.cost"),
        ("--safety.multiplier 2", "--safety.multiplier 2.0", "--safety.cost"),
        ("--shaping.overlong-factor 2", "--shaping.overlong-factor 2.0", "--shaping.overlong-buffer above 0"),
        ("--shaping.length-coef 2", "--shaping.length-coef 2.0", "--shaping.length-penalty linear"),
        ("--algo.kl-estimator k1", "--algo.kl-estimator k1", "--algo.kl-coef above 0"),
        ("--algo.kl-coef 0.1 --algo.kl-horizon 50", "--algo.kl-horizon 50.0", "--algo.kl-target"),
        ("--algo.skip-zero-advantage --algo.entropy-coef 0.1", "--algo.skip-zero-advantage", "--algo.entropy-coef 0.0"),
        ("--algo.loss gspo --algo.skip-zero-advantage", "--algo.skip-zero-advantage", "--algo.loss ppo"),
        ("--reward.model-coef 2", "--reward.model-coef 2.0", "--reward.model"),
        ("--lora.alpha 4", "--lora.alpha 4", "--lora.rank above 0"),
        ("--eval.every 0 --eval.samples 4", "--eval.samples 4", "--eval.every above 0"),
        ("--optimizer.min-lr-ratio 0.1", "--optimizer.min-lr-ratio 0.1", "--optimizer.schedule linear"),
    ],
)
def test_setting_that_nothing_reads_is_refused_with_what_would_read_it(words, unread, reader):
    told = refusal(*words.split())
    assert told.splitlines()[0] == "1 setting without effect:"
    line = told.splitlines()[1].strip()
    assert line.startswith(unread) and reader in line, told
    # With the other setting beside it, it is accepted.
    assert "kl-coef above 0" not in reader or not refusal(*words.split(), "--algo.kl-coef", "0.1")


@pytest.mark.parametrize(
    ("schema", "words", "unread", "needs"),
    [
        (SFTConfig, "--teacher.beta 0.5", "--teacher.beta 0.5", "--teacher.path or --teacher.read"),
        (SFTConfig, "--teacher.write x", "--teacher.write x", "--teacher.path or --teacher.read"),
        (
            SFTConfig,
            "--optimizer.decay-share 0.5",
            "--optimizer.decay-share 0.5",
            "--optimizer.schedule linear | cosine",
        ),
        (SFTConfig, "--generate.engine hf", "--generate.engine hf", "--generate.every above 0"),
        (SFTConfig, "--eval.rows 5", "--eval.rows 5", "--data.eval"),
        (SFTConfig, "--lora.alpha 32", "--lora.alpha 32", "--lora.rank above 0"),
        (
            PreferenceConfig,
            "--preference.method simpo --preference.divergence js",
            "--preference.divergence js",
            "--preference.method dpo | ipo | rpo, ... or --preference.loss sigmoid | robust | hinge, ...",
        ),
        (PreferenceConfig, "--preference.tau 0.1", "--preference.tau 0.1", "--preference.loss discopop"),
        (PreferenceConfig, "--preference.alpha 0.1", "--preference.alpha 0.1", "--preference.divergence alpha"),
        (
            PreferenceConfig,
            "--preference.wanted-weight 2",
            "--preference.wanted-weight 2.0",
            "--preference.method kto | bco",
        ),
        (
            PreferenceConfig,
            "--preference.method cpo --reference.path m",
            "--reference.path m",
            "--preference.method dpo",
        ),
        (
            PreferenceConfig,
            "--preference.method simpo --reference.precompute",
            "--reference.precompute True",
            "--preference.method dpo",
        ),
        (PreferenceConfig, "--reference.mix 0.5", "--reference.mix 0.5", "--reference.refresh-every above 0"),
        (RewardModelConfig, "--reward-model.separator x", "--reward-model.separator x", "--reward-model.rows steps"),
        (RewardModelConfig, "--data.labels-column x", "--data.labels-column x", "--reward-model.rows steps"),
        (RewardModelConfig, "--data.output-column x", "--data.output-column x", "--reward-model.outputs"),
        (
            RewardModelConfig,
            "--reward-model.rows steps --reward-model.centre 1",
            "--reward-model.centre 1.0",
            "--reward-model.rows pairs",
        ),
        (OnlinePreferenceConfig, "--reference.mix 0.5", "--reference.mix 0.5", "--reference.refresh-every above 0"),
    ],
)
def test_other_jobs_refuse_what_nothing_in_them_reads(schema, words, unread, needs):
    with pytest.raises(ConfigError) as error:
        check_use(from_command_line(words.split(), schema=schema))
    assert str(error.value).startswith("1 setting without effect:") and f"{unread}: " in str(error.value)
    assert f"it needs {needs}" in str(error.value), error.value


@pytest.mark.parametrize("words", ["--shaping.mask-cut", "--filter.replay-steps 1", "--filter.resample max_min"])
def test_settings_of_advantages_are_refused_where_samples_have_none(words):
    with pytest.raises(ConfigError, match="nothing in this run reads it; leave it out"):
        check_use(from_command_line(words.split(), schema=OnlinePreferenceConfig))


def test_an_environment_without_a_word_about_the_reward_is_refused(tmp_path):
    assert "--reward.function environment" in refusal("--env", "builtin:guess")
    for words in (["--reward.function", "environment"], ["--reward.function", "exact_match"]):
        assert not refusal("--env", "builtin:guess", *words)
    # The config.yaml of a run says everything, so its reward was chosen.
    chosen = from_command_line(["--env", "builtin:guess", "--reward.function", "exact_match"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(chosen))
    assert not refusal("--config", str(tmp_path / "config.yaml"))


def test_an_evaluation_with_an_environment_is_told_of_its_reward_too(tmp_path, capsys):
    words = ["--env", "builtin:guess", "--data.eval", "builtin:episodes:eval", "--data.chat-template", "chatml"]
    with pytest.raises(SystemExit) as left:
        launch(JOB, [*words, "--dry-run"])
    assert left.value.code == 2 and "--reward.function environment" in capsys.readouterr().err
    launch(JOB, [*words, "--reward.function", "environment", "--dry-run"])
    (tmp_path / "config.yaml").write_text(
        to_yaml(from_command_line([*words, "--data.train", "builtin:episodes"]).config)
    )
    launch(JOB, ["--config", str(tmp_path / "config.yaml"), "--dry-run"])


def test_several_are_told_together():
    told = refusal("--algo.gamma", "0.9", "--critic.lr", "1", "--algo.clip-low", "0.1")
    assert told.startswith("2 settings without effect:") and "--algo.gamma" in told and "--critic.lr" in told


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_reads_its_own_settings(preset):
    config = from_command_line(["--algo.preset", preset]).config
    # A loss of whole sequences knows its aggregation without one.
    unread = {name for name in PRESETS[preset].settings if not is_read(config, name)}
    assert unread == ({"algo.aggregation"} if LOSSES[config.algo.loss].scope == "one per sequence" else set())


@pytest.mark.slow
@pytest.mark.parametrize("file", TRAINED, ids=lambda path: str(path.relative_to(ROOT)))
def test_configs_and_recipes_have_no_setting_without_effect(file):
    with contextlib.chdir(ROOT):
        check_use(from_command_line(["--config", str(file)]))


@pytest.mark.parametrize(
    "words",
    [
        "--algo.old-logp rollout --algo.updates-per-step 4",
        "--algo.old-logp policy --algo.updates-per-step 2",
        "--algo.preset pf_ppo --filter.replay-steps 2 --algo.updates-per-step 4",
        "--algo.preset vapo --algo.updates-per-step 2 --critic.lr 1e-4 --critic.clip 0.3",
        "--algo.preset prime --process-reward.beta 0.1 --filter.low 0.1",
    ],
)
def test_what_the_update_reads_is_of_use(words):
    assert not refusal(*words.split())


def test_value_at_rest_is_no_mistake():
    assert not refusal("--critic.lr", "0.0005", "--algo.gamma", "None", "--shaping.overlong-factor", "1")
    # VAPO warms its critic up; a chosen estimator without critic leaves that unread, which nobody asked for.
    assert not refusal("--algo.preset", "vapo", "--algo.advantage", "grpo")
    assert "--critic.warmup-steps 3" in refusal(
        "--algo.preset", "vapo", "--algo.advantage", "grpo", "--critic.warmup-steps", "3"
    )


def test_resolved_settings_of_a_run_are_exempt_and_flags_beside_them_are_not(tmp_path):
    words = ["--algo.preset", "vapo", "--algo.advantage", "grpo"]
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(from_command_line(words).config))
    assert not refusal("--config", str(resolved))
    assert "--critic.clip 0.5" in refusal("--config", str(resolved), "--critic.clip", "0.5")
    by_hand = tmp_path / "mine.yaml"
    by_hand.write_text("critic:\n  clip: 0.5\n")
    assert "--critic.clip 0.5" in refusal("--config", str(by_hand))


def test_what_a_flag_turns_off_may_stand_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("eval:\n  every: 5\n  samples: 4\nfilter:\n  keep: mixed\n  max_rounds: 3\n")
    words = ["--config", str(file), "--eval.every", "0"]
    assert check_use(from_command_line(words)) == ["--eval.samples 4 has no effect together with these flags"]
    load_or_exit(words, prog="train")
    assert capsys.readouterr().err == "train: --eval.samples 4 has no effect together with these flags\n"
    # The same as a flag, and what the file does not use either.
    assert "--eval.samples 8" in refusal(*words, "--eval.samples", "8")
    file.write_text("eval:\n  every: 0\n  samples: 4\n")
    assert "--eval.samples 4" in refusal("--config", str(file))


def test_functions_of_a_user_are_not_called(tmp_path):
    (tmp_path / "own.py").write_text(
        "def own(x, *, clip_low=0.2):\n    raise RuntimeError('called')\n"
        "def kept(score_B, group_B):\n    raise RuntimeError('called')\n"
    )
    words = ["--algo.loss", f"{tmp_path}/own.py:own", "--filter.keep", f"{tmp_path}/own.py:kept"]
    assert not refusal(*words, "--algo.clip-low", "0.3")
    told = refusal(*words, "--algo.clip-high", "0.3")
    assert f"--algo.clip-high 0.3: nothing in this run reads it; let {tmp_path}/own.py:own take a parameter" in told


@pytest.mark.slow
@pytest.mark.parametrize("job", jobs().values(), ids=jobs())
def test_every_job_can_tell_which_of_its_settings_it_reads(job):
    config = job.settings()
    assert any(is_read(config, name) for name in leaves(job.settings))
    for change in single_changes(config):
        for name in leaves(job.settings):
            would_read(changed(config, *change), name)


# ── the declarations against a step that really runs ─────────────────────────

UNUSED = {
    Config: {"algo.kl_in": lambda cfg: not cfg.has_reference},
    DistillationConfig: {},
    OnlinePreferenceConfig: {
        "reference.mix": lambda cfg: not cfg.reference.refresh_every,
        "reference.refresh_every": lambda cfg: not cfg.has_reference,
        "filter.resample": lambda cfg: True,
        "filter.replay_steps": lambda cfg: True,
    },
}
"""Settings that the rehearsal reads without any use of them, where this is true."""


def unlike(config) -> set[str]:
    """Returns the settings that a rehearsed step reads and that are declared unread, or the other way round."""
    seen, unused = settings_read(config), UNUSED[type(config)]
    seen -= {name for name, nothing_comes_of_it in unused.items() if nothing_comes_of_it(config)}
    return {name for name in leaves(type(config)) if is_covered(name) and would_read(config, name) != (name in seen)}


def runs(schema: type, words: str, further: int = 0) -> Iterator[Any]:
    """Yields settings of a run with every single change that can be composed. further: every which to change again."""
    config = from_command_line(words.split(), schema=schema).config
    changes = [change for change in single_changes(config) if is_covered(change[0]) or change[0] == "data.eval"]
    yield config
    for number, change in enumerate(changes):
        once = changed(config, *change)
        yield once
        for other in changes[number % further :: further] if further else ():
            yield changed(once, *other)


def compare(configs: Iterator[Any]) -> int:
    """Compares the declared readers with the rehearsed ones; returns how many settings could be composed."""
    count = 0
    for config in configs:
        with contextlib.suppress(ValueError, KeyError):
            assert unlike(config) == set(), config
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_reads_what_settings_declare(preset):
    assert not unlike(from_command_line(["--algo.preset", preset]).config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (Config, ""),
        (Config, "--algo.preset prime --algo.kl-coef 0.1 --lora.rank 2"),
        (Config, "--algo.preset safe_rlhf --reward.model tiny --correction.kind icepop"),
        (DistillationConfig, "--reference.path tiny"),
        (OnlinePreferenceConfig, "--filter.keep mixed"),
    ],
)
def test_a_step_with_one_other_setting_reads_what_settings_declare(schema, words):
    assert compare(runs(schema, words)) > 10


def test_every_setting_is_read_by_some_run():
    """A setting that no composition reads would be refused always."""
    assert set(leaves(Config)) >= ELSEWHERE.keys()
    unread = set(leaves(Config))
    for preset in ("grpo", "vapo", "prime", "safe_rlhf", "gigpo", "clip_cov", "kl_cov", "sapo", "dro", "sppo"):
        config = from_command_line(["--algo.preset", preset]).config
        unread -= {name for name in unread if is_read(config, name)}
    config = from_command_line(["--algo.kl-coef", "0.1"]).config
    for change in single_changes(config):
        unread -= {name for name in unread if would_read(changed(config, *change), name)}
    assert not unread


def test_watched_settings_are_equal_and_tell_what_was_read():
    config = Config()
    twin, seen = watch(config)
    assert not seen and twin.run.steps == config.run.steps and seen == {"run.steps"}
    assert all(get(twin, name) == get(config, name) for name in leaves(Config))
    assert seen == set(leaves(Config))


# ── presets and what is chosen over them ─────────────────────────────────────


def test_settings_that_go_with_a_function_are_its_parameters():
    assert read_by(LOSSES["kl_cov"]) == {"algo.cov_ratio", "algo.cov_kl_coef", "algo.aggregation"}
    assert read_by(LOSSES["gmpo"]) == {"algo.clip_low", "algo.clip_high"}, "its aggregation is its own"
    assert read_by(ADVANTAGES["prime"]) == {
        *("algo.gamma", "process_reward.process_coef", "process_reward.outcome_coef")
    }
    assert read_by(ADVANTAGES["gdpo"]) == {"algo.part_weights"}
    assert only_of("loss") & only_of("advantage") == set()
    assert "process_reward.process_coef" not in only_of("advantage"), "the process reward model's stays"


@pytest.mark.parametrize(
    ("words", "settings", "aggregation"),
    [
        ("--algo.preset dapo", {"clip_low": 0.2, "clip_high": 0.28}, "token-mean"),
        ("--algo.preset dapo --algo.loss ppo", {"clip_low": 0.2, "clip_high": 0.28}, "token-mean"),
        ("--algo.preset dapo --algo.loss gspo", {}, "seq-mean-token-mean"),
        ("--algo.preset dapo --algo.loss cispo", {}, "token-mean"),
        ("--algo.preset vapo --algo.loss dppo_kl", {}, "seq-mean-token-sum-norm"),
        ("--algo.preset dapo --algo.loss gspo --algo.clip-high 0.01", {"clip_high": 0.01}, "seq-mean-token-mean"),
        ("--algo.loss cispo", {}, "token-mean"),
        ("--algo.loss cispo --algo.aggregation token-mean", {}, "token-mean"),
    ],
)
def test_loss_over_a_preset_takes_its_own_papers_values(words, settings, aggregation):
    config = from_command_line(words.split()).config
    check(config, 1)
    algo = compose(config)
    assert algo.loss_settings == settings and algo.aggregation == aggregation


def test_advantage_over_a_preset_takes_its_own_papers_values():
    algo = compose(from_command_line(["--algo.preset", "ppo", "--algo.advantage", "gigpo"]).config)
    assert algo.advantage_settings == {}
    assert compose(from_command_line(["--algo.preset", "ppo"]).config).advantage_settings == {"gamma": 1.0, "lam": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("--algo.preset dapo", "--algo.loss cispo"),
        ("--algo.preset dapo --algo.clip-high 0.3", "--algo.loss gspo"),
        ("--algo.preset vapo", "--algo.advantage grpo"),
        ("", "--algo.preset dapo"),
        ("--algo.preset gspo --optimizer.lr 1e-5", "--algo.preset ppo"),
        ("--algo.preset dapo", "--algo.clip-low 0.1"),
    ],
)
def test_resolved_settings_follow_a_method_that_is_chosen_over_them(first, then, tmp_path):
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(from_command_line(first.split()).config))
    assert from_command_line(["--config", str(resolved)]).config == from_command_line(first.split()).config
    got = from_command_line(["--config", str(resolved), *then.split()]).config
    assert got == from_command_line([*first.split(), *then.split()]).config


def test_file_of_a_users_loss_that_fails_is_one_line(tmp_path):
    (tmp_path / "own.py").write_text("import nosuch\ndef own(x, *, clip_low=0.2):\n    return x, {}\n")
    told = refusal("--algo.loss", f"{tmp_path}/own.py:own", "--algo.clip-low", "0.3")
    assert told == (
        f"importing {tmp_path}/own.py raised ModuleNotFoundError: No module named 'nosuch' ({tmp_path}/own.py:1)"
    )


def test_own_loss_over_a_preset_keeps_its_aggregation(tmp_path):
    (tmp_path / "own.py").write_text("def own(x, *, clip_low=0.2):\n    return -x.logp, {}\n")
    algo = compose(from_command_line(["--algo.preset", "dapo", "--algo.loss", f"{tmp_path}/own.py:own"]).config)
    assert algo.aggregation == "token-mean" and algo.loss_settings == {}
