"""Samples answers from a supervised job's model, with an engine that sleeps during updates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.engines import engine_name
from spmdrl.config.supervised import SupervisedConfig, sampling_run
from spmdrl.data.placeholders import COLUMN
from spmdrl.data.segment import Segment, prompt_segment
from spmdrl.data.template_ends import job_template
from spmdrl.data.tokens import Masked
from spmdrl.engines.build import check_engine, prompt_limit, stop_tokens
from spmdrl.engines.engine import Request
from spmdrl.policy.models import Models
from spmdrl.session.device_table import Memory
from spmdrl.session.engine import sleeping_engine
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.seeds import seed_for

ANSWERS = 0x5F7  # Part of each answer's seed, to make it differ from the seeds of other random draws.


class Generations:
    """Samples the trained model's answers to fixed prompts."""

    def __init__(
        self, session: Session[SupervisedConfig], models: Models, tokenizer: Any, folder: Path, sequences: list[Masked]
    ):
        """Start the engine. Collective.

        sequences: held-out sequences, identical on all ranks. Each sequence provides a prompt. Prompts that are too
        long for the model are skipped.
        """
        cfg, world = session.cfg, session.world
        self.cfg, self.world, self.tokenizer = cfg, world, tokenizer
        run = sampling_run(cfg, str(folder))
        check_engine(run, world.device.type == "cpu")
        session.note(
            f"starting engine {engine_name(run)}, which samples answers (--generate.every {cfg.generate.every})"
        )
        stop = stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
        named = replace(session, cfg=run)  # type: ignore[type-var]
        self.engine = sleeping_engine(named, models, stop)  # type: ignore[arg-type]
        self.memory = Memory(run, models, self.engine, session.timer, world)
        with self.memory.training_phase():
            pass
        longest, pairs = prompt_limit(run, folder, "generate.max_new_tokens"), map(split, sequences)
        self.pairs = [pair for pair in pairs if len(pair[0]) <= longest][: cfg.generate.prompts]
        """For each prompt: (the prompt as a segment, reference answer tokens)."""

    def sample(self, step: int) -> list[dict]:
        """Sample an answer to each prompt, and return the rows for samples.jsonl. Collective.

        Each row has the prompt, the sampled completion and the reference answer from the data. All ranks return the
        same rows.
        """
        settings, engine, rows = self.cfg.generate, self.engine, {}
        with self.memory.rollout_phase():
            version = self.memory.version
            mine = list(enumerate(self.pairs))[self.world.engine_index :: self.world.engine_count]
            for i, (prompt, _) in mine:
                seed = seed_for(self.cfg.run.seed, ANSWERS, i)
                tokens, images = prompt.tokens.tolist(), tuple(image for _, image in prompt.images)
                most, temperature = settings.max_new_tokens, settings.temperature
                engine.submit(Request((i, 0, 0), tokens, seed, version, most, temperature, images=images))
            while len(rows) < len(mine):
                for done in engine.poll():
                    rows[done.key[0]] = self.tokenizer.decode(done.tokens, skip_special_tokens=True)
        with self.memory.training_phase():
            pass
        of_ranks = all_gather_text(json.dumps(rows), self.world.host_group)
        found = {int(i): text for each in of_ranks for i, text in json.loads(each).items()}
        return [
            {
                "step": step,
                "prompt": self.tokenizer.decode(prompt.readable()),
                "completion": found[i],
                "reference": self.tokenizer.decode(reference, skip_special_tokens=True),
            }
            for i, (prompt, reference) in enumerate(self.pairs)
        ]


def split(sequence: Masked) -> tuple[Segment, list[int]]:
    """Return the tokens before a sequence's last trained span with their images, and the tokens in that span."""
    mask, tokens = sequence.mask.tolist(), sequence.tokens.tolist()
    end = len(mask) - mask[::-1].index(True)
    start = end
    while start and mask[start - 1]:
        start -= 1
    images = [(first_placeholder(sequence, begin), image) for image, begin, to in sequence.images if to <= start]
    return prompt_segment(tokens[:start], tuple(images)), tokens[start:end]


def first_placeholder(sequence: Masked, begin: int) -> int:
    """Return the index of the first placeholder from token `begin` on. Marks of tiles may precede it."""
    return begin + int(torch.nonzero(sequence.columns[COLUMN][begin:])[0])
