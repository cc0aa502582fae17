"""Compares log p of the engine with the trainer's once, after a run's first push, and refuses a model if they differ.

A few prompts of several lengths are sampled together, some of them begun later and ended earlier than others. This
reveals states that leak between the rows of a batch, and wrong attention windows. All ranks of an engine do the same.
"""

import logging
from typing import Any

import torch

from spmdrl.config.engines import engine_name
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.engines.engine import Completion, Engine, Request, longest_sequence
from spmdrl.health.status import tick
from spmdrl.hub.rotary import limits
from spmdrl.hub.routing import FREE
from spmdrl.policy.probe import ordinary_tokens
from spmdrl.session.determinism import generator_states, set_generator_states
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.seeds import generator_for, seed_for
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")

ROWS = ((5, 8), (9, 4), (9, 7), (14, 8))
"""Tokens of each prompt, and of its response."""
BEGUN = 2
"""Rows that the engine begins with; the others join them a step later."""
CHECKED = 0xE6C  # separates these draws from others that are keyed by (seed, number)
EXACT = 1e-3
"""Largest |dlogp| of a token in float32 and above, where right families differ by 1e-4 at most."""
ROUNDED = 0.3
"""Largest mean |dlogp| in 16 bits, where right families show 0.02 to 0.04 and single tokens 0.6."""


def _excluded(cfg: Config, world: World) -> str:
    """Return the setting that excludes the check; empty if it takes place."""
    if not cfg.model.self_check:
        return "--model.no-self-check"
    if world.roles.split:
        return f"--parallel.placement {cfg.parallel.placement}"
    return f"--rollout.quantization {cfg.rollout.quantization}" if cfg.rollout.quantization != "none" else ""


def check_frequencies(cfg: Config, hf_config: Any) -> None:
    """Check that a model's rotary frequencies do not change within a sequence, whose length no sampler knows ahead.

    Raises:
        ValueError: they do; the message names the settings of the longest sequence.
    """
    longest, new = longest_sequence(cfg), cfg.rollout.max_new_tokens
    for kind, limit in limits(hf_config).items():
        if longest > limit:
            raise ValueError(
                f"--rollout.max-prompt-tokens {cfg.rollout.max_prompt_tokens} --rollout.max-new-tokens {new}: the "
                f"rotary embedding of {hf_config.model_type} ({kind}) has other frequencies in sequences of more than "
                f"{limit:,} tokens, so that the end of a response would change the probabilities with which it began; "
                f"let the two add up to {limit:,} at most"
            )


class EngineCheck:
    """The check of one run, in two parts: the engine samples in the rollout phase, the trainer scores in training."""

    def __init__(self, cfg: Config, world: World, policy: Any, engine: Engine | None, experts_width: int):
        """experts_width: columns of `token["experts"]` under routing replay, else 0."""
        self.cfg, self.world, self.policy, self.engine, self.width = cfg, world, policy, engine, experts_width
        self.due, self.sampled = True, torch.empty(0)
        """True until the comparison; the samples of rank 0's engine, see `_packed`."""
        if setting := _excluded(cfg, world):
            self.due = False
            log.info(f"no check of the engine's log p against the trainer's: {setting}")

    def sample(self, version: int) -> None:
        """Sample with the weights of this version, which the engine holds; nothing else may run on it. Collective."""
        if len(self.sampled):
            return
        engine, done = self.engine, {}
        assert engine is not None
        # Engines may draw from them. A resumed run checks again and must then draw as an uninterrupted one.
        generators = generator_states(self.world.device)
        requests = [self._request(i, version) for i in range(len(ROWS))]
        for i, request in enumerate(requests):
            if i == BEGUN:
                done |= {made.key: made for made in engine.poll()}
            engine.submit(request)
        while len(done) < len(requests):
            tick()
            done |= {made.key: made for made in engine.poll()}
        # A resumed run samples its steps as an uninterrupted one, whose engine holds no prefix of these rows.
        engine.reset_prefix_cache()
        set_generator_states(generators, self.world.device)
        self.sampled = _packed(requests, [done[request.key] for request in requests])
        if not self.world.is_first:
            self.sampled.zero_()
        all_reduce(self.sampled, "sum", self.world.host_group)

    def compare(self) -> None:
        """Compare the samples with the policy, which still has their version. Collective.

        Raises:
            ValueError: on every rank, if log p differs by more than rounding.
        """
        if not len(self.sampled):
            return
        policy, self.due = self.policy, False
        batch, theirs = _unpacked(self.sampled, self.width)
        mine = policy.logprobs(batch, 1.0)[0][batch.token["mask"]].double()
        off = (theirs - mine).abs()
        # The numbers of one rank decide for all.
        numbers = torch.stack([off.mean(), off.max()])
        numbers = numbers if self.world.is_first else torch.zeros_like(numbers)
        mean, most = all_reduce(numbers, "sum", self.world.host_group).tolist()
        kind, family, engine = self.cfg.model.dtype, policy.hf_config.model_type, engine_name(self.cfg)
        apart = f"differs from the trainer's by {mean:.2g} in the mean, {most:.2g} at most"
        result = f"log p of {len(off)} sampled tokens {apart}"
        rounds = kind in ("bfloat16", "float16")
        if not (mean <= ROUNDED if rounds else most <= EXACT):
            bound = f"{ROUNDED:g} in the mean" if rounds else f"{EXACT:g}"
            other = "--rollout.engine hf, which computes as transformers does"
            if engine == "hf":
                other = "a model of another family, and report this one"
            raise ValueError(
                f"--rollout.engine {engine}: {family} is not right there in {kind}: {result}, where rounding explains "
                f"{bound}; take {other}; --model.no-self-check leaves this check out"
            )
        log.info(f"check of the engine ({engine}, {family}, {kind}): {result}")

    def _request(self, row: int, version: int) -> Request:
        """Return the request of a row, shortened to the engine's longest sequence."""
        length, new = ROWS[row]
        longest = longest_sequence(self.cfg)
        new = max(1, min(new, longest // 3))
        rng, ordinary = generator_for(CHECKED, row), ordinary_tokens(self.policy.hf_config)
        prompt = [ordinary[rng.randrange(len(ordinary))] for _ in range(min(length, longest - new))]
        return Request((row, 0, 0), prompt, seed_for(CHECKED, row, 0), version, new)


def _packed(requests: list[Request], done: list[Completion]) -> torch.Tensor:
    """Pack samples in float64 [rows, 2 + tokens + log p]: lengths of prompt and response, tokens, then log p."""
    size = max(length + new for length, new in ROWS)
    out = torch.zeros(len(requests), 2 + 2 * size, dtype=torch.float64)
    for row, request, made in zip(out, requests, done, strict=True):
        begin, tokens = len(request.prompt), request.prompt + made.tokens
        row[0], row[1] = begin, len(made.tokens)
        row[2 : 2 + len(tokens)] = torch.tensor(tokens, dtype=torch.float64)
        row[2 + size + begin : 2 + size + len(tokens)] = torch.tensor(made.logp, dtype=torch.float64)
    return out


def _unpacked(sampled: torch.Tensor, experts_width: int) -> tuple[Batch, torch.Tensor]:
    """Return the samples as a batch whose mask has the sampled tokens, and log p of these from the engine."""
    size = (sampled.shape[1] - 2) // 2
    place, begins, lengths = torch.arange(size), sampled[:, :1], sampled[:, :2].sum(1, keepdim=True)
    real, mask = place < lengths, (place >= begins) & (place < lengths)
    token = {"tokens": sampled[:, 2 : 2 + size][real].long(), "mask": mask[real]}
    if experts_width:
        token["experts"] = torch.full((len(token["mask"]), experts_width), FREE, dtype=torch.int16)
    return Batch(lengths[:, 0].long(), token, {}), sampled[:, 2 + size :][mask]
