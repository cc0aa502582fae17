"""Compares engine and trainer log p before a job's first update, and rejects an engine that differs.

Responses to a few prompts of different lengths are sampled in one batch, with staggered starts and ends. This batch
reveals state that leaks between rows, and wrong attention windows. All ranks of an engine sample the same tokens.
"""

import logging
import math
from functools import cached_property
from typing import Any

import torch

from spmdrl.config.engines import engine_name
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.placeholders import with_images
from spmdrl.engines.engine import Completion, Engine, Request, longest_sequence
from spmdrl.health.status import tick
from spmdrl.hub.rotary import limits
from spmdrl.hub.routing import FREE
from spmdrl.policy.probe import ordinary_tokens
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.generators import unchanged_generators
from spmdrl.spmd.payload import Payload
from spmdrl.spmd.seeds import generator_for, seed_for
from spmdrl.spmd.world import World

log = logging.getLogger("spmdrl")

ROWS = ((5, 8), (9, 4), (9, 7), (14, 8))
"""(number of prompt tokens, number of response tokens) for each row of the batch."""
PIXELS = (32, 48, 3)
"""Height, width and colors of the image that the last row shows, if the model reads images."""
BEGUN = 2
"""Number of rows that the engine starts with; the others join the batch one step later."""
CHECKED = 0xE6C  # seed constant that keeps the check's random draws distinct from all others
EXACT = 1e-3
"""Maximum per-token log p difference in float32 and float64; correct models differ by at most 1e-4."""
ROUNDED = 0.3
"""Maximum mean log p difference in 16-bit dtypes; correct models show 0.02 to 0.04, and up to 0.6 on single tokens."""


def _excluded(cfg: Config, world: World) -> str:
    """Return the setting that disables the check; empty if the check is enabled."""
    if not cfg.model.self_check:
        return "--model.no-self-check"
    if world.roles.split:
        return f"--parallel.placement {cfg.parallel.placement}"
    return f"--rollout.quantization {cfg.rollout.quantization}" if cfg.rollout.quantization != "none" else ""


def check_frequencies(cfg: Config, hf_config: Any) -> None:
    """Check that a model's rotary frequencies are the same for all sequence lengths that can occur in the run.

    Some models switch frequencies in sequences longer than a limit, and a sampler cannot know in advance if a response
    will exceed this limit.

    Raises:
        ValueError: sequences can exceed such a limit.
    """
    longest, new = longest_sequence(cfg), cfg.rollout.max_new_tokens
    for kind, limit in limits(hf_config).items():
        if longest > limit:
            raise ValueError(
                f"--rollout.max-prompt-tokens {cfg.rollout.max_prompt_tokens} --rollout.max-new-tokens {new}: the "
                f"rotary embedding of {hf_config.model_type} ({kind}) has other frequencies in sequences of more than "
                f"{limit:,} tokens, so the end of a long response would change the probabilities of its beginning; "
                f"choose values with a sum of at most {limit:,}"
            )


class EngineCheck:
    """Checks an engine, which samples in the rollout phase. The trainer compares log p in the training phase."""

    def __init__(
        self,
        cfg: Config,
        world: World,
        policy: Any,
        engine: Engine | None,
        experts_width: int,
        images: ImageReader | None = None,
    ):
        """Create the check.

        experts_width: number of columns of `token["experts"]`, or 0 without routing replay. images: reads images; None
        if the prompts of the run show none. Otherwise the last row shows an image.
        """
        self.cfg, self.world, self.policy, self.engine, self.width = cfg, world, policy, engine, experts_width
        self.images = images
        self.due, self.sampled = True, torch.empty(0)
        """`due` is True until the comparison is done; `sampled` holds the samples of rank 0's engine, packed by
        `_packed`."""
        if setting := _excluded(cfg, world):
            self.due = False
            log.info(f"no check of the engine's log p against the trainer's: {setting}")

    def sample(self, version: int) -> None:
        """Sample the responses for `ROWS`. The engine must be idle and hold the weights of `version`. Collective."""
        if len(self.sampled):
            return
        engine, done = self.engine, {}
        assert engine is not None
        # Engines may draw from the global random number generators, and a resumed run repeats this check.
        with unchanged_generators(self.world.device):
            requests = [self._request(i, version) for i in range(len(ROWS))]
            for i, request in enumerate(requests):
                if i == BEGUN:
                    done |= {made.key: made for made in engine.poll()}
                engine.submit(request)
            while len(done) < len(requests):
                tick()
                done |= {made.key: made for made in engine.poll()}
            # A resumed run must sample like an uninterrupted run, whose engine has not cached the prefixes of these
            # rows.
            engine.reset_prefix_cache()
        self.sampled = _packed(requests, [done[request.key] for request in requests])
        if not self.world.is_first:
            self.sampled.zero_()
        all_reduce(self.sampled, "sum", self.world.host_group)

    def compare(self) -> None:
        """Compare the engine's log p of the samples with the policy's log p. Collective.

        The policy must still have the weights that the engine sampled with.

        Raises:
            ValueError: log p differs by more than rounding error. Every rank raises it.
        """
        if not len(self.sampled):
            return
        policy, self.due = self.policy, False
        batch, theirs = _unpacked(self.sampled, self.width)
        batch = self._seen(batch)
        mine = policy.logprobs(batch, 1.0)[0][batch.token["mask"]].double()
        off = (theirs - mine).abs()
        # All ranks decide based on rank 0's numbers.
        numbers = torch.stack([off.mean(), off.max()])
        numbers = numbers if self.world.is_first else torch.zeros_like(numbers)
        mean, most = all_reduce(numbers, "sum", self.world.host_group).tolist()
        kind, family, engine = self.cfg.model.dtype, policy.hf_config.model_type, engine_name(self.cfg)
        apart = f"differs from the trainer's by {mean:.2g} on average, {most:.2g} at most"
        result = f"log p of {len(off)} sampled tokens {apart}"
        rounds = kind in ("bfloat16", "float16")
        if not (mean <= ROUNDED if rounds else most <= EXACT):
            bound = f"a mean of {ROUNDED:g}" if rounds else f"{EXACT:g}"
            other = "--rollout.engine hf, which uses transformers"
            if engine == "hf":
                other = "a model of another family, and report this problem"
            raise ValueError(
                f"--rollout.engine {engine} computes {family} wrongly in {kind}: {result}, but rounding explains at "
                f"most {bound}; use {other}; --model.no-self-check switches off this check"
            )
        log.info(f"check of the engine ({engine}, {family}, {kind}): {result}")

    def _request(self, row: int, version: int) -> Request:
        """Return the request for a row of `ROWS`, truncated to the engine's maximum sequence length."""
        length, new = ROWS[row]
        longest = longest_sequence(self.cfg)
        new = max(1, min(new, longest // 3))
        rng, ordinary = generator_for(CHECKED, row), ordinary_tokens(self.policy.hf_config)
        prompt = [ordinary[rng.randrange(len(ordinary))] for _ in range(min(length, longest - new))]
        images: tuple[Payload, ...] = ()
        if self.shown and row == len(ROWS) - 1:
            assert self.images
            shown = self.images.expand([*prompt[:1], self.images.vision.image, *prompt[1:]], [self.shown]).ids.tolist()
            if len(shown) + new <= longest:
                prompt, images = shown, (self.shown,)
        return Request((row, 0, 0), prompt, seed_for(CHECKED, row, 0), version, new, images=images)

    @cached_property
    def shown(self) -> Payload | None:
        """The image that the last row shows, of random pixels that are the same on every rank."""
        if not self.images:
            return None
        rng = generator_for(CHECKED, len(ROWS))
        pixels = torch.tensor(list(rng.randbytes(math.prod(PIXELS))), dtype=torch.uint8).view(PIXELS)
        return self.images.read([pixels.numpy()], "")[0]

    def _seen(self, batch: Batch) -> Batch:
        """Return the batch of samples with the images that their requests showed."""
        if not self.images or not self.shown:
            return batch
        placeholder, rows = self.images.vision.image, batch.token["tokens"].split(batch.lengths.tolist())
        return with_images(batch, [(self.shown,) if placeholder in row else () for row in rows], placeholder)


def _packed(requests: list[Request], done: list[Completion]) -> torch.Tensor:
    """Pack samples into float64 [rows, 2 + 2 * longest]: prompt and response lengths, tokens, per-token log p."""
    size = max(len(request.prompt) + request.max_new_tokens for request in requests)
    out = torch.zeros(len(requests), 2 + 2 * size, dtype=torch.float64)
    for row, request, made in zip(out, requests, done, strict=True):
        begin, tokens = len(request.prompt), request.prompt + made.tokens
        row[0], row[1] = begin, len(made.tokens)
        row[2 : 2 + len(tokens)] = torch.tensor(tokens, dtype=torch.float64)
        row[2 + size + begin : 2 + size + len(tokens)] = torch.tensor(made.logp, dtype=torch.float64)
    return out


def _unpacked(sampled: torch.Tensor, experts_width: int) -> tuple[Batch, torch.Tensor]:
    """Return the samples as a batch whose mask selects the sampled tokens, and the engine's log p for these tokens."""
    size = (sampled.shape[1] - 2) // 2
    place, begins, lengths = torch.arange(size), sampled[:, :1], sampled[:, :2].sum(1, keepdim=True)
    real, mask = place < lengths, (place >= begins) & (place < lengths)
    token = {"tokens": sampled[:, 2 : 2 + size][real].long(), "mask": mask[real]}
    if experts_width:
        token["experts"] = torch.full((len(token["mask"]), experts_width), FREE, dtype=torch.int16)
    return Batch(lengths[:, 0].long(), token, {}), sampled[:, 2 + size :][mask]
