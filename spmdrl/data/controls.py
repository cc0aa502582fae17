"""Keeps control tokens in message text apart from the control tokens that a chat template writes.

A message might contain the text of a control token (`<|im_end|>` in a tool's output). Before rendering, a mark is
inserted after the first character of each such text. Texts in WRITTEN get no mark in assistant messages. The rendered
text is then split at the marks and tokenized piece by piece, so its only control tokens are those that the template
writes and those in WRITTEN.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from spmdrl.data.row_columns import strings

MARKS = [chr(code) for code in range(0xF0000, 0xF1000)]
"""Private-use characters. The first one that no message contains is used as the mark."""
WRITTEN = ("<think>", "</think>")
"""Control tokens that assistant messages may contain, because templates look for them there."""


class Controls:
    """A tokenizer's control tokens: special tokens, and other added tokens that occur in the template.

    All other added tokens (such as HTML tags), and whitespace-only ones, count as text.
    """

    def __init__(self, tokenizer: Any, template: str):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        named = {i: token for i, token in added.items() if (token.special or str(token) in template)}
        named = {i: token for i, token in named.items() if str(token).strip()}
        words = sorted(map(str, named.values()), key=lambda word: (-len(word), word))
        self.pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self.ids = frozenset(named)
        self._as_in_json = all(json.dumps(word, ensure_ascii=False) == f'"{word}"' for word in words)
        self._id = {str(token): i for i, token in named.items()}
        # Each piece is tokenized after this token, because some tokenizers insert a space at the start of a text.
        self._before = next((str(token) for token in named.values() if not token.rstrip), "")

    def marked(self, messages: list[dict], tools: list | None) -> tuple[list[dict], list | None, str]:
        """Insert a mark into every control token in messages and tools; return the messages, the tools and the mark.

        Texts in WRITTEN get no mark in assistant messages.
        """
        # Almost no message contains a control token. If JSON escapes no character of any control token, one
        # search in the messages' JSON is enough.
        if self._as_in_json and not self.pattern.search(json.dumps([messages, tools], ensure_ascii=False, default=str)):
            return messages, tools, MARKS[0]
        texts = list(strings([messages, tools]))
        if not any(map(self.pattern.search, texts)):
            return messages, tools, MARKS[0]
        mark = next(mark for mark in MARKS if not any(mark in text for text in texts))
        out = []
        for message in messages:
            but = WRITTEN if message["role"] == "assistant" else ()
            out.append(_mapped(message, lambda text, but=but: self._cut(text, mark, but)))
        return out, _mapped(tools, lambda text: self._cut(text, mark, ())), mark

    def _cut(self, text: str, mark: str, but: tuple[str, ...]) -> str:
        out, start = [], 0
        while found := self.pattern.search(text, start):
            allowed = found.group() in but
            # The search continues after the mark, because control tokens can overlap.
            cut = found.end() if allowed else found.start() + 1
            out += [text[start:cut], "" if allowed else mark]
            start = cut
        return "".join([*out, text[start:]])

    def tokens(self, text: str, mark: str) -> list[int]:
        """Tokenize rendered text without adding special tokens.

        Raises ValueError if the tokens contain control tokens that the template did not write.
        """
        first, *rest = text.split(mark)
        pieces = self.tokenizer([first, *(self._before + piece for piece in rest)], add_special_tokens=False).input_ids
        before = 1 if self._before else 0
        ids = [*pieces[0], *(token for piece in pieces[1:] for token in piece[before:])]
        if [i for i in ids if i in self.ids] != [self._id[found.group()] for found in self.pattern.finditer(text)]:
            raise ValueError("the tokenizer's control tokens in the text differ from those that the template writes")
        return ids


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every string in a JSON value, including object keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
