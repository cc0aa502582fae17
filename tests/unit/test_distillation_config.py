"""Settings of distillation: what is refused and why, what a run folder keeps, and which tokenizers are the same."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from spmdrl.config.distillation import DistillationConfig, check_distillation, distillation_lines
from spmdrl.config.dump import to_yaml
from spmdrl.config.fields import ConfigError, leaves
from spmdrl.config.load import from_command_line
from spmdrl.config.presets import PRESETS
from spmdrl.config.resume import differences, may_change
from spmdrl.config.sft import SFTConfig, check_sft
from spmdrl.config.use import check_use
from spmdrl.distill import JOB
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import check_same_tokens
from spmdrl.rl.compose import compose
from spmdrl.session.launch import launch

ROOT = Path(__file__).parents[2]


def read(words: str) -> DistillationConfig:
    return from_command_line(words.split(), "python -m spmdrl.distill", DistillationConfig).config


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        ("", "--reference.path '': distill learns from a teacher; name its model"),
        ("--distill.beta 1.5", "--distill.beta 1.5: must be from 0 to 1"),
        ("--distill.top-k -1", "--distill.top-k -1: must be at least 0"),
        ("--distill.tail renormalize", "with --distill.top-k 0 no token is left out; take bucket"),
        (
            "--distill.tail renormalize --distill.top-k 1",
            "with --distill.top-k 1 both models then give their only token probability 1; take bucket",
        ),
        ("--policy.backend megatron", "its ranks divide the vocabulary"),
        (
            "--parallel.placement split --parallel.rollout-ranks 1 --parallel.scoring-ranks 1",
            "sends only its most likely tokens; set --distill.top-k, or take 0",
        ),
        ("--distill.more-teachers here", "--distill.more-teachers here: write path=weight"),
        ("--distill.more-teachers here=0", "--distill.more-teachers here=0: write path=weight"),
        (
            "--distill.more-teachers a=1 --reference.refresh-every 2",
            "a teacher that follows the student must be the only one",
        ),
        ("--reference.mix 0 --reference.refresh-every 2", "--reference.mix 0.0: must be above 0 and at most 1"),
        ("--distill.align uld --distill.beta 0.5", "--distill.beta 0.5: is only read with --distill.align gold"),
        ("--distill.align uld --distill.top-k 4", "sorts the probabilities of all tokens; take --distill.top-k 0"),
        (
            "--distill.align gold --distill.more-teachers a=1",
            "supports only one teacher; leave --distill.more-teachers out",
        ),
        ("--distill.align uld --reference.refresh-every 2", "has the same tokens; take --reference.refresh-every 0"),
        (
            "--parallel.placement split --parallel.rollout-ranks 1 --parallel.scoring-ranks 1 --distill.align uld",
            "the teacher must be on the student's ranks; take --parallel.scoring-ranks 0",
        ),
        ("--distill.align uld --policy.backend megatron", "its ranks divide the vocabulary"),
        ("--distill.given-per-step -1", "--distill.given-per-step -1: must be at least 0"),
        (
            "--distill.on-engine",
            "--distill.on-engine: an engine returns only the most likely tokens; set --distill.top-k",
        ),
        (
            "--distill.on-engine --distill.top-k 4 --reference.refresh-every 2",
            "the weights of a teacher in the engine never change",
        ),
        (
            "--distill.on-engine --distill.top-k 4 --distill.teacher-template {prompt}",
            "built for the student's prompts",
        ),
        ("--distill.on-engine --distill.top-k 4 --lora.rank 2 --lora.push adapter", "take --lora.push merged"),
        ("--distill.on-engine --distill.top-k 4 --rollout.quantization int8", "would round teachers, too; take none"),
        ("--distill.on-engine --distill.top-k 4 --rollout.engine sglang", "take --rollout.engine vllm or hf"),
        (
            "--distill.on-engine --distill.top-k 4 --rollout.engine vllm --rollout.temperature 0.8",
            "take --rollout.temperature 1 instead of 0.8, or --rollout.engine hf",
        ),
        (
            "--distill.on-engine --distill.top-k 4 --parallel.placement split --parallel.rollout-ranks 1",
            "the engine samples ahead; take colocated",
        ),
        ("--run.steps -1", "--run.steps -1"),
    ],
)
def test_distillation_is_refused_where_settings_do_not_fit(words, said):
    teacher = "" if "''" in said else "--reference.path tiny "
    with pytest.raises(ConfigError) as error:
        check_distillation(read(teacher + words), 4)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--teacher.path tiny --teacher.beta 2", "--teacher.beta 2.0: must be from 0 to 1"),
        ("--teacher.path tiny --teacher.temperature 0", "--teacher.temperature"),
        (
            "--teacher.path tiny --sft.loss dft",
            "--sft.loss dft: the loss is the divergence from the teacher (--teacher",
        ),
        ("--teacher.path tiny --sft.add-tokens <a>", "the tokenizer of the teacher (--teacher.*) lacks them"),
        ("--teacher.path tiny --policy.backend megatron", "its ranks divide the vocabulary"),
        (
            "--teacher.path tiny --teacher.write x",
            "--teacher.write: files contain only a teacher's most likely tokens; set",
        ),
        ("--teacher.read x", "--teacher.read: files contain only a teacher's most likely tokens; set --teacher.top-k"),
        ("--teacher.path tiny --teacher.write x --teacher.read x --teacher.top-k 4", "a job writes or learns"),
        (
            "--teacher.read x --teacher.top-k 4 --data.train stream:a/b",
            "a stream's rows are not known before training (stream:a/b)",
        ),
        ("--teacher.read x --teacher.top-k 4 --sft.loss dft", "--sft.loss dft: the loss is the divergence"),
    ],
)
def test_a_teacher_of_given_rows_is_refused_where_settings_do_not_fit(words, said):
    config = from_command_line(words.split(), "python -m spmdrl.sft", SFTConfig).config
    with pytest.raises(ConfigError) as error:
        check_sft(config, 2)
    assert said in str(error.value)


def test_sections_that_distillation_does_not_read_are_no_settings_of_it():
    for word in ("--algo.kl-coef", "--critic.lr", "--filter.replay-steps", "--reference.enabled"):
        with pytest.raises(ConfigError, match="unknown"):
            read(f"{word} 1")
    assert not [name for name in leaves(DistillationConfig) if name.startswith(("algo.", "shaping.", "safety."))]


def test_the_run_is_that_of_the_preset_with_its_teacher():
    config = read("--reference.path teacher --distill.beta 0.5 --distill.top-k 8")
    for name, value in PRESETS["distill"].settings.items():
        section, _, leaf = name.partition(".")
        assert getattr(getattr(config, section), leaf) == value, name
    assert compose(config).needs == {"reference"} and config.run.name == "distill"
    line = distillation_lines(config, 1)[-1]
    assert (
        line
        == "teacher  teacher: Jensen-Shannon divergence, beta 0.5 over the teacher's 8 likeliest tokens, temperature 1"
    )


@pytest.mark.parametrize(
    "words, said",
    [
        ("--distill.align uld", "teacher: distance of sorted probabilities, over spans of text, temperature 1"),
        (
            "--distill.align gold --distill.beta 0",
            "teacher: forward KL of tokens that both have, distance of sorted probabilities, over spans of text, "
            "temperature 1",
        ),
    ],
)
def test_the_plan_says_how_texts_are_compared(words, said):
    config = read(f"--reference.path teacher {words}")
    check_distillation(config, 1)
    assert distillation_lines(config, 1)[-1] == f"teacher  {said}"


def test_the_plan_says_how_a_teacher_moves():
    lines = distillation_lines(read("--reference.path t --reference.refresh-every 5 --reference.mix 0.25"), 1)
    assert lines[-1] == "teacher  takes 0.25 of the student and keeps 0.75 of itself every 5 steps"
    lines = distillation_lines(read("--reference.path t --reference.refresh-every 5"), 1)
    assert lines[-1] == "teacher  takes the student's weights every 5 steps"


@pytest.mark.parametrize(
    "words, unread, why",
    [
        ("--lora.alpha 32", "--lora.alpha 32", "it needs --lora.rank above 0"),
        ("--reference.mix 0.1", "--reference.mix 0.1", "it needs --reference.refresh-every above 0"),
        ("--distill.merge last", "--distill.merge last", "it needs --distill.align uld | gold"),
        ("--distill.given-column told", "--distill.given-column told", "it needs --distill.given-per-step above 0"),
        ("--eval.every 0 --eval.samples 4", "--eval.samples 4", "it needs --eval.every above 0"),
        ("--optimizer.min-lr-ratio 0.5", "--optimizer.min-lr-ratio 0.5", "it needs --optimizer.schedule"),
        ("--reward.model-coef 2", "--reward.model-coef 2.0", "rewards are only logged, and nothing in this run"),
        (
            "--eval.every 0 --reward.model tiny --reward.model-coef 2",
            "--reward.model-coef 2.0",
            "it needs --eval.every above 0",
        ),
        ("--eval.every 0 --reward.model tiny", "--reward.model tiny", "rewards are only logged"),
    ],
)
def test_settings_without_effect_are_refused(words, unread, why):
    loaded = from_command_line(f"--reference.path tiny {words}".split(), "x", DistillationConfig)
    check_distillation(loaded.config, 1)
    with pytest.raises(ConfigError) as error:
        check_use(loaded)
    assert f"{unread}: " in str(error.value) and why in str(error.value), error.value


@pytest.mark.parametrize(
    "words",
    [
        "--lora.rank 4 --lora.alpha 32 --optimizer.lr 1e-3 --optimizer.clip-grad-norm 0.5",
        "--reference.refresh-every 7 --reference.mix 0.1 --reference.offload host",
        "--eval.every 2 --eval.samples 4 --reward.model tiny --reward.model-coef 2",
        "--distill.align gold --distill.merge last --distill.beta 0.5 --optimizer.schedule cosine",
    ],
)
def test_settings_that_a_distillation_reads_pass(words):
    loaded = from_command_line(f"--reference.path tiny {words}".split(), "x", DistillationConfig)
    check_distillation(loaded.config, 1)
    assert check_use(loaded) == []


def test_the_entry_point_refuses_a_setting_without_effect(capsys):
    with pytest.raises(SystemExit) as left:
        launch(JOB, ["--reference.path", "tiny", "--lora.alpha", "32", "--dry-run"])
    assert left.value.code == 2 and "--lora.alpha 32: nothing in this run reads it" in capsys.readouterr().err


def test_what_a_flag_turns_off_may_stand_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("reference:\n  path: tiny\neval:\n  every: 5\n  samples: 4\n")
    loaded = from_command_line(["--config", str(file), "--eval.every", "0"], "x", DistillationConfig)
    assert check_use(loaded) == ["--eval.samples 4 has no effect together with these flags"]


@pytest.mark.parametrize("name", ["config", "demo"])
def test_the_recipe_is_taken_and_says_what_it_is(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = ROOT / "recipes" / "opd"
    loaded = from_command_line(["--config", f"recipes/opd/{name}.yaml"], "x", DistillationConfig)
    assert check_use(loaded) == []
    config, page = loaded.config, (folder / "README.md").read_text()
    check_distillation(config, 8)
    assert f"recipes/opd/{name}.yaml" in page and "We have not run anything of this size" in page
    assert PRESETS["distill"].paper in page and PRESETS["distill"].paper in (folder / "config.yaml").read_text()


def test_resume_keeps_the_divergence(tmp_path):
    path, config = tmp_path / "config.yaml", read("--reference.path tiny --distill.beta 0.5")
    path.write_text(to_yaml(config))
    assert read(f"--config {path}") == config and differences(path, config).lines == []
    assert not may_change(DistillationConfig(), "distill.beta")
    assert differences(path, read("--reference.path tiny")).lines == ["--distill.beta: 0.5 there, 1.0 here"]


def grown(folder, change) -> str:
    """The demo's tokenizer with its vocabulary changed, and a config.json that names as many rows."""
    import json

    shutil.copytree(resolve("tiny"), folder)
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    change(told["model"]["vocab"])
    path.write_text(json.dumps(told))
    Tokenizer.from_file(str(path))
    config = json.loads((Path(folder) / "config.json").read_text())
    rows = max(config["vocab_size"], 1 + max(told["model"]["vocab"].values()))
    (Path(folder) / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return str(folder)


def test_a_teacher_of_more_tokens_reads_the_same_and_another_numbering_is_refused_with_the_reason(tmp_path):
    def more(vocab):
        vocab |= {f"<extra_{i}>": len(vocab) + i for i in range(128)}

    def swapped(vocab):
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    check_same_tokens(grown(tmp_path / "more", more), "tiny", "--reference.path")
    with pytest.raises(
        ValueError, match=r"--reference.path .*gives 2 of \d+ tokens of tiny another id \(such as 'a'\)"
    ):
        check_same_tokens(grown(tmp_path / "swapped", swapped), "tiny", "--reference.path")
