"""Settings of environments: what is refused at the start, and what a resume must keep."""

import pytest

from spmdrl.config.checks import check
from spmdrl.config.environment import acts_by, read_environment
from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line

OWN = ("--reward.function", "environment")


def refusal(*words: str) -> str:
    """Returns the message with which flags are refused; empty where they are accepted."""
    try:
        check(from_command_line(words).config, 1)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "words, says",
    [
        (
            OWN,
            "--reward.function environment: there is no environment whose rewards could be summed; name one by --env",
        ),
        (
            ("--reward.more", "environment=0.5"),
            "--reward.more environment: there is no environment whose rewards could be summed",
        ),
        (("--env", "builtin:guess", *OWN, "--data.chat", "off"), "an environment exchanges messages"),
        (("--env", "builtin:guess", *OWN, "--data.system", "be brief"), "--data.system"),
        (("--env", "nowhere.yaml", *OWN), "--env nowhere.yaml: cannot be read"),
        (("--env", "builtin:guess", *OWN), ""),
        (("--env", "builtin:guess", "--reward.more", "environment=0.5"), ""),
    ],
)
def test_bad_flags_beside_an_environment_say_what_to_change(words, says):
    said = refusal(*words)
    assert says in said and bool(said) == bool(says)


@pytest.mark.parametrize(
    "line, says",
    [
        ("max_turns: 0", "max_turns 0: must be at least 1"),
        ("timeout: -1", "timeout -1.0: must be above 0"),
        ("history: forget", "history 'forget': must be one of keep, branch"),
        ("settings: 3", "settings 3: must be names with values"),
        ("max_trns: 3", "max_trns"),
    ],
)
def test_bad_lines_of_a_file_name_the_file_and_the_line(tmp_path, line, says):
    file = tmp_path / "env.yaml"
    file.write_text(f"environment: builtin:guess\n{line}\n")
    with pytest.raises(ValueError, match="env.yaml") as refused:
        read_environment(str(file))
    assert says in str(refused.value)


@pytest.mark.parametrize("words", [("--policy.no-share-prompts",), ("--policy.backend", "megatron")])
def test_branches_that_repeat_their_beginning_have_to_fit(tmp_path, words):
    file = tmp_path / "env.yaml"
    file.write_text("environment: builtin:guess\nhistory: branch\nmax_turns: 6\n")
    given = ("--env", str(file), *OWN, "--rollout.max-prompt-tokens", "256", "--rollout.max-new-tokens", "768")
    budget = "--policy.max-tokens-per-microbatch"
    product = "(max_turns 6 x (max_prompt_tokens 256 + max_new_tokens 768))"
    assert f"must be at least 6144 {product}" in refusal(*given, *words, budget, "6143")
    assert not refusal(*given, *words, budget, "6144")
    assert not refusal(*given, budget, "1024")


@pytest.mark.parametrize(
    "one, other",
    [
        ("package.module:World", "package.other:World"),
        ("package.module:World", "package.module:Other"),
        ("gymnasium:Taxi-v3", "textarena:Taxi-v3"),
        ("'mcp:https://one.example:8000/mcp'", "'mcp:https://other.example:8000/mcp'"),
        ("builtin:guess\nsettings: {numbers: 8}", "builtin:guess\nsettings: {numbers: 9}"),
    ],
)
def test_resume_tells_one_environment_from_another(tmp_path, one, other):
    file, found = tmp_path / "env.yaml", []
    for name in (one, other, one):
        file.write_text(f"environment: {name}\n")
        found.append(acts_by(str(file)))
    assert found[0] != found[1] and found[0] == found[2]


@pytest.mark.parametrize("name", ["tools.yaml", "world.py"])
@pytest.mark.parametrize("place", ["environment", "interaction"])
def test_resume_tells_a_file_that_was_edited_and_not_one_that_was_moved(tmp_path, name, place):
    def acts(own, text: str) -> str:
        own.write_text(text)
        lines = f"environment: {own}{':World' if name == 'world.py' else ''}\n"
        if place == "interaction":
            lines = f"environment: package.module:World\nsettings: {{interaction_config_path: {own}}}\n"
        (tmp_path / "env.yaml").write_text(lines)
        return acts_by(str(tmp_path / "env.yaml"))

    text = "tools:\n- class_name: a.B\n" if name == "tools.yaml" else "class World: pass\n"
    assert acts(tmp_path / name, text) != acts(tmp_path / name, text + "\n")
    (tmp_path / "moved").mkdir()
    if place == "environment":
        assert acts(tmp_path / name, text) == acts(tmp_path / "moved" / name, text)
