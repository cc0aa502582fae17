"""Real vLLM samples from prompts with images, measured against transformers; `test_vllm_images.py` holds the bounds.

    python -m tests.engines.vision_probe /tmp/facts qwen2_5_vl qwen3_vl lora

Each scenario is a process of its own, forked where the imports are done. Weights are pushed by the program's own
transfer from its own policy, whose weights transformers' model gets as well.
"""

import importlib
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps

from spmdrl.config.schema import Config
from spmdrl.hub.expand import expand
from spmdrl.hub.images import forward_inputs, load_processor, process_image
from spmdrl.hub.vision import read_vision
from spmdrl.spmd.payload import Payload
from tests.engines.probe import fork_each, outcome, preload, replaced
from tests.unit import vision_models

NEW = 8
FAMILY_OF = {"lora": "qwen2_5_vl"}
"""Scenarios that are not named after their family."""
TEXT = " which of these is it, and how often did you see it before?"


class Probe:
    """One engine, one policy, and transformers' model in float32 and float64."""

    def __init__(self, family: str, cfg: Config):
        from transformers import AutoModelForImageTextToText

        from spmdrl.config.engines import pushed_parts
        from spmdrl.engines.build import build_engine, check_engine
        from spmdrl.policy.fsdp.policy import FsdpPolicy
        from spmdrl.session.transfer import Transfer
        from spmdrl.spmd.mesh import start

        check_engine(cfg, True)
        world = start(cfg.parallel, 1, "cpu", 60.0)
        self.policy: Any = FsdpPolicy(cfg, world, 1, adapt=True)
        self.engine: Any = build_engine(cfg, world, {2})
        self.transfer = Transfer(world, self.policy, self.engine, torch.float32, 1 << 20, pushed_parts(cfg))
        self.world, self.family = world, family
        folder = Path(cfg.model.path)
        self.hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = vision_models.chat_tokenizer(family)
        self.vision = read_vision(self.hf.config, self.tokenizer)
        processor = load_processor(folder, self.vision)
        pictures = vision_models.images(3, seed=4)
        # A mirrored image has the tokens of the first one.
        pictures.append(ImageOps.mirror(pictures[0]))
        self.images = [process_image(processor, picture, self.vision) for picture in pictures]
        self.count = 0

    @torch.no_grad()
    def push(self) -> None:
        """Sends the policy's weights to the engine, and gives them to transformers' model."""
        from spmdrl.weights.experts import Layout

        report = self.transfer.push(self.policy.version)
        assert report.deep, "the engine's memory was compared, the tower's too"
        parameters = dict(self.hf.named_parameters())
        places = Layout(self.hf).places([(name, tuple(p.shape)) for name, p in parameters.items()])
        pieces = {piece.name: piece.tensor for piece in self.policy.pieces()}
        assert pieces.keys() == places.keys(), pieces.keys() ^ places.keys()
        for checkpoint_name, (name, index) in places.items():
            parameters[name][index].copy_(pieces[checkpoint_name])

    @torch.no_grad()
    def change(self, part: str, size: float = 0.2) -> None:
        """Changes the weights whose names hold `part`."""
        generator, seen = torch.Generator().manual_seed(7), 0
        for name, weight in self.policy.named_weights():
            if part in name:
                local = weight.to_local()
                scale = size * local.std().nan_to_num(1).clamp(min=0.1)
                local.add_(scale * torch.randn(local.shape, generator=generator))
                seen += 1
        assert seen, f"no weight of {part}"
        self.policy.version += 1

    def wake(self) -> None:
        """Wakes the engine, with a push where it has no weights."""
        self.engine.wake("weights")
        if self.engine.version != self.policy.version:
            self.push()
        self.engine.wake("kv_cache")

    # ── sampling ─────────────────────────────────────────────────────────────

    def request(self, numbers: tuple[int, ...], temperature: float = 1.0) -> Any:
        """Asks about some of the images, which stand before the text."""
        from spmdrl.engines.engine import Request

        images = tuple(self.images[i] for i in numbers)
        parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": TEXT}]
        words = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        prompt = expand(ids, images, self.vision).ids.tolist()
        self.count += 1
        return Request((self.count,), prompt, self.count, self.policy.version, NEW, temperature, 1.0, images)

    def drain(self, requests: list) -> list:
        """Returns the completions in the order of the requests."""
        for request in requests:
            self.engine.submit(request)
        done: dict = {}
        for _ in range(400):
            done |= {c.key: c for c in self.engine.poll()}
            if len(done) == len(requests):
                return [done[request.key] for request in requests]
        raise RuntimeError("the engine does not end its requests")

    @torch.no_grad()
    def logits(self, hf: Any, prompt: list[int], tokens: list[int], images: tuple[Payload, ...]) -> torch.Tensor:
        """Logits [n, V] of transformers' model at the places of the tokens, as float64."""
        ids = torch.tensor([prompt + tokens])
        given: dict = forward_inputs(images, self.vision)
        given = {name: x.to(hf.dtype) if x.is_floating_point() else x for name, x in given.items()}
        if self.vision.mrope:
            given["mm_token_type_ids"] = (ids == self.vision.image).int()
        return hf(input_ids=ids, use_cache=False, **given).logits[0, len(prompt) - 1 : -1].double()

    def logp(self, hf: Any, request: Any, tokens: list[int]) -> torch.Tensor:
        """Log p of the tokens without placeholders."""
        logits = self.logits(hf, request.prompt, tokens, request.images)
        logits[:, list(self.vision.never)] = -torch.inf
        return (logits / (request.temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def agree(self, asked: list[tuple[int, ...]], temperature: float = 1.0) -> dict:
        """Largest |difference| of the engine's log p, and of transformers' in float32, from those in float64."""
        requests = [self.request(numbers, temperature) for numbers in asked]
        done = self.drain(requests)
        exact = type(self.hf)(self.hf.config).double().eval()
        exact.load_state_dict(self.hf.state_dict())
        engine = torch.tensor([x for c in done for x in c.logp]).double()
        plain, double = (
            torch.cat([self.logp(hf, r, c.tokens) for r, c in zip(requests, done, strict=True)])
            for hf in (self.hf, exact)
        )
        sampled = [c.tokens for c in done]
        return {
            "engine": (engine - double).abs().max().item(),
            "engine_hf": (engine - plain).abs().max().item(),
            "hf": (plain - double).abs().max().item(),
            "spread": double.std().item(),
            "tokens": len(engine),
            "placeholders": sum(token in self.vision.never for tokens in sampled for token in tokens),
            "likelihood of placeholders": max(
                self.logits(self.hf, r.prompt, c.tokens, r.images).softmax(-1)[:, list(self.vision.never)].sum(1).max()
                for r, c in zip(requests, done, strict=True)
            ).item(),
        }


ROWS = [(), (0,), (0, 1), (1,), (2, 0), (2, 2)]
"""Images of the prompts, by number."""


def family(p: Probe, facts: dict) -> None:
    """No, one and two images; caches; changed towers; sleep; placeholders that are likely."""
    p.push()
    facts["towers"] = sum(p.vision.tower.split(".")[-1] in name for name in p.engine.counted)
    facts["rows"] = p.agree(ROWS)
    # The tokens are those of image 0, whose prompt is in the cache of prefixes by now.
    first, mirrored = p.request((0,)), p.request((3,))
    facts["same tokens"] = first.prompt == mirrored.prompt
    other = p.drain([first])[0]
    difference = p.logp(p.hf, first, other.tokens) - p.logp(p.hf, mirrored, other.tokens)
    facts["difference of the images"] = difference.abs().max().item()
    facts["mirrored"], facts["again"] = p.agree([(3,), (0, 3)]), p.agree([(0,), (3,), (3, 0)])
    p.change(p.vision.tower)
    p.push()
    facts["changed tower"] = p.agree([(0,), (2, 0)])
    reset, p.engine.engine.reset_encoder_cache = p.engine.engine.reset_encoder_cache, lambda: None
    p.change(p.vision.tower)
    p.push()
    facts["without reset"] = p.agree([(0,), (2, 0)])
    p.engine.engine.reset_encoder_cache = reset
    p.engine.sleep(1)
    facts["features asleep"] = len(p.engine.runner.encoder_cache)
    p.wake()
    facts["after level 1"] = p.agree([(), (0,), (3, 1)])
    p.engine.sleep(2)
    p.engine.wake("weights")
    facts["version after level 2"] = p.engine.version
    p.wake()
    facts["after level 2"] = p.agree([(), (0,), (3, 1)])
    facts["refusals"] = refusals(p)
    facts["corrupt"] = corrupt(p)
    facts["likely placeholders"] = [likely_placeholders(p, temperature) for temperature in (1.0, 0.0)]


def refusals(p: Probe) -> dict:
    """Requests whose ids and images disagree, and what they leave behind."""
    right = p.request((0, 1))
    cases = {
        "an image too few": replace(right, images=right.images[:1]),
        "without images": replace(right, images=()),
        "not expanded": replace(right, prompt=[p.vision.image, 9, p.vision.image]),
    }
    if p.vision.video is not None:
        cases["video"] = replace(right, prompt=[*right.prompt, p.vision.video])
    told = {name: outcome(lambda request=request: p.engine.submit(request)) for name, request in cases.items()}
    return told | {"left": len(p.engine.partial), "held images": len(p.engine.images.items)}


def corrupt(p: Probe) -> dict:
    """One bit of the tower turns on the way."""
    load, told = p.engine.load, []

    def turned(buckets, version):
        def given():
            for bucket in buckets:
                for name in bucket:
                    if p.vision.tower.split(".")[-1] in name and name.endswith("weight") and not told:
                        bucket[name] = bucket[name].clone()
                        bucket[name].view(-1).view(torch.uint8)[5] ^= 1
                        told.append(name)
                yield bucket

        load(given(), version)

    p.engine.load = turned
    p.policy.version += 1
    facts = {"push": outcome(lambda: p.transfer.push(p.policy.version)), "version": p.engine.version, "name": told}
    p.engine.load = load
    p.push()
    return facts


@torch.no_grad()
def likely_placeholders(p: Probe, temperature: float) -> dict:
    """The head gives placeholders logits that are large, of either sign."""
    p.wake()
    for name, weight in p.policy.named_weights():
        if name == "lm_head.weight":
            weight.to_local()[list(p.vision.never)] *= 30.0
    p.policy.version += 1
    p.push()
    return p.agree([(), (0,), (1,), (0, 1), (2, 2)], temperature)


def lora(p: Probe, facts: dict) -> None:
    """Adapters of the language model, beside a tower without any."""
    p.push()
    facts["before"] = p.agree(ROWS)
    p.change("lora_B", 1.0)
    p.push()
    facts["after"] = p.agree(ROWS)


def measure(name: str, folder: Path) -> None:
    """Runs one scenario in its own process; facts go to `folder`.json, a traceback if it fails."""
    facts: dict = {}
    kind = FAMILY_OF.get(name, name)
    try:
        cfg = replaced(
            Config(),
            run={"dir": str(folder), "device": "cpu", "timeout": 60.0},
            model={"path": str(vision_models.saved(kind, folder / "model"))},
            rollout={"engine": "vllm", "max_prompt_tokens": 300, "max_new_tokens": NEW, "max_sequences": 16},
            lora={"rank": 4} if name == "lora" else {},
        )
        (lora if name == "lora" else family)(Probe(kind, cfg), facts)
        from transformers.utils import is_torchvision_available

        modules = [m for m in sys.modules if m.endswith("image_processing_qwen2_vl") or m.startswith("torchvision")]
        facts["torchvision"] = [is_torchvision_available(), modules]
    except BaseException:
        facts["failed"] = traceback.format_exc()
    folder.with_suffix(".json").write_text(json.dumps(facts))


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:]
    preload()
    importlib.import_module("spmdrl.policy.fsdp.policy")
    fork_each(measure, root, names)


if __name__ == "__main__":
    main()
