"""The Engine contract on vLLM: one engine per rollout TP group, inside the ranks' processes, stepped explicitly.

This file uses vLLM's internals to access the model object, load weights in place and free the KV cache. Other files
adapt its CPU build (`cpu.py`), its process groups (`start.py`) and its LoRA adapters (`lora.py`).
"""

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from spmdrl.config.engines import pushed_parts
from spmdrl.config.schema import Config
from spmdrl.engines.engine import (
    Completion,
    Key,
    Likeliest,
    Owner,
    Request,
    ScoreRequest,
    StaleEngineError,
    check_device,
    check_placeholders,
    check_request,
    check_version,
    longest_sequence,
    model_vision,
    name_of,
    tensor_kinds,
)
from spmdrl.engines.needs import Needs, cannot_load, check_filled, once, unfilled, watched_load
from spmdrl.engines.vllm.copies import Copies, Row
from spmdrl.engines.vllm.images import Images
from spmdrl.engines.vllm.lora import Adapters
from spmdrl.engines.vllm.options import quantizing, refusals_as_warnings
from spmdrl.engines.vllm.read import likeliest
from spmdrl.engines.vllm.start import start_llm
from spmdrl.engines.vllm.vision import clear_features
from spmdrl.health.causes import out_of_memory
from spmdrl.hub.build import DTYPES
from spmdrl.hub.lora import are_adapters
from spmdrl.hub.resolve import resolve
from spmdrl.hub.routing import FREE, experts_of
from spmdrl.spmd.checksum import word_sum
from spmdrl.spmd.storage import Parked, storage_bytes
from spmdrl.spmd.world import World
from spmdrl.weights.reshard import Entry

log = logging.getLogger("spmdrl")


class VLLMEngine:
    """An engine that samples with vLLM. Implements the `Engine` contract of `engines/engine.py`.

    Routing replay was written against the sources of vLLM 0.32. It is untested, because the CPU build reports no
    experts.
    """

    def __init__(self, cfg: Config, world: World, stop_tokens: set[int]):
        self.world, self.cfg, self.dtype = world, cfg.rollout, cfg.model.dtype
        self.counted: list[str] = []
        self.on_cpu = world.device.type == "cpu"
        self.experts: Any = None
        if cfg.rollout.routing_replay:
            if self.on_cpu:
                raise ValueError(
                    "--rollout.routing-replay: vLLM's CPU build does not report which experts it chose (only vLLM's "
                    "Triton model runner does); take --rollout.engine hf"
                )
            self.experts = experts_of(resolve(cfg.model.path, cfg.model.trust_remote_code), cfg.model.trust_remote_code)
        self.capacity, self.longest = cfg.rollout.max_sequences, longest_sequence(cfg)
        self.vision = model_vision(cfg)
        self.stop_tokens = sorted(stop_tokens)
        self.version: int | None = None
        self.partial: dict[str, tuple[Request, list[int], list[float]]] = {}
        self.kv_awake = self.weights_awake = True
        self.kinds = tensor_kinds(cfg)
        self.images = Images(self.vision, DTYPES[self.dtype]) if self.vision else None
        self.llm, self.packed = start_llm(cfg, world, self.experts is not None)
        # The attributes are typed as Any, because vLLM's public types do not cover its internals.
        self.engine: Any = self.llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        held = [*self.model.named_parameters(), *((f"KV cache {i}", x) for i, x in enumerate(self.runner.kv_caches))]
        count = check_device("vllm", held, world.device)
        log.info(f"vllm: {count} parameters and KV caches, all on {world.device}")
        self.copies = Copies(cfg, world) if cfg.rollout.dp > 1 else None
        self.cache: Parked | None = None
        self.weights: Parked | None = None
        self.adapters = Adapters(self.runner, cfg) if "adapter" in pushed_parts(cfg) else None

    @property
    def model(self) -> Any:
        """The model object inside vLLM."""
        return self.runner.model

    def submit(self, request: Request) -> None:
        """Implements `Engine.submit`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_request(request, self.version, self.longest, self.vision, self.kv_awake)
        name = name_of(request.key)
        assert name not in self.partial, f"request {request.key} is running already"
        prompt: Any = {"prompt_token_ids": request.prompt}
        if self.images:
            prompt = self.images.prompt(request.prompt, request.images)
        self.partial[name] = (request, [], [])
        if self.copies and not self.copies.take(name):
            return
        # Seeds have 63 bits, because vLLM stores them as signed 64-bit integers. Greedy sampling needs no seed.
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed if request.temperature else None,
            max_tokens=request.max_new_tokens,
            stop_token_ids=self.stop_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        adapter = self.adapters.request if self.adapters else None
        self.engine.add_request(name, prompt, params, lora_request=adapter)

    def poll(self) -> list[Completion]:
        """Implements `Engine.poll`."""
        done: list[Completion] = []
        if not self.partial:
            return done
        parts = self._step()
        rows: list[Row] = [
            (
                name,
                list(part.token_ids),
                [row[token].logprob for token, row in zip(part.token_ids, part.logprobs, strict=True)],
                part.finish_reason if finished else None,
            )
            for name, (part, finished) in parts.items()
        ]
        for name, more, more_logp, finish in self.copies.exchange(rows) if self.copies else rows:
            request, tokens, logp = self.partial[name]
            tokens.extend(more)
            logp.extend(more_logp)
            if finish:
                self._drop(name)
                rows_of = len(request.prompt) + len(tokens) - 1
                experts = self._routed(parts[name][0], rows_of) if self.experts else None
                done.append(Completion(request.key, tokens, logp, finish, self.version, experts))
        return done

    def _step(self) -> dict[str, tuple[Any, bool]]:
        """Run one vLLM step. Returns each request's output and whether the request is finished."""
        if self.copies and self.copies.idle:
            self.engine.engine_core.execute_dummy_batch()
            return {}
        with nullcontext() if self.on_cpu else refusals_as_warnings():
            return {output.request_id: (output.outputs[0], output.finished) for output in self.engine.step()}

    def _drop(self, name: str) -> bool:
        """Remove a finished request, and return True if the request ran on this rank."""
        del self.partial[name]
        return self.copies.drop(name) if self.copies else True

    def _routed(self, part: Any, rows: int) -> torch.Tensor:
        """Return `Completion.experts` for `rows` tokens. Tokens without experts in vLLM's output get -1."""
        routed = torch.as_tensor(part.routed_experts.astype("int16"))[:rows, list(self.experts.layers)].flatten(1)
        return torch.cat([routed, routed.new_full((rows - len(routed), routed.shape[1]), FREE)])

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Implements `Engine.abort`."""
        names = [name_of(key) for key in keys]
        names = [n for n in names if n in self.partial]
        cut = [self.partial[n] for n in names]
        self.engine.abort_request([n for n in names if self._drop(n)])
        return [Completion(request.key, tokens, logp, "abort", self.version) for request, tokens, logp in cut]

    def likeliest(self, requests: list[ScoreRequest], k: int, temperature: float, version: int) -> list[Likeliest]:
        """Implements `ReadingEngine.likeliest`, only for temperature 1."""
        check_version(version, self.version)
        assert temperature == 1 and not self.partial and not self.copies and not self.adapters
        for request in requests:
            check_placeholders("a sequence to score", request.tokens, (), self.vision)
        return likeliest(self.engine, requests, k)

    def needs(self, entries: list[Entry]) -> Needs:
        """Implements `Engine.needs`."""
        if are_adapters(entry.name for entry in entries):
            assert self.adapters, "adapters are pushed to an engine that was built for them"
            return self.adapters.needs(entries)
        if self.cfg.quantization != "none":
            # vLLM quantizes a layer once all of its weights have arrived, so the reads cannot be recorded.
            return Needs([(i, entry.box) for i, entry in enumerate(entries)], [False] * len(entries), exact=False)
        dtype = DTYPES[self.dtype]
        try:
            needs = watched_load(self._load, ((e.name, e.shape, e.dtype or dtype) for e in entries))
        except Exception as error:  # The family's own code may raise any exception.
            if out_of_memory(error):
                raise
            raise cannot_load("vllm", self.model, error) from error
        check_filled("vllm", unfilled(self.model, needs, self.kinds))
        self.counted = [
            name
            for name, p in self.model.named_parameters()
            if needs.exact and p.untyped_storage().data_ptr() not in needs.uncounted
        ]
        return needs

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors with vLLM's loader."""
        with self.adapters.unwrapped() if self.adapters else nullcontext():
            self.model.load_weights(iter(tensors))

    @torch.no_grad()
    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Implements `Engine.load`."""
        self.version = None
        if self.adapters:
            self.adapters.taken = {}
        with quantizing(self.runner, self.cfg.quantization):
            for bucket in buckets:
                self._load((self.adapters.take(bucket) if self.adapters else bucket).items())
        if self.adapters:
            self.adapters.install()
        if self.packed:
            self.packed.clear()
        self.reset_prefix_cache()
        self.version = version

    def reset_prefix_cache(self) -> None:
        """Implements `Engine.reset_prefix_cache`, also for features of images. Without a reset, vLLM would reuse
        prefixes and features computed with older weights.

        Raises:
            StaleEngineError: vLLM cannot drop the prefixes, because a request is using part of the cache.
        """
        # On GPU, the step in progress may still hold aborted requests, which the next step releases.
        for _ in range(2):
            if self.llm.reset_prefix_cache():
                # Features of the current weights are computed again; dropping them is cheap, and sleep frees them.
                if self.images:
                    self.engine.reset_encoder_cache()
                return
            if not self.partial and not self.copies:
                self.engine.step()
        raise StaleEngineError(
            "vLLM keeps prefixes that it cached with other weights, because running requests "
            f"({len(self.partial)}) use its KV cache; abort them before weights are loaded"
        )

    def sleep(self, level: int) -> None:
        """Implements `Engine.sleep`."""
        if self.partial:
            self.abort([request.key for request, _, _ in list(self.partial.values())])
        if level == 2:
            # Level 2 also drops the version of an engine that is already asleep at level 1.
            self.version = None
            if self.on_cpu and not self.weights:
                self.weights = Parked(self.model.parameters(), "gone", self.world.device)
                assert self.packed
                self.packed.clear()
        if level == 0 or not self.kv_awake:
            return
        self.reset_prefix_cache()
        self.kv_awake = False
        if self.on_cpu:
            # vLLM's sleep mode only supports GPUs. On CPU the weights are already in host memory, so level 1 frees only
            # the cache.
            self.cache = Parked(self.runner.kv_caches, "gone", self.world.device)
        else:
            self.llm.sleep(level=level)
            self.weights_awake = False

    def wake(self, what: Owner) -> None:
        """Implements `Engine.wake`."""
        if what == "weights":
            if self.weights:
                self.weights.bring_back()
                self.weights = None
            if not self.weights_awake:
                self.llm.wake_up(tags=["weights"])
                clear_features(self.model)
                self.weights_awake = True
        if what == "kv_cache" and not self.kv_awake:
            if self.cache:
                self.cache.bring_back()
                self.cache = None
                for tensor in self.runner.kv_caches:
                    tensor.zero_()
            else:
                self.llm.wake_up(tags=["kv_cache"])
            self.kv_awake = True

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Engine.bytes_by_owner`.

        On GPU, vLLM's sleep mode unmaps memory without changing storage sizes, so sleeping storages are not counted.
        """
        device, adapters = self.world.device.type, self.adapters.buffers() if self.adapters else []
        weights = storage_bytes([*self.model.parameters(), *adapters], device) if self.weights_awake else 0
        return {
            "engine weights": weights + (self.packed.bytes if self.packed else 0),
            "KV cache": storage_bytes(self.runner.kv_caches, device) if self.kv_awake else 0,
        }

    def held_words(self) -> int | None:
        """Implements `Engine.held_words`."""
        if not self.counted or self.weights:
            return None
        parameters = dict(self.model.named_parameters())
        words = word_sum(once(parameters[name] for name in self.counted))
        return (words + (self.adapters.words() if self.adapters else 0)) % (1 << 64)

    def close(self) -> None:
        """Implements `Engine.close`. vLLM's shutdown destroys the default process group, so call this last."""
        self.engine.engine_core.shutdown()
