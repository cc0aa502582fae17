"""What an engine is: submit, poll, abort; load weights of a version; sleep and wake.

Streaming, so that early stops and many turns need no second path. An engine spans the ranks of one rollout TP group;
all of them make the same calls in the same order and see the same completions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from spmdrl.config.schema import Config
from spmdrl.hub.resolve import resolve
from spmdrl.rollout.needs import Needs
from spmdrl.weights.reshard import Entry

Owner = Literal["weights", "kv_cache"]
Finish = Literal["stop", "length", "abort"]
Key = tuple[int, ...]
"""(position, sample, turn) of a request: names it inside a round."""


class StaleEngineError(RuntimeError):
    """An engine was asked to sample from weights that it does not hold (law 5)."""


@dataclass
class Request:
    """One sample to draw. The seed is keyed by data, so where it runs does not matter (law 3)."""

    key: Key
    prompt: list[int]
    """Prompt tokens."""
    seed: int
    """63 bits."""
    version: int
    """The trainer's weight version; an engine with another refuses."""
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0


@dataclass
class Completion:
    """What came of a request. logp: log p of each token at the request's temperature (at 1 when greedy)."""

    key: Key
    tokens: list[int]
    logp: list[float]
    finish: Finish
    version: int | None
    """Weight version it was sampled from; None: aborted while the weights were being replaced."""
    experts: torch.Tensor | None = None
    """int16 [n, W], where routing is replayed: the experts of each token of prompt and response but the last, layer by
    layer (`hub.routing.Experts`), -1 where a token was not run. None also for one that was cut off where the engine
    tells them at the end."""


class Engine(Protocol):
    """Sampler of one rollout TP group."""

    version: int | None
    """Weight version it holds; None: none that may be sampled from."""
    capacity: int
    """Sequences it runs at a time."""

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            StaleEngineError: its version is not the engine's.
            ValueError: prompt and response may be longer than the engine's longest sequence.
        """
        ...

    def poll(self) -> list[Completion]:
        """Run one step of the engine and return what is done; an empty list while all still runs."""
        ...

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop these requests; their tokens so far come back with finish `abort`."""
        ...

    def needs(self, entries: list[Entry]) -> Needs:
        """Which part of each tensor this rank of the engine reads when it loads them. Collective over the engine."""
        ...

    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Take over weights; sampling is refused until the last bucket is in. Collective over the engine.

        buckets: HF names with tensors that are whole in shape, and filled where `needs` says. They are read only.
        """
        ...

    def sleep(self, level: int) -> None:
        """0: stay; 1: give back the KV cache and park the weights; 2: give back both (version becomes None)."""
        ...

    def wake(self, what: Owner) -> None:
        """Take the memory of `what` back."""
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes held on the device, by owner: engine weights and KV cache."""
        ...

    def held_words(self) -> int | None:
        """Sum of the weight words that `needs` counts (`spmd.checksum.word_sum`), or None if it cannot say."""
        ...

    def close(self) -> None:
        """End of the run."""
        ...


def name_of(key: Key) -> str:
    """The key as a word, which is no beginning of another key's."""
    return "".join(f"{part}." for part in key)


def check_version(request: Request, version: int | None) -> None:
    """The refusal of law 5."""
    if request.version != version:
        held = "no weights" if version is None else f"weight version {version}"
        raise StaleEngineError(
            f"the engine holds {held}, the trainer is at version {request.version}: "
            "push the weights (rollout.transfer.push) before sampling"
        )


def check_device(engine: str, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> int:
    """How many tensors an engine has, all of which must lie on the rank's own device (law 7).

    Raises:
        RuntimeError: one does not. An engine that chose a device by itself may have taken that of another rank.
    """
    places = [(name, tensor.device) for name, tensor in tensors]
    away = [(name, place) for name, place in places if place != device]
    if away:
        name, place = away[0]
        raise RuntimeError(
            f"this rank works on {device}, and its {engine} engine has {len(away)} of {len(places)} tensors elsewhere: "
            f"{name} is on {place}. {engine} took a device by itself, a defect of ours or of a version of it that this "
            "was not written for; --rollout.engine hf keeps to the rank's device"
        )
    return len(places)


def longest_sequence(cfg: Config) -> int:
    """Tokens of prompt and response together that an engine is built for."""
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    config = AutoConfig.from_pretrained(resolve(cfg.model.path, trust), trust_remote_code=trust).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 1 << 30
    return min(cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens, positions)


def kv_bytes_per_token(config: Any, dtype: str, tp: int) -> int:
    """Bytes that one token takes in the KV cache of one of `tp` ranks, heads copied where there are fewer than ranks.

    config: transformers' of a language model; its latent attention has one row for all heads
    (https://arxiv.org/abs/2405.04434), and layers of linear attention keep nothing of a token.
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


def check_length(request: Request, longest: int) -> None:
    """ValueError where an engine would cut a response short without a word, or fail by its own."""
    prompt, new = len(request.prompt), request.max_new_tokens
    if prompt + new > longest:
        raise ValueError(
            f"request {request.key} has {prompt} prompt tokens and asks for up to {new} new ones; the engine's longest "
            f"sequence is {longest}: raise --rollout.max_prompt_tokens or lower --rollout.max_new_tokens (together at "
            "most what the model's positions hold)"
        )
