"""Turns responses into the tokens of a reward model that has a tokenizer of its own, by way of text.

A policy may write words that are special tokens of this tokenizer, with which it could end its turn for the reward
model and begin others. A blank is put into such words.
"""

from bisect import bisect_left
from typing import Any

from spmdrl.data.chat import variables
from spmdrl.data.prompts import Prompt
from spmdrl.data.steps import tokens_of_ends
from spmdrl.hub.tokenizer import BROKEN, control_words

MARK = "\ue000"
"""A character for private use, rendered in place of an answer to find its place in a template."""


class Rewriter:
    """Turns a prompt and a response into the tokens of another tokenizer."""

    def __init__(self, tokenizer: Any, prefix: str, pad: int | None):
        """tokenizer: the reward model's. prefix: begins messages. pad: token that transformers skips at the end."""
        self.tokenizer, self.prefix, self.pad = tokenizer, prefix, pad
        self.control = control_words(tokenizer)

    def check(self, prompts: list[Prompt]) -> None:
        """Check that prompts of a chat can be rendered.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if any(prompt.chat for prompt in prompts) and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"{self.prefix}: the prompts are chats, and the reward model's tokenizer has no chat template: put one "
                "into its folder (chat_template.jinja), or take --data.chat off"
            )

    def whole(self, prompt: Prompt, response: str) -> tuple[list[int], int]:
        """Return the tokens of a prompt with its response, and the index of the one at which HF reads the score."""
        tokens = self._tokens(prompt, self._text(prompt, prompt.reply + self.control.sub(BROKEN, response)))
        # transformers looks for the last token that is not padding, even in a sequence of its own, and else the first.
        return tokens, next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] != self.pad), 0)

    def stepwise(self, prompt: Prompt, response: str, ends: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with its response, and the index of the token that ends each step.

        ends: as `step_ends` returns them for the response.

        Raises:
            ValueError: the chat template leaves responses out, or tokens of the tokenizer cannot be found in the text.
        """
        blanks = [found.end() for found in self.control.finditer(response)]
        ends = [end + bisect_left(blanks, end) for end in ends]
        reply = prompt.reply + self.control.sub(BROKEN, response)
        text, kept, begin = self._located(prompt, reply)
        tokens = self._tokens(prompt, text)
        if not kept:
            return tokens, [len(tokens) - 1] * len(ends)
        lead = reply.index(kept)
        places = [begin + min(max(len(prompt.reply) + end - lead, 1), len(kept)) for end in ends]
        return tokens, self._holding(tokens, text, places, prompt.chat)

    def _text(self, prompt: Prompt, reply: str) -> str:
        """Return the text of a prompt with a reply: a chat through the template, without a generation prompt."""
        content = prompt.content
        if not prompt.chat:
            # A single message may stand as plain text.
            return (content if isinstance(content, str) else content[0]["content"]) + reply
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        try:
            return self.tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": reply}],
                tokenize=False,
                add_generation_prompt=False,
                tools=prompt.tools,
                **variables(prompt.more),
            )
        except Exception as error:  # jinja raises its own errors, and templates raise any
            raise ValueError(
                f"{self.prefix}: its chat template could not render prompt {prompt.index} with its response "
                f"({type(error).__name__}: {error})"
            ) from error

    def _located(self, prompt: Prompt, reply: str) -> tuple[str, str, int]:
        """Return the text that the model reads, the reply as it stands there, and where that begins."""
        text = self._text(prompt, reply)
        if not prompt.chat:
            return text, reply, len(text) - len(reply)
        head, found, tail = self._text(prompt, MARK).rpartition(MARK)
        if not found:
            raise ValueError(f"{self.prefix}: its chat template leaves out the assistant's answer; give it another one")
        # A template may strip the white space around an answer.
        for kept in (reply, reply.strip(), reply.lstrip(), reply.rstrip()):
            if text == head + kept + tail:
                return text, kept, len(head)
        # The template moves or drops a part of this answer, such as a thought; put it in as it was sampled.
        return head + reply + tail, reply, len(head)

    def _tokens(self, prompt: Prompt, text: str) -> list[int]:
        # A rendered chat holds every special token already.
        tokens = list(self.tokenizer(text, add_special_tokens=not prompt.chat).input_ids)
        if not tokens:
            raise ValueError(
                f"{self.prefix}: its tokenizer gives no tokens for prompt {prompt.index} with its response, the text "
                f"{text[:40]!r}, so there is nothing to score: leave the prompt out, or take another model"
            )
        return tokens

    def _holding(self, tokens: list[int], text: str, places: list[int], chat: bool) -> list[int]:
        """Return the index of the token that holds the character before each place of the text."""

        def decode(some: list[int]) -> str:
            return self.tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        # Offsets of byte-level tokenizers leave white space out, so they serve only where decoding gives another text.
        shift = decode(tokens).find(text)
        if shift >= 0:
            return tokens_of_ends(decode, tokens, [shift + place for place in places])
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{self.prefix}: its tokenizer neither decodes to the text that it encoded nor returns their places: "
                "add a tokenizer.json to its folder"
            )
        spans = self.tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)["offset_mapping"]
        # Special tokens beside the text have empty spans.
        return [max(i for i, (a, b) in enumerate(spans) if a < place and b > a) for place in places]
