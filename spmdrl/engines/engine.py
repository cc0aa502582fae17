"""The Engine contract: submit, poll, abort; load weights of a version; sleep and wake.

Engines return each completion as soon as it is finished, so early stopping and multi-turn rollouts need no special
code. An engine spans the ranks of one rollout TP group, which all make the same calls in the same order and get the
same completions. References such as "law 5" are to the numbered design rules in CONTRIBUTING.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from spmdrl.config.judge import judged_tokens
from spmdrl.config.schema import Config
from spmdrl.engines.needs import Needs
from spmdrl.hub.build import sees_images
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import QWEN, TILED, Vision, read_vision
from spmdrl.spmd.payload import Payload
from spmdrl.weights.reshard import Entry
from spmdrl.weights.safetensors import stored

Owner = Literal["weights", "kv_cache"]
Finish = Literal["stop", "length", "abort"]
Key = tuple[int, ...]
"""Identifies a request within a rollout: (position, sample, turn) for policy requests."""


class StaleEngineError(RuntimeError):
    """An engine does not hold the weights that it should sample from (law 5)."""


@dataclass
class Request:
    """A request for one sample.

    The seed depends only on the data, so all engines would draw the same sample (law 3).
    """

    key: Key
    prompt: list[int]
    """Prompt tokens. The placeholders of images are expanded (`hub/expand.py`)."""
    seed: int
    """Sampling seed of the request, from 0 to 2**63 - 1."""
    version: int
    """The trainer's weight version; an engine with a different version rejects the request."""
    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    images: tuple[Payload, ...] = ()
    """Images of the prompt, in the order of their placeholders."""


@dataclass
class Completion:
    """The result of a request. logp: log p of each token at the request's temperature (at temperature 1 if greedy)."""

    key: Key
    tokens: list[int]
    logp: list[float]
    finish: Finish
    version: int | None
    """Weight version that sampled the tokens, or None if the request was aborted by a weight update."""
    experts: torch.Tensor | None = None
    """With routing replay, int16 [n, W]: the W experts that the routers chose, layer by layer (`hub.routing.Experts`),
    for each prompt and response token except the last. Tokens that the model did not process have -1. None without
    routing replay, and for aborted requests if the engine reports experts only for finished requests."""


class Engine(Protocol):
    """The sampler of one rollout TP group."""

    version: int | None
    """Version of the engine's weights, or None if it has no weights to sample from."""
    capacity: int
    """Maximum number of sequences that the engine runs concurrently."""

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            StaleEngineError: the engine's weight version differs from the request's.
            ValueError: prompt and response could exceed the engine's maximum sequence length, or the model cannot read
                the images of the prompt.
        """
        ...

    def poll(self) -> list[Completion]:
        """Run one engine step and return the finished requests, if any."""
        ...

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Abort these requests, and return the tokens sampled so far with finish reason `abort`."""
        ...

    def needs(self, entries: list[Entry]) -> Needs:
        """Return which part of each tensor this rank reads when it loads weights. Collective over the engine."""
        ...

    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Load weights. Requests are rejected until the last bucket is loaded. Collective over the engine.

        buckets: dicts from HF name to full-shape tensor. Only the parts returned by `needs` have values. The engine
        must not modify these tensors.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes. No request may be running. Collective over the engine."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory.

        Level 0 frees nothing. Level 1 frees the KV cache and offloads GPU weights to the host. Level 2 frees both.

        After level 2, or if the engine cannot keep a copy of its weights at level 1, its `version` is None.
        """
        ...

    def wake(self, what: Owner) -> None:
        """Reallocate the weights or the KV cache (`what`) of a sleeping engine."""
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the device memory in use, in bytes, by owner: engine weights and KV cache."""
        ...

    def held_words(self) -> int | None:
        """Return the checksum (`spmd.checksum.word_sum`) of weights marked in `Needs.counted`, or None if unknown."""
        ...

    def close(self) -> None:
        """Shut the engine down at the end of the run."""
        ...


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the most likely tokens at the last positions of a sequence."""

    tokens: list[int]
    count: int
    """Number of trailing tokens to score. The first token of a sequence has no log-probability and cannot be scored."""


Likeliest = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The k most likely tokens at each of n positions, in descending order: their ids, int64 [n, k]; their logp, [n, k];
and the log of the total probability of all other tokens, [n]. All three tensors are on the host."""


class ReadingEngine(Engine, Protocol):
    """An engine that can also compute log-probabilities of existing sequences."""

    def likeliest(self, requests: list[ScoreRequest], k: int, temperature: float, version: int) -> list[Likeliest]:
        """Return the k most likely tokens at each position to score. No other request may be running.

        Collective over the engine.

        Raises:
            StaleEngineError: the engine holds a different version.
        """
        ...


def name_of(key: Key) -> str:
    """Format a key as a string that is not a prefix of any other key's string."""
    return "".join(f"{part}." for part in key)


def check_version(version: int, held: int | None) -> None:
    """Raise StaleEngineError if the engine does not hold the version to sample from (law 5)."""
    if version != held:
        weights = "no weights" if held is None else f"weight version {held}"
        raise StaleEngineError(
            f"the engine holds {weights}, the trainer is at version {version}: "
            "push the weights (rollout.transfer.push) before sampling"
        )


def check_request(
    request: Request, version: int | None, longest: int, vision: Vision | None, awake: bool = True
) -> None:
    """Check that an engine can sample a request.

    version: weight version of the engine. longest: maximum sequence length of the engine. vision: `model_vision`.

    Raises:
        StaleEngineError: the engine holds different weights or none, or it is asleep.
        ValueError: prompt and response could exceed `longest`; the engine would silently truncate the response or fail.
            Or the images of the request are not those that its prompt shows (`check_placeholders`).
    """
    check_version(request.version, version)
    prompt, new = len(request.prompt), request.max_new_tokens
    if prompt + new > longest:
        raise ValueError(
            f"request {request.key} has {prompt} prompt tokens and asks for up to {new} new ones; the engine's longest "
            f"sequence is {longest}: raise --rollout.max-prompt-tokens or lower --rollout.max-new-tokens (their sum is "
            "limited by the model's number of positions)"
        )
    check_placeholders(f"request {request.key}", request.prompt, request.images, vision)
    if not awake:
        raise StaleEngineError("the engine sleeps, and its KV cache is freed: wake it before sampling")


def check_placeholders(name: str, tokens: list[int], images: tuple[Payload, ...], vision: Vision | None) -> None:
    """Raise ValueError unless a sequence has one placeholder token for each feature of its images.

    name: name of the sequence in messages. vision: `model_vision`; without it, any image is refused.
    """
    if vision is None:
        if images:
            raise ValueError(
                f"{name} has {len(images)} images, but the model of --model.path does not read images: take a model of "
                f"type {', '.join([*QWEN, *TILED])}, or prompts without images"
            )
        return
    if vision.video is not None and vision.video in tokens:
        raise ValueError(f"{name} has the placeholder of a video (token {vision.video}): give its frames as images")
    found, wanted = tokens.count(vision.image), sum(image.tokens for image in images)
    if found != wanted:
        raise ValueError(
            f"{name} has {found} placeholders of image features (token {vision.image}), but its {len(images)} images "
            f"have {wanted} features: expand the tokens of a prompt once, with exactly its images (hub.expand.expand), "
            "cut it before an image and never inside, and keep placeholders out of texts"
        )


def check_device(engine: str, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> int:
    """Check that all tensors of an engine are on the rank's device (law 7), and return how many there are.

    Raises:
        RuntimeError: a tensor is on another device. An engine that picks its own device could pick another rank's.
    """
    places = [(name, tensor.device) for name, tensor in tensors]
    away = [(name, place) for name, place in places if place != device]
    if away:
        name, place = away[0]
        raise RuntimeError(
            f"this rank works on {device}, and its {engine} engine has {len(away)} of {len(places)} tensors elsewhere: "
            f"{name} is on {place}. {engine} chose a device itself; this is a defect of spmdrl, or of a version of "
            f"{engine} that spmdrl does not support. --rollout.engine hf uses only the rank's device"
        )
    return len(places)


def model_config(cfg: Config) -> Any:
    """Return the transformers config of the run's model."""
    trust = cfg.model.trust_remote_code
    return read_config(resolve(cfg.model.path, trust), trust)


def model_vision(cfg: Config) -> Vision | None:
    """Return the facts of the run's model, or None if spmdrl gives it no images. Engines call this once, at start."""
    config = model_config(cfg)
    return read_vision(config) if sees_images(config) else None


def longest_sequence(cfg: Config) -> int:
    """Return the maximum sequence length that an engine must support: prompt plus response, or a judge's question plus
    its verdict.

    The length is capped at the model's `max_position_embeddings`.
    """
    positions = getattr(model_config(cfg).get_text_config(), "max_position_embeddings", None) or 1 << 30
    return min(max(cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens, judged_tokens(cfg)), positions)


def without_quantization(config: Any) -> dict[str, Any]:
    """Return config overrides for unquantized weights, because trainers send unquantized weights.

    config: the transformers config of the model folder, whose weight files may be quantized.
    """
    return {"quantization_config": None} if getattr(config, "quantization_config", None) else {}


def tensor_kinds(cfg: Config) -> list[str]:
    """Return the distinct last components of the tensor names in the model folder, such as `weight`."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    return sorted({name.rpartition(".")[2] for _, name in stored(folder)})


def kv_bytes_per_token(config: Any, dtype: str, tp: int) -> int:
    """Return the KV cache size per token, in bytes, on one of `tp` ranks. Each rank has at least one KV head.

    config: the transformers config of a language model. Latent attention caches one row for all heads
    (https://arxiv.org/abs/2405.04434); linear attention layers cache nothing per token.
    """
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds) or config.num_hidden_layers
    if rank := getattr(config, "kv_lora_rank", None):
        width = rank + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = 2 * -(-heads // tp) * head_dim
    return layers * width * (4 if dtype == "float32" else 2)
