"""Updates on samples of a prompt with one image, whose features are computed once or once for each sample."""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._vision import Sizes, draw, write_model

MODEL = Sizes(
    text=dict(hidden_size=256, intermediate_size=768, num_hidden_layers=10, num_attention_heads=4)
    | dict(vocab_size=8192, num_key_value_heads=2, max_position_embeddings=1024)
)
"""A random model of 12 million parameters; an image takes 256 tokens."""
RESPONSE = MODEL.tokens // 4
"""Tokens of a response."""
GROUP = 8
SIDES = {"once": True, "prefix": False, "each": False}
"""Sides, with `--policy.share-prompts`. `once` computes the prompt and the features of its image once, `each` computes
both for each sample, and `prefix` the prompt for each sample and the features once."""
NUMBERS = ("entropy/mean", "mismatch/k1", "grad_norm")
"""Results of an update on which all sides must agree: mean entropy, mean log p of the responses up to a constant, and
norm of the gradient. They stand for the loss, which is 0 for all log p, because the samples count as the policy's own
and the advantages of a group add up to 0."""
SAME = 1e-4
"""Maximum relative difference of these numbers."""


class Group:
    """The prompt of a group, with its image."""

    def __init__(self, folder: Path):
        """folder: folder of the model; the image is written there."""
        from spmdrl.hub.tokenizer import load_tokenizer
        from spmdrl.session.image_reader import image_reader

        tokenizer = load_tokenizer(folder)
        reader = image_reader(folder, tokenizer, False)
        assert reader is not None
        (row,) = draw(folder, 1, MODEL.side)
        (self.image,) = reader.read(row["images"], str(folder))
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many circles?"}]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found = reader.expand(tokenizer(text, add_special_tokens=False)["input_ids"], [self.image])
        self.prompt, self.first, self.placeholder = found.ids, found.firsts[0], reader.vision.image

    def batch(self, each: bool) -> Any:
        """Return a packed batch with random responses. each: True if no two samples share the features of the image."""
        import torch

        from spmdrl.data.episode import episode_of
        from spmdrl.data.pack import from_episodes

        rng, episodes = torch.Generator().manual_seed(0), []
        for sample in range(GROUP):
            # Features are computed once for each name.
            image = dataclasses.replace(self.image, name=f"{sample:032x}") if each else self.image
            tokens = torch.cat([self.prompt, torch.randint(3, 250, (RESPONSE,), generator=rng)])
            mask = torch.arange(len(tokens)) >= len(self.prompt)
            logp = torch.where(mask, -9.0, 0.0)
            more: Any = dict(images=((self.first, image),), reward=float(sample % 2))
            episodes.append(episode_of(0, sample, 0, tokens, mask, logp, **more))
        batch = from_episodes(episodes, placeholder=self.placeholder)
        order = torch.arange(GROUP)
        batch.seq |= {"update": order * 0, "work": batch.lengths, "group": order * 0, "seed": order}
        return batch


class Side:
    """A policy, and the update of the group."""

    def __init__(self, folder: Path, group: Group, world: Any, name: str):
        from spmdrl.config.presets import with_preset
        from spmdrl.config.schema import Config
        from spmdrl.policy.fsdp.policy import FsdpPolicy
        from spmdrl.policy.models import Models
        from spmdrl.rl.compose import compose

        cfg = with_preset(Config(), "grpo")
        self.cfg = dataclasses.replace(
            cfg,
            model=dataclasses.replace(cfg.model, path=str(folder), dtype="float32"),
            policy=dataclasses.replace(cfg.policy, share_prompts=SIDES[name], max_tokens_per_microbatch=4096),
            optimizer=dataclasses.replace(cfg.optimizer, lr=1e-5),
        )
        self.world, self.models = world, Models(FsdpPolicy(self.cfg, world, 100))
        self.algo, self.each, self.group = compose(self.cfg), name == "each", group
        self.seconds: list[float] = []
        self.numbers: list[dict[str, float]] = []

    def step(self) -> None:
        """Score and update once, and note the seconds of the update, and NUMBERS."""
        from spmdrl.rl.score import score
        from spmdrl.rl.update import update

        batch, peers = self.group.batch(self.each), self.world.data_peers
        score(batch, self.models, self.algo, self.cfg, peers)
        batch = self.algo.advantages(batch, peers)
        began = time.perf_counter()
        stats = update(batch, self.models, self.algo, self.cfg, 0, peers)
        self.seconds.append(time.perf_counter() - began)
        values = stats.reduce(lambda x, op: x, self.world.device)
        self.numbers.append({name: values[name] for name in NUMBERS})


def measure(repeats: int) -> dict:
    """Return the median seconds of an update on each side, and the ratios, after one that is not counted.

    Raises:
        RuntimeError: the sides differ in NUMBERS.
    """
    from spmdrl.config.schema import ParallelConfig
    from spmdrl.spmd.mesh import start

    world = start(ParallelConfig(), 1, "cpu")
    with tempfile.TemporaryDirectory() as work:
        write_model(Path(work), MODEL)
        group = Group(Path(work))
        sides = {name: Side(Path(work), group, world, name) for name in SIDES}
        for _ in range(repeats + 1):
            for side in sides.values():
                side.step()
    want = sides["each"].numbers
    for name, side in sides.items():
        for a, b in zip(want, side.numbers, strict=True):
            if any(abs(a[key] - b[key]) > SAME * abs(a[key]) for key in a):
                raise RuntimeError(f"the sides `each` and `{name}` differ: {a} and {b}")
    medians = {name: statistics.median(side.seconds[1:]) for name, side in sides.items()}
    return {
        "group": GROUP,
        "image_tokens": MODEL.tokens,
        "response": RESPONSE,
        "seconds": medians,
        "seconds_all": {name: side.seconds[1:] for name, side in sides.items()},
        "numbers": want[-1],
        "ratio": medians["each"] / medians["once"],
        "ratio_prefix": medians["prefix"] / medians["once"],
    }
