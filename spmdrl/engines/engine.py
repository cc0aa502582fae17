"""The Engine contract: submit, poll, abort; load weights of a version; sleep and wake.

Engines stream, so early stops and many turns need no second path. An engine spans the ranks of one rollout TP group;
all of them make the same calls in the same order and get the same completions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from spmdrl.config.judge import judged_tokens
from spmdrl.config.schema import Config
from spmdrl.engines.needs import Needs
from spmdrl.hub.folder import read_config
from spmdrl.hub.resolve import resolve
from spmdrl.weights.reshard import Entry
from spmdrl.weights.safetensors import stored

Owner = Literal["weights", "kv_cache"]
Finish = Literal["stop", "length", "abort"]
Key = tuple[int, ...]
"""(position, sample, turn): identifies a request within a round."""


class StaleEngineError(RuntimeError):
    """An engine does not hold the weights that it should sample from (law 5)."""


@dataclass
class Request:
    """One sample to draw. The seed depends on data, so it does not matter which engine draws it (law 3)."""

    key: Key
    prompt: list[int]
    """Prompt tokens."""
    seed: int
    """Seed of 63 bits."""
    version: int
    """The trainer's weight version; an engine that holds another version refuses the request."""
    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0


@dataclass
class Completion:
    """The result of a request. logp: log p of each token at the request's temperature (at 1 when greedy)."""

    key: Key
    tokens: list[int]
    logp: list[float]
    finish: Finish
    version: int | None
    """Weight version that it was sampled from; None: it was aborted while the weights were replaced."""
    experts: torch.Tensor | None = None
    """int16 [n, W] under routing replay: the experts of each token of prompt and response except the last, layer by
    layer (`hub.routing.Experts`); -1 for a token that did not run. None for an aborted request too, if the engine
    reports experts only at the end."""


class Engine(Protocol):
    """The sampler of one rollout TP group."""

    version: int | None
    """Version of the weights that it holds; None: it holds no weights to sample from."""
    capacity: int
    """Number of sequences that it runs at a time."""

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            StaleEngineError: the request's version is not the engine's.
            ValueError: prompt and response may be longer than the engine's longest sequence.
        """
        ...

    def poll(self) -> list[Completion]:
        """Run one step of the engine and return the finished requests, possibly none."""
        ...

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop these requests; return their tokens so far, with finish `abort`."""
        ...

    def needs(self, entries: list[Entry]) -> Needs:
        """Find the part of each tensor that this rank of the engine reads when it loads. Collective over the engine."""
        ...

    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Load weights; sampling is refused until the last bucket is loaded. Collective over the engine.

        buckets: HF names -> tensors of whole shape, filled in the parts that `needs` returned. They are only read.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes; no request may run. Collective over the engine."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory. 0: nothing; 1: free the KV cache and park the weights; 2: free both (version becomes None)."""
        ...

    def wake(self, what: Owner) -> None:
        """Allocate the memory of `what` again."""
        ...

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the bytes held on the device, by owner: engine weights and KV cache."""
        ...

    def held_words(self) -> int | None:
        """Return the sum of the weight words that `needs` counts (`spmd.checksum.word_sum`), or None if unknown."""
        ...

    def close(self) -> None:
        """Shut the engine down at the end of the run."""
        ...


@dataclass(frozen=True)
class ScoreRequest:
    """A sequence whose last tokens are to be scored."""

    tokens: list[int]
    count: int
    """Number of last tokens to score, without the first token of the sequence."""


Likeliest = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The k likeliest tokens at each of n places, likeliest first, on the host: ids int64 [n, k], logp [n, k], log of the
probability of all others [n]."""


class ReadingEngine(Engine, Protocol):
    """An engine that also computes log-probabilities of existing sequences."""

    def likeliest(self, requests: list[ScoreRequest], k: int, temperature: float, version: int) -> list[Likeliest]:
        """Return the k likeliest tokens at the places of the tokens to score; no other request may run.

        Collective over the engine.

        Raises:
            StaleEngineError: the engine holds another version.
        """
        ...


def name_of(key: Key) -> str:
    """Format a key as a word that is not a prefix of another key's word."""
    return "".join(f"{part}." for part in key)


def check_version(version: int, held: int | None) -> None:
    """Raise StaleEngineError if the version to sample from is not the one that the engine holds (law 5)."""
    if version != held:
        weights = "no weights" if held is None else f"weight version {held}"
        raise StaleEngineError(
            f"the engine holds {weights}, the trainer is at version {version}: "
            "push the weights (rollout.transfer.push) before sampling"
        )


def check_request(request: Request, version: int | None, longest: int, awake: bool = True) -> None:
    """Check that an engine can sample a request. version, longest: the engine's weights and longest sequence.

    Raises:
        StaleEngineError: it holds other weights or none, or it sleeps.
        ValueError: it would cut the response short silently, or fail with an error of its own.
    """
    check_version(request.version, version)
    prompt, new = len(request.prompt), request.max_new_tokens
    if prompt + new > longest:
        raise ValueError(
            f"request {request.key} has {prompt} prompt tokens and asks for up to {new} new ones; the engine's longest "
            f"sequence is {longest}: raise --rollout.max-prompt-tokens or lower --rollout.max-new-tokens (together at "
            "most what the model's positions hold)"
        )
    if not awake:
        raise StaleEngineError("the engine sleeps, and its KV cache is not there: wake it before sampling")


def check_device(engine: str, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> int:
    """Check that an engine's tensors all lie on the rank's own device (law 7); return their number.

    Raises:
        RuntimeError: one does not. An engine that chose a device itself may have taken that of another rank.
    """
    places = [(name, tensor.device) for name, tensor in tensors]
    away = [(name, place) for name, place in places if place != device]
    if away:
        name, place = away[0]
        raise RuntimeError(
            f"this rank works on {device}, and its {engine} engine has {len(away)} of {len(places)} tensors elsewhere: "
            f"{name} is on {place}. {engine} chose a device itself, a defect of ours or of a version of it that this "
            "was not written for; --rollout.engine hf keeps to the rank's device"
        )
    return len(places)


def model_config(cfg: Config) -> Any:
    """Return transformers' config of the run's model."""
    trust = cfg.model.trust_remote_code
    return read_config(resolve(cfg.model.path, trust), trust)


def longest_sequence(cfg: Config) -> int:
    """Return the longest sequence that an engine needs: prompt and response, or a judge's question and verdict."""
    positions = getattr(model_config(cfg).get_text_config(), "max_position_embeddings", None) or 1 << 30
    return min(max(cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens, judged_tokens(cfg)), positions)


def without_quantization(config: Any) -> dict[str, Any]:
    """Return the overrides of a folder's config with which an engine holds its weights as they are pushed.

    config: transformers' config of the folder, whose own files may be quantized.
    """
    return {"quantization_config": None} if getattr(config, "quantization_config", None) else {}


def tensor_kinds(cfg: Config) -> list[str]:
    """Return the last parts of the tensor names in the model's folder, such as `weight`."""
    folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
    return sorted({name.rpartition(".")[2] for _, name in stored(folder)})


def kv_bytes_per_token(config: Any, dtype: str, tp: int) -> int:
    """Return the bytes of one token in the KV cache of one of `tp` ranks; KV heads are copied if there are fewer.

    config: transformers' config of a language model; latent attention has one row for all heads
    (https://arxiv.org/abs/2405.04434), and layers of linear attention cache nothing per token.
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
