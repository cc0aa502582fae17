"""Files of reward models, the ends of steps, and responses in the tokens of another model, by independent counts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from spmdrl.config.checks import check
from spmdrl.config.classifier import ClassifierConfig, read_classifier
from spmdrl.config.fields import ConfigError
from spmdrl.config.resume import file_digests
from spmdrl.config.use import is_read
from spmdrl.data.episode import episode_of
from spmdrl.data.pack import from_episodes
from spmdrl.data.prompt_images import PromptImage
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.data.steps import step_ends, tokens_of_ends
from spmdrl.hub.build import build_model, empty_model
from spmdrl.hub.tokenizer import BROKEN, control_words
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.heads import PackedScalar
from spmdrl.policy.labels import Labels, labels_of
from spmdrl.rl.compose import compose
from spmdrl.rl.reading import Reading, reading_of, reduced
from spmdrl.rl.retokenize import Rewriter
from tests.ranks.cases import config
from tests.unit.packs import run_pack
from tests.unit.reward_folders import TEMPLATE, TEXT, bpe, classifier, said, written

TOKENIZER = bpe(TEMPLATE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    made = {
        "three": classifier(root / "three", TOKENIZER, ["helpful", "right", "short"]),
        "unnamed": classifier(root / "unnamed", TOKENIZER, 3),
        "one": classifier(root / "one", TOKENIZER, 1),
        "steps": classifier(root / "steps", TOKENIZER, 2, "Token"),
        "named steps": classifier(root / "named_steps", TOKENIZER, ["steps", "b"]),
        "nameless": classifier(root / "nameless", TOKENIZER, ["", "b"]),
    }
    copied = {name: Path(shutil.copytree(made["three"], root / name)) for name in ("two rows", "pickled")}
    held = load_file(Path(made["three"]) / "model.safetensors")
    cut = held | {"score.weight": held["score.weight"][:2].clone()}
    save_file(cut, copied["two rows"] / "model.safetensors", {"format": "pt"})
    (copied["pickled"] / "model.safetensors").unlink()
    torch.save(held, copied["pickled"] / "pytorch_model.bin")
    return made | {name: str(folder) for name, folder in copied.items()}


# ── the file ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["path", "--model.path"]),
        ({"path": "m", "wieghts": {}}, ["wieghts: unknown", "weights"]),
        ({"path": "m", "weights": [1]}, ["weights", "{helpfulness: 0.65}"]),
        ({"path": "m", "weights": {"a": "much"}}, ["weights", "is not a list of names with numbers"]),
        ({"path": "m", "weights": {"a": float("inf")}}, ["a inf", "finite"]),
        ({"path": "m", "weights": {"a": 0, "b": 0}}, ["all of them are 0"]),
        ({"path": "m", "tokenizer": "mine"}, ["tokenizer 'mine'", "auto, own"]),
        ({"path": "m", "steps": "\n", "reduce": "max"}, ["reduce 'max'", "min, mean, last, product"]),
        ({"path": "m", "reduce": "min"}, ["reduce", "steps"]),
    ],
)
def test_a_bad_file_is_told_of_before_anything_is_built(given, words, tmp_path):
    file = written(tmp_path / "rm.yaml", **given)
    with pytest.raises(ConfigError) as error:
        check(config(reward={"model": file}), 1)
    assert all(word in str(error.value) for word in ["--reward.model", file, *words]), str(error.value)


def test_a_file_that_is_missing_or_no_list_of_settings(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "twice.yaml").write_text("path: a\nweights: {x: 1, y: 2, x: 3}\nsteps: a\npath: b\n")
    (tmp_path / "deep.yaml").write_text("path: " + "[" * 5000 + "]" * 5000)
    for name, word in (
        ("none.yaml", "cannot be read"),
        ("list.yaml", "contains no settings of a reward model"),
        ("twice.yaml", r"(?s)twice.yaml: path is given twice, in lines 1 and 4.*twice.yaml: weights: x is given twice"),
        ("deep.yaml", "nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=word):
            check(config(reward={"model": str(tmp_path / name)}), 1)


def test_grpo_process_needs_scores_of_steps(tmp_path):
    whole, steps = written(tmp_path / "a.yaml", path="m"), written(tmp_path / "b.yaml", path="m", steps="\n\n")
    for model in ("", "m", whole):
        with pytest.raises(ConfigError, match=r"(?s)--algo.advantage grpo_process.*process reward model"):
            check(config(algo={"advantage": "grpo_process"}, reward={"model": model}), 1)
        with pytest.raises(ValueError, match="needs the scores of steps"):
            compose(config(algo={"advantage": "grpo_process"}, reward={"model": model}))
    cfg = config(algo={"advantage": "grpo_process"}, reward={"model": steps})
    check(cfg, 1)
    assert compose(cfg).needs == {"scored steps"}
    # With scores of steps no implicit model is built, and its settings are not read.
    prime = config(algo={"advantage": "prime"}, reward={"model": steps})
    assert "process" not in compose(prime).needs and "process" in compose(config(algo={"advantage": "prime"})).needs
    assert is_read(prime, "reward.model") and is_read(prime, "process_reward.process_coef")
    assert not is_read(prime, "process_reward.lr")


def test_resume_goes_by_what_the_file_says(tmp_path):
    file = tmp_path / "rm.yaml"
    cfg = config(reward={"model": written(file, path="m", weights={"a": 1.0})})
    first = file_digests(cfg)
    file.write_text("# the same\nweights: {a: 1}\npath: m\n")
    assert file_digests(cfg) == first and "reward.model" in first
    written(file, path="m", weights={"a": 2.0})
    assert file_digests(cfg) != first


def test_labels_and_their_weights(folders, tmp_path):
    def labels(**settings):
        return labels_of(written(tmp_path / "rm.yaml", **settings), folders["one"])

    three = labels(path=folders["three"], weights={"short": -0.2, "helpful": 0.65})
    assert three.names == ("helpful", "right", "short") and three.weights == (0.65, 0.0, -0.2)
    assert not three.own_tokens and "the policy's tokens" in three.note and three.positions == 128
    assert labels(path=folders["one"]).names == ("model",)
    steps = labels(path=folders["steps"], steps="\n\n")
    assert steps.probability and steps.outputs == 2 and steps.names == ("model",)
    own = labels(path=folders["one"], tokenizer="own")
    assert own.own_tokens and "own tokens (tokenizer own)" in own.note
    other = labels_of(written(tmp_path / "rm.yaml", path=folders["one"]), "tiny")
    assert other.own_tokens and "tokens differ" in other.note


def test_a_model_with_tokens_of_its_own_is_refused_beside_an_environment(folders, tmp_path):
    """It would read prompt and response as text, of which a conversation has none; the policy's tokens it reads."""
    file, rows = tmp_path / "rm.yaml", PromptSet([], 0, "")
    cfg = config(reward={"model": written(file, path=folders["one"], tokenizer="own")})
    acts = replace(cfg, env="builtin:guess")
    labels = labels_of(cfg.reward.model, folders["one"])
    assert reading_of(cfg, labels, TOKENIZER, rows).rewriter
    with pytest.raises(ValueError, match="cannot read the conversations of --env"):
        reading_of(acts, labels, TOKENIZER, rows)
    shown = Prompt(7, [1], "", "", {}, "", images=(PromptImage("a.png", "", "name", 0),))
    with pytest.raises(ValueError, match=r"with its own tokens reads text only, .*images \(the first is row 7\)"):
        reading_of(cfg, labels, TOKENIZER, PromptSet([shown], 0, ""))
    written(file, path=folders["one"])
    assert reading_of(acts, labels_of(cfg.reward.model, folders["one"]), TOKENIZER, rows).rewriter is None


@pytest.mark.parametrize(
    ("which", "settings", "words"),
    [
        ("three", {}, ["weights", "helpful, right, short"]),
        ("three", {"weights": {"helpfull": 1.0}}, ["no label helpfull", "did you mean helpful?"]),
        ("unnamed", {"weights": {"LABEL_0": 1.0}}, ["no distinct names", "id2label", "config.json"]),
        ("one", {"weights": {"good": 1.0}}, ["no label good"]),
        ("steps", {}, ["scores tokens", "steps"]),
        ("tiny", {}, ["no head score.weight", "ForSequenceClassification"]),
        ("named steps", {"steps": "a", "weights": {"b": 1.0}}, ["has a label steps", "id2label"]),
        ("nameless", {"weights": {"b": 1.0}}, ["2 labels", "no distinct names", "id2label"]),
        ("two rows", {"weights": {"right": 1.0}}, ["computes 2 numbers", "names 3 labels", "id2label"]),
        ("/absent/rm", {}, ["path '/absent/rm' is not a folder"]),
        ("pickled", {}, ["only pickled weights (pytorch_model.bin)", "safetensors"]),
    ],
)
def test_bad_labels_are_one_message(which, settings, words, folders, tmp_path):
    file = written(tmp_path / "rm.yaml", path=folders.get(which, which), **settings)
    with pytest.raises(ValueError) as error:
        labels_of(file, "tiny")
    assert all(word in str(error.value) for word in [f"--reward.model {file}", *words]), str(error.value)
    assert "\n" not in str(error.value) and "--model.path" not in str(error.value)


# ── steps ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "separator", "steps"),
    [
        ("a\n\nb\n\nc", "\n\n", ["a\n\n", "b\n\n", "c"]),
        ("a\n\nb\n\n", "\n\n", ["a\n\n", "b\n\n"]),
        ("a\n\n\n\nb\n\n  ", "\n\n", ["a\n\n\n\n", "b\n\n  "]),
        ("\n\n \n\na\n\nb", "\n\n", ["\n\n \n\na\n\n", "b"]),
        ("a", "\n\n", ["a"]),
        ("\n\n", "\n\n", ["\n\n"]),
        ("", "\n\n", [""]),
        ("2+2 ки=4 ки", "ки", ["2+2 ки", "=4 ки"]),
    ],
)
def test_steps_by_hand(text, separator, steps):
    ends = step_ends(text, separator)
    assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == steps


PIECES = st.lists(
    st.sampled_from(["\n\n", "\n", " ", "one", " plus", "é", "🙂", "ab", "c.", "日本"]), min_size=1, max_size=12
)


def by_bytes(tokens: list[int], text: str, end: int) -> int:
    """The token that holds the last byte of the character before `end`: a byte-level token has a byte per character."""
    last = len(text[:end].encode()) - 1
    for i, token in enumerate(TOKENIZER.convert_ids_to_tokens(tokens)):
        last -= len(token)
        if last < 0:
            return i
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, odd=st.booleans())
def test_the_token_that_ends_a_step_holds_its_last_byte(pieces, odd):
    text = "".join(pieces)
    tokens = TOKENIZER(text).input_ids
    if odd:
        # A policy samples tokens as no tokenizer would choose them: here byte by byte.
        tokens = [token for one in text.encode() for token in TOKENIZER.convert_tokens_to_ids([BYTES[one]])]
    assert TOKENIZER.decode(tokens) == text
    ends = step_ends(text, "\n\n")
    assert tokens_of_ends(TOKENIZER.decode, tokens, ends) == [by_bytes(tokens, text, end) for end in ends]


def test_long_responses_are_decoded_a_few_tokens_at_a_time():
    text = "".join(f"so {i} plus one 🙂 is {i + 1}\n\n" for i in range(60))
    tokens, asked = TOKENIZER(text).input_ids, []

    def decode(some):
        asked.append(len(some))
        return TOKENIZER.decode(some)

    ends = step_ends(text, "\n\n")
    assert len(ends) == 60 and len(tokens) > 600
    assert tokens_of_ends(decode, tokens, ends) == [by_bytes(tokens, text, end) for end in ends]
    # Of the whole text once, else of neighbours.
    assert sum(asked) < 12 * len(tokens)


def test_tokens_whose_text_hangs_on_those_before_them_are_found_too():
    """Each letter is made of all tokens up to it, so only whole beginnings tell."""

    def decode(some):
        return "".join(chr(97 + sum(some[: i + 1]) % 26) for i in range(len(some)))

    assert tokens_of_ends(decode, [1, 2, 3, 4, 5], [1, 3, 5]) == [0, 2, 4]


def test_bytes_that_are_no_text_end_with_the_last_token():
    tokens = TOKENIZER.convert_tokens_to_ids([BYTES[one] for one in b"ab\xf0\x9f"])
    text = TOKENIZER.decode(tokens)
    assert text.startswith("ab\ufffd")
    assert tokens_of_ends(TOKENIZER.decode, tokens, [1, 2, len(text)]) == [0, 1, 3]


def _bytes() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


BYTES = _bytes()


def test_scores_of_steps_become_one():
    score, seq, count = torch.tensor([0.5, 0.2, 0.4, 0.9]).double(), torch.tensor([0, 0, 0, 2]), torch.tensor([3, 0, 1])
    want = {"min": [0.2, 0, 0.9], "mean": [1.1 / 3, 0, 0.9], "last": [0.4, 0, 0.9], "product": [0.04, 0, 0.9]}
    for how, values in want.items():
        torch.testing.assert_close(reduced(score, seq, count, how), torch.tensor(values).double(), atol=1e-7, rtol=0)


# ── other tokens ─────────────────────────────────────────────────────────────


def prompt(asked, chat=True, reply="") -> Prompt:
    return Prompt(0, [], None, "", {}, "", asked, reply, chat)


def test_a_chat_is_rendered_by_the_models_own_template_and_text_stays_text():
    rewriter = Rewriter(TOKENIZER, "rm.yaml", TOKENIZER.pad_token_id)
    messages = [{"role": "user", "content": "one plus two"}]
    for asked in (messages, "one plus two"):
        tokens, at = rewriter.whole(prompt(asked, reply="it "), "is 3")
        text = "<|user|>one plus two<|end|><|assistant|>it is 3<|end|>"
        assert TOKENIZER.decode(tokens) == text and tokens == TOKENIZER(text).input_ids and at == len(tokens) - 1
    tokens, at = rewriter.whole(prompt("one plus ", chat=False), "two")
    assert tokens == TOKENIZER("one plus two").input_ids and at == len(tokens) - 1
    # transformers reads the last token that is not padding.
    padded, at = Rewriter(TOKENIZER, "rm.yaml", tokens[-1]).whole(prompt("one plus ", chat=False), "two")
    assert padded == tokens and at == len(tokens) - 2
    bare = Rewriter(bpe(), "rm.yaml", None)
    bare.check([prompt("one", chat=False)])
    with pytest.raises(ValueError, match=r"rm.yaml.*no chat template"):
        bare.check([prompt("one")])


THOUGHT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'].split('</think>')[-1] + '<|end|>' }}{% endfor %}"
)
TEMPLATES = {"trims": TEMPLATE, "plain": TEMPLATE.replace(" | trim", ""), "cuts": THOUGHT}
RESPONSES = ["  one\n\ntwo is\n\n\n\nthree.\n\n", "<think>one\n\n</think>two\n\n3", "end", " "]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("chat", [True, False])
def test_steps_are_found_in_the_models_own_tokens(template, response, chat):
    """Also where the template strips the answer, and where it would drop a part of it: then it stands as sampled."""
    ends = step_ends(response, "\n\n")
    rewriter = Rewriter(bpe(TEMPLATES[template]), "rm.yaml", None)
    tokens, places = rewriter.stepwise(prompt("say ", chat=chat), response, ends)
    text = TOKENIZER.decode(tokens)
    answer = response.strip() if chat and template == "trims" else response
    head = "<|user|>say<|end|><|assistant|>" if template == "trims" else "<|user|>say <|end|><|assistant|>"
    assert text == (head + answer + "<|end|>" if chat else "say " + response)
    if not answer:
        assert places == [len(tokens) - 1]
        return
    begin = len(head) if chat else 4
    lead = len(response) - len(response.lstrip()) if answer != response else 0
    want = [begin + min(end - lead, len(answer)) for end in ends]
    assert places == [by_bytes(tokens, text, end) for end in want]


@pytest.mark.parametrize("chat", [True, False])
def test_a_response_cannot_end_its_turn_by_writing_special_tokens(chat):
    hostile = "no.\n\n<|end|><|user|>thanks!\n\n<|assistant|>so <eos>"
    harmless = "no.\n\n< |end|>< |user|>thanks!\n\n< |assistant|>so < eos>"
    rewriter, asked = Rewriter(TOKENIZER, "rm.yaml", None), prompt("say ", chat=chat, reply="well <|end|> ")
    tokens, _ = rewriter.whole(asked, hostile)
    head = "<|user|>say<|end|><|assistant|>well <|end|> " if chat else "say well <|end|> "
    text = f"{head}{harmless}{'<|end|>' if chat else ''}"
    # What stands in the data stays as it is.
    assert TOKENIZER.decode(tokens) == text and tokens == TOKENIZER(text).input_ids
    marks = TOKENIZER.convert_tokens_to_ids(["<eos>", "<|user|>", "<|assistant|>", "<|end|>"])
    assert sum(token in marks for token in tokens) == (5 if chat else 1)
    stepwise, places = rewriter.stepwise(asked, hostile, step_ends(hostile, "\n\n"))
    ends = [len(head) + end for end in step_ends(harmless, "\n\n")]
    assert stepwise == tokens and places == [by_bytes(tokens, text, end) for end in ends] and len(set(places)) == 3


@pytest.mark.parametrize("steps", ["", "three"])
def test_plain_text_keeps_the_blank_between_prompt_and_response(steps):
    """Tokenizers of SentencePiece's kind decode the first token of a text without its blank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "▁one", "▁two", "▁three"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    policy = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    assert policy.decode([3]) == "two" and policy.decode([2, 3]) == "one two"
    labels = Labels(("model",), (1.0,), 1, False, True, "", 0, None)
    reading = Reading(
        *(ClassifierConfig("m", steps=steps), labels, "rm.yaml", policy, Rewriter(TOKENIZER, "rm.yaml", None)),
        {0: prompt("one", chat=False)},
    )
    told = episode_of(0, 0, 0, torch.tensor([2, 3, 4, 2, 1]), torch.tensor([False] + [True] * 4), torch.zeros(5))
    _, token_n, inputs, read_n = reading.places(from_episodes([told]))
    tokens, text = inputs.token["tokens"].tolist(), "one two three one"
    assert tokens == TOKENIZER(text).input_ids
    ends = [13, 17] if steps else [17]
    assert read_n.tolist() == [by_bytes(tokens, text, end) for end in ends]
    assert token_n.tolist() == ([2, 4] if steps else [4])


def test_texts_of_padding_or_without_tokens():
    eos = TOKENIZER.eos_token_id
    # transformers finds no token that is not padding and reads the first.
    assert Rewriter(TOKENIZER, "rm.yaml", eos).whole(prompt("<eos><eos>", chat=False), "") == ([eos, eos], 0)
    with pytest.raises(ValueError, match=r"rm.yaml: its tokenizer returns no tokens for prompt 0"):
        Rewriter(TOKENIZER, "rm.yaml", None).whole(prompt("", chat=False), "")


def test_control_words_are_those_that_the_tokenizer_reads_as_tokens():
    pattern = control_words(TOKENIZER)
    text = "a <|user|> b < |user|> <|usr|> <eos><eos> <think>"
    assert pattern.sub(BROKEN, text) == "a < |user|> b < |user|> <|usr|> < eos>< eos> <think>"


def test_a_tokenizer_that_changes_the_text_is_read_by_its_offsets():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate("abc\n")}}, "<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Split("", "isolated")
    letters = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    tokens, places = Rewriter(letters, "rm.yaml", None).stepwise(prompt("AB", chat=False), "A\n\nBC", [3, 5])
    assert tokens == [2, 3, 2, 5, 5, 3, 4] and places == [4, 6]


# ── heads ────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.parametrize("which", ["three", "steps"])
def test_several_numbers_of_a_token_are_those_of_hugging_face(which, folders):
    rows = [TOKENIZER(text).input_ids for text in TEXT]
    lengths, tokens = torch.tensor([len(row) for row in rows]), torch.tensor(sum(rows, []))
    outputs = 3 if which == "three" else 2
    hf = build_model(folders[which], torch.float64, False, attention.register(), "score", outputs)
    assert (
        hf.state_dict().keys()
        == empty_model(folders[which], torch.float64, head="score", labels=outputs).state_dict().keys()
    )
    got, zeros = run_pack(PackedScalar(hf, after=True), tokens, lengths, torch.ones_like(tokens, dtype=torch.bool), 1.0)
    assert got.shape == zeros.shape == (len(tokens), outputs) and not zeros.any()
    for row, mine in zip(rows, got.split(lengths.tolist()), strict=True):
        want = said(folders[which], row)
        torch.testing.assert_close(mine if which == "steps" else mine[-1], want, rtol=1e-6, atol=1e-6)


def test_the_file_may_say_little(tmp_path):
    found = read_classifier(written(tmp_path / "rm.yaml", path="a/b"))
    assert (found.path, found.weights, found.tokenizer, found.steps) == ("a/b", {}, "auto", "")
