"""Loads, checks and compares the tokenizers of Hugging Face folders."""

import json
import re
from pathlib import Path
from typing import Any

from spmdrl.hub.folder import plain_errors
from spmdrl.hub.resolve import resolve

TOKENIZER_FILES = ["tokenizer.json", "*.model", "vocab.*", "*.tiktoken"]


def has_tokenizer(folder: Path) -> bool:
    """Return True if a Hugging Face folder contains tokenizer files."""
    return any(list(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load and check the tokenizer of a Hugging Face folder. A missing pad token is set to the end token.

    Raises ValueError if the tokenizer is missing, cannot be read, or has no end token.
    """
    from transformers import AutoTokenizer

    # If the files were missing, transformers would create an empty tokenizer for the model type.
    if not has_tokenizer(folder):
        raise ValueError(f"no tokenizer in {folder} (tokenizer.json or tokenizer.model): copy the model's into it")
    with plain_errors(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no end token: set eos_token in its tokenizer_config.json")
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ValueError(f"{folder}: its tokenizer_config.json has model_max_length {longest!r}: write a number")
    if not tokenizer.chat_template and (folder / "chat_template.json").is_file():
        # Some models that read images have their template in this file of their processor.
        with plain_errors(folder):
            tokenizer.chat_template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    _check_rows(folder, tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_rows(folder: Path, tokenizer: Any) -> None:
    """Check that the model in a folder, if any, has an embedding for every token that a text can contain.

    Special tokens (e.g. for images or infilling in some published models) may lack an embedding, unless they appear in
    the chat template or are the begin or end token. Raises ValueError for any other token without an embedding, because
    the model would fail on it.
    """
    if not (folder / "config.json").exists():
        return
    with plain_errors(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(rows, int):
        return
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    template, ends = str(tokenizer.chat_template or ""), (tokenizer.bos_token, tokenizer.eos_token)
    beyond = {
        token: i
        for token, i in tokenizer.get_vocab().items()
        if i >= rows and (token not in special or token in template or token in ends)
    }
    if beyond:
        first = min(beyond, key=lambda token: beyond[token])
        many = "1 token" if len(beyond) == 1 else f"{len(beyond)} tokens"
        raise ValueError(
            f"the tokenizer in {folder} has {many} that the model cannot embed: the model's config.json names "
            f"vocab_size {rows}, and {first!r} is token {beyond[first]}; copy the tokenizer that belongs to the model, "
            "or resize the model's embedding and save it again (transformers: resize_token_embeddings)"
        )


def control_words(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each string that the tokenizer parses as a control token.

    These strings are the tokenizer's special tokens, and added tokens that look like turn markers (`<|user|>`).
    Inserting a space after the first character turns them into plain text: `pattern.sub(BROKEN, text)`.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = [str(each.content) for each in added if each.special or str(each.content).startswith(("<|", "<｜"))]
    words = sorted(word for word in {*tokenizer.all_special_tokens, *marks} if len(word) > 1)
    return re.compile(f"(?={'|'.join(map(re.escape, words)) or '(?!)'}).", re.DOTALL)


BROKEN = r"\g<0> "
"""Replacement for a match of `control_words`: the matched character followed by a space."""


def differing_tokens(path: str, other: str, trust_remote_code: bool = False) -> tuple[list[str], int]:
    """Return the tokens whose ids differ between the models at `path` and `other`, and the vocabulary size of `other`.

    path, other: values of `--model.path`. A model at `path` without a tokenizer is assumed to have the same tokens.
    """
    folder, base = resolve(path, trust_remote_code), resolve(other, trust_remote_code)
    if folder == base or not has_tokenizer(folder):
        return [], 0
    theirs, ours = (load_tokenizer(f, trust_remote_code).get_vocab() for f in (folder, base))
    return sorted(token for token in ours if theirs.get(token) != ours[token]), len(ours)


def check_same_tokens(path: str, other: str, flag: str, trust_remote_code: bool = False, way: str = "") -> None:
    """Raise ValueError unless the models at `path` and `other` (values of `--model.path`) have the same token ids.

    flag: name of the setting that holds `path`, for the message. way: advice to append to the message. A model at
    `path` without a tokenizer is assumed to have the same tokens.
    """
    different, count = differing_tokens(path, other, trust_remote_code)
    if different:
        raise ValueError(
            f"{flag} {path}: its tokenizer gives {len(different)} of {count} tokens of {other} another id "
            f"(such as {different[0]!r}); both models must read the same tokens{way}"
        )
