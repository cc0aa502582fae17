"""Spans of text over two tokenizers: against trl's alignment by bytes, with broken characters and control tokens."""

import ast
from importlib.resources import files

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.rl.retokenize import CUT, Pair, UnreadableError, common, end_of_turn, reading

TEXT = [
    "the quick brown fox jumps over the lazy dog 1234567890",
    "what is the sum of twelve and thirty? the sum is forty two",
    "naïve café — über straße, 東京都, 👩‍🚀 and 👍🏽",
]


def bpe(vocab: int, end: str = "</s>", lower: bool = False):
    """A byte-level BPE tokenizer that is trained on a few lines."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    if lower:
        made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[end, "<pad>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXT[:2] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token="<pad>")


def pieces():
    """A tokenizer of words with a mark for the blank before them, as SentencePiece has it, and bytes for the rest."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(set("".join(TEXT[:2])) | {"▁"})
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(vocab)[:258], initial_alphabet=alphabet)
    made.train_from_iterator(TEXT[:2] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pair():
    student, teacher = bpe(300), bpe(380, "<|end|>")
    return Pair(student, teacher, {student.eos_token_id}, {teacher.eos_token_id})


def said(pair: Pair, tokens: list[int], found) -> list[tuple[str, str]]:
    """The text of both sides of each span."""
    return [
        (pair.student.decode([tokens[i] for i in a]), pair.teacher.decode([found.teacher[i] for i in b]))
        for a, b in found.spans
    ]


@pytest.mark.parametrize("text", [*TEXT, "", " a", "x\n\n  y\t", "2+2=4"])
@pytest.mark.parametrize("ended", [True, False])
def test_spans_cover_the_whole_response_and_are_the_same_text_on_both_sides(pair, text, ended):
    tokens = pair.student(text).input_ids + [pair.student.eos_token_id] * ended
    found = pair.align(tokens)
    assert found.teacher == pair.teacher(text).input_ids + [pair.teacher.eos_token_id] * ended
    both = said(pair, tokens, found)
    assert both[-1:] == ([("</s>", "<|end|>")] if ended else both[-1:])
    both = both[: len(both) - ended]
    assert all(a == b for a, b in both) and "".join(a for a, _ in both) == text
    for side, count in enumerate((len(tokens), len(found.teacher))):
        assert [i for span in found.spans for i in span[side]] == list(range(count))


def test_spans_are_those_of_trl_where_no_token_cuts_a_character(pair):
    tree = ast.parse((files("trl") / "experimental/gold/gold_trainer.py").read_text())
    node = next(n for n in ast.walk(tree) if getattr(n, "name", "") == "_align_by_byte_offsets")
    node.decorator_list = []
    space: dict = {}
    exec(compile(ast.Module([node], []), "gold_trainer.py", "exec"), space)
    several = 0
    for text in TEXT[:2]:
        sides = [tokenizer(text, return_offsets_mapping=True) for tokenizer in (pair.student, pair.teacher)]
        want = space["_align_by_byte_offsets"](*(side.offset_mapping for side in sides))
        found = pair.align(sides[0].input_ids).spans
        assert [list(a) for a, _ in found] == want[0] and [list(b) for _, b in found] == want[1]
        several += sum(len(a) > 1 or len(b) > 1 for a, b in found)
    assert several > 5


def test_tokens_need_not_be_those_that_the_students_tokenizer_would_choose(pair):
    """Samples seldom are: here each byte is a token of its own."""
    text = TEXT[2]
    vocab, letters = pair.student.get_vocab(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((shown, _),) = letters.pre_tokenize_str(text)
    tokens = [vocab[letter] for letter in shown]
    assert len(tokens) == len(text.encode())
    both = said(pair, tokens, pair.align(tokens))
    assert all(a == b for a, b in both) and "".join(a for a, _ in both) == text


def test_a_token_that_ends_within_a_character_ends_no_span(pair):
    vocab = pair.student.get_vocab()
    tokens = [vocab["a"], vocab["Ã"], vocab["©"], vocab["b"]]
    assert reading(pair.student, tokens) == ("aéb", [1, CUT, 2, 3])
    # A response that is cut off there is read up to the last whole character.
    cut = pair.align(tokens[:2])
    assert [list(a) for a, _ in cut.spans] == [[0]] and pair.teacher.decode(cut.teacher) == "a"


def test_a_tokenizer_that_marks_blanks_is_read_behind_the_prompt():
    student, teacher = pieces(), bpe(380)
    pair = Pair(student, teacher, {student.eos_token_id}, {teacher.eos_token_id})
    tokens = student("the sum is forty").input_ids
    first = next(i for i, word in enumerate(student.convert_ids_to_tokens(tokens)) if i and word.startswith("▁"))
    prompt, body = tokens[:first], tokens[first:]
    found = pair.align(body, prompt)
    text = student.decode(tokens)[len(student.decode(prompt)) :]
    assert teacher.decode(found.teacher) == text and text.startswith(" ") and not student.decode(body).startswith(" ")
    assert [i for a, _ in found.spans for i in a] == list(range(len(body)))
    other = Pair(teacher, student, {teacher.eos_token_id}, {student.eos_token_id})
    tokens = teacher("twelve é and 東").input_ids
    both = said(other, tokens, other.align(tokens))
    assert "".join(a for a, _ in both) == "twelve é and 東" and len(both) == 6


def test_what_cannot_be_aligned_says_why(pair):
    student, vocab = pair.student, pair.student.get_vocab()
    for tokens, why in [
        ([vocab["a"], vocab["<pad>"], vocab["b"]], "it contains the control token '<pad>'"),
        ([vocab["a"], vocab["©"], vocab["b"]], "bytes that are not text"),
        ([vocab["a"], vocab["Ã"], student.eos_token_id], "bytes that are not text"),
        (student("a <|end|> b").input_ids, r"the teacher reads its control token '<\|end\|>'"),
    ]:
        with pytest.raises(UnreadableError, match=why):
            pair.align(tokens)
    small = bpe(380, lower=True)
    lower = Pair(student, small, {student.eos_token_id}, {small.eos_token_id})
    with pytest.raises(UnreadableError, match="the teacher reads 'Fox' as 'fox'"):
        lower.align(student("the Fox").input_ids)
    tiny = load_tokenizer(resolve("tiny"))
    few = Pair(student, tiny, {student.eos_token_id}, {tiny.eos_token_id})
    with pytest.raises(UnreadableError, match="the teacher reads 'É' as ''|control token"):
        few.align(student("aÉ").input_ids)


TURNS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{{ '<|turn|>' }}\n{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)


def test_the_end_of_a_response_is_the_one_of_the_chat_template():
    """As with Gemma and Phi-3, whose turns end with another token than their texts."""
    student, teacher = bpe(300), bpe(380, "<|end|>")
    for side in (student, teacher):
        side.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|user|>", "<|assistant|>"]})
    turn, ends = teacher.convert_tokens_to_ids("<|turn|>"), {student.eos_token_id}
    both = {teacher.eos_token_id, turn}
    assert end_of_turn(teacher, both) == teacher.eos_token_id, "it has no template"
    teacher.chat_template = TURNS
    assert end_of_turn(teacher, both) == turn and end_of_turn(teacher, {teacher.eos_token_id}) == teacher.eos_token_id
    teacher.chat_template = "{{ raise_exception('no dialogue') }}"
    assert end_of_turn(teacher, both) == teacher.eos_token_id
    teacher.chat_template = TURNS
    pair = Pair(student, teacher, ends, both)
    assert pair.last == (student.eos_token_id, turn)
    found = pair.align([*student("fox", add_special_tokens=False).input_ids, student.eos_token_id])
    assert found.teacher[-1] == turn
    mine, theirs = pair.both((len(student), len(teacher)))
    matched = dict(zip(mine.tolist(), theirs.tolist(), strict=True))
    assert matched[student.eos_token_id] == turn and teacher.eos_token_id not in matched.values()
    assert student.convert_tokens_to_ids("<|turn|>") not in matched


def test_common_spans_go_with_the_first_token_that_reaches_their_end():
    assert common([1, 1, 3], [1, 3]) == [(range(0, 1), range(0, 1)), (range(1, 3), range(1, 2))]
    assert common([0, 2, 4], [4]) == [(range(0, 3), range(0, 1))]
    assert common([], []) == common([2], [3]) == common([CUT], [CUT]) == []


def test_tokens_that_both_have_are_paired_by_their_string_and_the_ends_by_their_role(pair):
    student, teacher = pair.both((300, 380))
    words = list(
        zip(
            pair.student.convert_ids_to_tokens(student.tolist()),
            pair.teacher.convert_ids_to_tokens(teacher.tolist()),
            strict=True,
        )
    )
    assert ("</s>", "<|end|>") in words and all(a == b for a, b in words if a != "</s>")
    mine, theirs = (set(side.get_vocab()) for side in (pair.student, pair.teacher))
    assert {a for a, _ in words} == (mine & theirs) | {"</s>"} and len(mine & theirs) > 250
    assert len(torch.unique(student)) == len(student) == len(torch.unique(teacher))
    fewer, theirs = pair.both((300, 380), ((int(student[5]),), (int(teacher[7]),)))
    left = [i for i in range(len(student)) if i not in (5, 7)]
    assert torch.equal(fewer, student[left]) and torch.equal(theirs, teacher[left])
    fewer, _ = pair.both((200, 380))
    assert fewer.tolist() == [token for token in student.tolist() if token < 200], "the model has no others"
