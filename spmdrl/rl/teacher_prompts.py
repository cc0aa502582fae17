"""The prompts of a run as its teacher reads them."""

import sys
from dataclasses import replace
from typing import Any

from spmdrl.config.distillation import DistillationConfig
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.engines.build import context_length
from spmdrl.hub.resolve import resolve


def room(cfg: DistillationConfig) -> int:
    """Return the length in tokens of the longest sequence that all teachers accept."""
    trust = cfg.model.trust_remote_code
    paths = [cfg.reference.path, *(each.path for each in cfg.further_teachers().values())]
    return min(*(context_length(resolve(path, trust), trust) for path in paths), cfg.policy.max_tokens_per_microbatch)


def teacher_prompts(
    cfg: DistillationConfig, tokenizer: Any, chat_template: str, student: PromptSet
) -> dict[int, list[int]]:
    """Tokens of the prompts by the index of their row, in the words of `--distill.teacher-template` if there is one.

    tokenizer: the teacher's. chat_template: as `--data.chat-template`; empty: the tokenizer's, and plain text if it has
    none. student: the prompts that the student is asked.

    Raises:
        ValueError: the template does not fit the rows, a column stays out of the teacher's prompts that is in the
            student's, or a prompt is longer than there is room for.
    """
    wanted = {prompt.index for prompt in student.prompts}
    template = cfg.distill.teacher_template
    left = room(cfg) - cfg.rollout.max_new_tokens
    chat = cfg.data.chat if chat_template or getattr(tokenizer, "chat_template", None) else "off"
    data = replace(cfg.data, template=template or cfg.data.template, chat_template=chat_template, chat=chat)
    found = load_prompts(cfg.data.train, data, tokenizer, sys.maxsize, cfg.data.limit, teacher=True)
    odd = [line for line in found.left if line not in student.left]
    if odd and chat != cfg.data.chat:
        raise ValueError(
            f"--reference.path {cfg.reference.path}: in the teacher's prompts {odd[0]}; the student's have it, so take "
            "a teacher with a chat template, or leave the column out of the rows"
        )
    tokens = {prompt.index: prompt.tokens for prompt in found.prompts if prompt.index in wanted}
    if long := sum(len(each) > left for each in tokens.values()):
        flag = "--distill.teacher-template: with it" if template else "--distill.align: as the teacher reads them"
        shorten = "shorten it, or leave" if template else "leave"
        raise ValueError(
            f"{flag} {long} of {len(tokens)} prompts of --data.train are longer than the {left} tokens that the "
            f"teachers' contexts and --policy.max-tokens-per-microbatch leave room for; {shorten} those rows out"
        )
    return tokens
