"""vLLM inside the training process, one engine per rollout TP group, driven step by step.

All the ways in which vLLM's internals are touched stand in this file: where the model object is, how weights are
loaded in place, and how a CPU build gives its KV cache back.
"""

import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.policy.contract import Bucket
from spmdrl.policy.load import resolve
from spmdrl.policy.weights import word_sum
from spmdrl.rollout.engine import Completion, Owner, Request, StaleEngineError, check_version
from spmdrl.rollout.transfer import verified
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.mesh import World

log = logging.getLogger("spmdrl")

CPU_KV_BYTES = 256 << 20
"""Most that an engine on a CPU takes for its KV cache unless told otherwise."""
CPU_BLOCK = 128
"""Tokens in one KV block of vLLM's CPU build."""


def _environment(device: torch.device) -> None:
    """What vLLM reads from the environment at import; a user's own values stay."""
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if device.type == "cpu":
        # No core pinning: every rank of a node would take the same cores. Sampling's small compiled helper costs
        # more to build than it saves.
        values |= {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _keep_plain_linears() -> None:
    """Keep weights loadable in place: the CPU build would pack them into oneDNN's layout and drop the originals."""
    import vllm.model_executor.layers.utils as layer_utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = plain


def _name_shared_memory(token: str) -> list[str]:
    """Give the shared memory of a CPU build's TP group a name of this run's own; returns the names as they are made.

    vLLM names it after its rendezvous, which under an external launcher is the same for every job on the machine: a
    second job, or one after a job that was killed, finds the name taken and cannot start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, made = _CPUSHMDistributed.make_group_name, []

    def named(communicator) -> str:
        made.append(f"spmdrl-{token}-{original(communicator).strip('/-')}")
        return made[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    return made


def cpu_kv_bytes(config, sequences: int, longest: int, dtype: str) -> int:
    """Bytes of KV cache that hold `sequences` sequences of `longest` tokens in whole blocks, at most CPU_KV_BYTES.

    What is not allocated is not cleared at every wake.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * (4 if dtype == "float32" else 2)
    blocks = sequences * -(-longest // CPU_BLOCK) + 8
    return min(CPU_KV_BYTES, blocks * CPU_BLOCK * per_token)


class VLLMEngine:
    """The Engine contract (`engine.py`) on vLLM."""

    def __init__(self, cfg: Config, world: World, stop_tokens: set[int]):
        self.world, self.cfg = world, cfg.rollout
        self.on_cpu = world.device.type == "cpu"
        self.capacity = cfg.rollout.max_sequences
        self.stop_tokens = sorted(stop_tokens)
        self.version: int | None = None
        self.partial: dict[str, tuple[Request, list[int], list[float]]] = {}
        self.kv_awake = self.weights_awake = True
        _environment(world.device)
        # vLLM reseeds torch and rewrites LOCAL_WORLD_SIZE; both belong to the run.
        rng, local_world = torch.get_rng_state(), os.environ.get("LOCAL_WORLD_SIZE")
        shared = []
        if self.on_cpu and cfg.rollout.tp > 1:
            shared = _name_shared_memory(all_gather_text(secrets.token_hex(8), world.host_group)[0])
        self.llm = self._build(cfg)
        for name in set(shared):
            # All ranks of the group have mapped it: without a name it goes with the last of them, however that ends.
            Path(f"/dev/shm/{name}_{world.engine_tp_rank}").unlink(missing_ok=True)
        torch.set_rng_state(rng)
        if local_world is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world
        # Any: below here is vLLM's inside, which its public types do not describe.
        self.engine: Any = self.llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        self.kv_bytes: dict[int, tuple] = {}

    def _build(self, cfg: Config):
        if self.on_cpu:
            _keep_plain_linears()
        from transformers import AutoConfig
        from vllm import LLM

        folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.model.trust_remote_code).get_text_config()
        longest = min(
            cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens,
            getattr(config, "max_position_embeddings", 1 << 30),
        )
        kv_bytes = int(cfg.rollout.kv_cache_gib * 2**30)
        if not kv_bytes and self.on_cpu:
            kv_bytes = cpu_kv_bytes(config, self.capacity, longest, cfg.model.dtype)
        options: dict[str, Any] = {"kv_cache_memory_bytes": kv_bytes} if kv_bytes else {}
        if not self.on_cpu:
            options |= {
                "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization,
                "enable_sleep_mode": cfg.rollout.sleep_level > 0,
            }
        if cfg.rollout.tp > 1:
            options["distributed_executor_backend"] = "external_launcher"
        try:
            return LLM(
                model=str(folder),
                dtype=cfg.model.dtype,  # pyright: ignore[reportArgumentType]
                tensor_parallel_size=cfg.rollout.tp,
                seed=0,
                enforce_eager=cfg.rollout.enforce_eager or self.on_cpu,
                skip_tokenizer_init=True,
                max_model_len=longest,
                max_num_seqs=self.capacity,
                logprobs_mode="processed_logprobs",
                trust_remote_code=cfg.model.trust_remote_code,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        except Exception as error:
            raise RuntimeError(
                f"vLLM could not start for {cfg.model.path}: {error}. Try --rollout.engine hf, or lower "
                "--rollout.max_sequences, --rollout.kv_cache_gib, --rollout.tp"
            ) from error

    @property
    def model(self) -> Any:
        """vLLM's own model object."""
        return self.runner.model

    def submit(self, request: Request) -> None:
        """See the contract."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_version(request, self.version)
        if not self.kv_awake:
            raise StaleEngineError("the engine sleeps, and its KV cache is not there: wake it before sampling")
        name = f"{request.key[0]}.{request.key[1]}"
        assert name not in self.partial, f"request {request.key} is running already"
        # torch's generators take 63 bits, vLLM's field is checked as a signed 64-bit one. Greedy draws nothing.
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
        self.engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
        self.partial[name] = (request, [], [])

    def poll(self) -> list[Completion]:
        """See the contract."""
        done: list[Completion] = []
        if not self.engine.has_unfinished_requests():
            return done
        for output in self.engine.step():
            name, part = output.request_id, output.outputs[0]
            request, tokens, logp = self.partial[name]
            tokens.extend(part.token_ids)
            logp.extend(row[token].logprob for token, row in zip(part.token_ids, part.logprobs, strict=True))
            if output.finished:
                del self.partial[name]
                done.append(Completion(request.key, tokens, logp, part.finish_reason, self.version))
        return done

    def abort(self, keys: Iterable[tuple[int, int]]) -> list[Completion]:
        """See the contract."""
        names = [f"{k[0]}.{k[1]}" for k in keys]
        names = [n for n in names if n in self.partial]
        self.engine.abort_request(names)
        cut = [self.partial.pop(n) for n in names]
        return [Completion(request.key, tokens, logp, "abort", self.version) for request, tokens, logp in cut]

    @torch.no_grad()
    def load(self, buckets: Iterable[Bucket], version: int) -> None:
        """See the contract."""
        self.version = None
        for bucket in buckets:
            self.model.load_weights(iter(verified(bucket).items()))
        # Cached prefixes belong to the old weights, and nothing else would tell.
        self.llm.reset_prefix_cache()
        self.version = version

    def sleep(self, level: int) -> None:
        """See the contract."""
        if self.partial:
            self.abort([request.key for request, _, _ in list(self.partial.values())])
        if level == 2:
            # Also when it sleeps at level 1 already.
            self.version = None
        if level == 0 or not self.kv_awake:
            return
        self.llm.reset_prefix_cache()
        if self.on_cpu:
            self._release_cpu_cache()
        else:
            self.llm.sleep(level=level)
            self.weights_awake = False
        self.kv_awake = False

    def _release_cpu_cache(self) -> None:
        """Really free the cache: every alias of its storages stays valid at size zero."""
        self.kv_bytes = {}
        for tensor in self.runner.kv_caches:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self.kv_bytes[id(storage)] = (storage, storage.nbytes())
                storage.resize_(0)

    def wake(self, what: Owner) -> None:
        """See the contract."""
        if what == "weights" and not self.weights_awake:
            self.llm.wake_up(tags=["weights"])
            self.weights_awake = True
        if what == "kv_cache" and not self.kv_awake:
            if self.on_cpu:
                for storage, size in self.kv_bytes.values():
                    storage.resize_(size)
                for tensor in self.runner.kv_caches:
                    tensor.zero_()
            else:
                self.llm.wake_up(tags=["kv_cache"])
            self.kv_awake = True

    def bytes_by_owner(self) -> dict[str, int]:
        """See the contract."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters()) if self.weights_awake else 0
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.runner.kv_caches)}
        return {"engine weights": weights, "KV cache": sum(storages.values()) if self.kv_awake else 0}

    def held_words(self) -> int | None:
        """See the contract. A TP shard holds a part, so only whole engines answer."""
        return word_sum(self.model.parameters()) if self.cfg.tp == 1 else None

    def close(self) -> None:
        """See the contract. vLLM's shutdown destroys the default process group: this is the run's last call."""
        self.engine.engine_core.shutdown()
