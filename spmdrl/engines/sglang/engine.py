"""The Engine contract on SGLang: one server process per rollout TP group, started by the group's first rank.

SGLang always runs its schedulers as processes and pins a different version of torch. The engine is therefore a child
process (`server/`) with its own interpreter, installed by `launch/install.sh --sglang`. The group's first rank
exchanges messages with this process and broadcasts the answers, so all ranks make the same calls and get the same
completions.
"""

import json
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from spmdrl.config.engines import sglang_python, sleep_level, starts_empty
from spmdrl.config.schema import Config
from spmdrl.engines.engine import (
    Completion,
    Key,
    Owner,
    Request,
    check_request,
    longest_sequence,
    model_vision,
    name_of,
    tensor_kinds,
)
from spmdrl.engines.needs import Needs, check_filled
from spmdrl.engines.sglang.options import options
from spmdrl.engines.sglang.process import EngineDiedError, Process, answers
from spmdrl.engines.sglang.transport import Broadcast, SharedMemory
from spmdrl.hub.build import DTYPES
from spmdrl.hub.resolve import resolve
from spmdrl.spmd.exchange import all_gather_text, broadcast_text
from spmdrl.spmd.mesh import apart_from_default
from spmdrl.spmd.world import World
from spmdrl.weights.reshard import Box, CorruptWeightsError, Entry

NOT_TAKEN = "; the engine keeps no version and will not sample"
POLL_SECONDS = 0.02
"""Maximum number of seconds that a poll waits for a request to finish."""


def cut_short(completion: Completion) -> Completion:
    """Mark a completion as aborted, dropping its last token if the request finished before the abort.

    The caller may resume an aborted request later, so at least one token must be left to sample.
    """
    if completion.finish != "abort":
        completion.tokens, completion.logp, completion.finish = completion.tokens[:-1], completion.logp[:-1], "abort"
    return completion


class SGLangEngine:
    """An engine that samples with SGLang. Implements the `Engine` contract of `engines/engine.py`."""

    def __init__(self, cfg: Config, world: World, stop_tokens: set[int]):
        self.world, self.cfg, self.dtype = world, cfg.rollout, cfg.model.dtype
        self.on_cpu = world.device.type == "cpu"
        self.keeps_weights = sleep_level(cfg, self.on_cpu) == 1
        self.capacity, self.longest = cfg.rollout.max_sequences, longest_sequence(cfg)
        self.vision = model_vision(cfg)
        self.version: int | None = None
        self.empty, self.kinds = starts_empty(cfg), tensor_kinds(cfg)
        self.asleep: set[str] = set()
        self.running: dict[str, Key] = {}
        # On CPU, rounding depends on the other requests in a batch, and the scheduler batches whatever has arrived. A
        # deterministic run therefore sends requests in waves: each wave is one message, sent once the previous wave has
        # finished.
        self.in_waves = cfg.run.deterministic and self.on_cpu
        self.wave: list[dict] = []
        self.backlog: list[Completion] = []
        self.group = self._engine_group(cfg)
        self.process: Process | None = None
        self.transport: SharedMemory | Broadcast = SharedMemory()
        if cfg.rollout.sglang_push == "broadcast":
            self.transport = Broadcast(cfg.engine_ranks, "gloo" if self.on_cpu else "nccl", cfg.run.timeout)
        if world.engine_tp_rank == 0:
            python = sglang_python()
            assert python is not None, "checked with the other settings"
            folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
            config = {"options": options(cfg, world, folder), "stop": sorted(stop_tokens)}
            try:
                self.process = Process(python, config, cfg.run.timeout)
            except (RuntimeError, OSError) as error:
                raise RuntimeError(
                    f"SGLang could not start for {cfg.model.path}: {error}. Try --rollout.engine hf, or other "
                    "values of --rollout.max-sequences, --rollout.kv-cache-gib, --rollout.tp"
                ) from error
        facts = self._answer(self.process.facts if self.process else None)
        self.held = dict(zip(("weights", "kv_cache"), facts, strict=True))
        self.parts: dict[str, list[Box]] = {}

    def _engine_group(self, cfg: Config) -> dist.ProcessGroup | None:
        """Create the gloo process group of this engine's ranks. Collective over the sampling ranks."""
        if cfg.engine_ranks == 1:
            return None
        hosts = dict(
            zip(self.world.roles.samplers, all_gather_text(os.uname().nodename, self.world.rollout_group), strict=True)
        )
        mine = None
        for ranks in self.world.rollout_mesh.mesh.tolist():
            if len({hosts[r] for r in ranks}) > 1:
                raise ValueError(f"--rollout.tp {cfg.rollout.tp}: the ranks of an SGLang engine must share a node")
            # Each group is created by its members alone, because ranks without an engine do not run this code.
            limit = timedelta(seconds=cfg.run.timeout)
            with apart_from_default():
                group = dist.new_group(ranks, backend="gloo", timeout=limit, use_local_synchronization=True)
            mine = group if self.world.rank in ranks else mine
        return cast(dist.ProcessGroup, mine)

    def _share(self, value: Any) -> Any:
        """Broadcast the first rank's value to all ranks, as JSON. Collective over the engine."""
        return value if self.group is None else json.loads(broadcast_text(json.dumps(value), self.group))

    def _answer(self, answer: list[int] | None) -> list[int]:
        """Return the answer of this rank's scheduler process. Collective over the engine.

        answer: on the engine's first rank, the answers of all scheduler processes. Ignored on other ranks.
        """
        return answers(self._share(answer))[self.world.engine_tp_rank]

    def submit(self, request: Request) -> None:
        """Implements `Engine.submit`."""
        check_request(request, self.version, self.longest, self.vision, not self.asleep)
        if request.images:
            raise ValueError("--rollout.engine sglang samples prompts without images: take --rollout.engine hf or vllm")
        # SGLang aborts all requests whose names start with the given string, so no name may be a prefix of another.
        name = name_of(request.key)
        assert name not in self.running, f"request {request.key} is running already"
        self.running[name] = request.key
        if self.process:
            self.wave.append(
                {
                    "id": name,
                    "prompt": request.prompt,
                    "seed": request.seed,
                    "new": request.max_new_tokens,
                    "temperature": request.temperature,
                    "top_p": request.top_p,
                }
            )
            if not self.in_waves:
                self._send_wave()

    def _send_wave(self) -> None:
        """Send the submitted requests to the scheduler in one message."""
        if self.process and self.wave:
            self.process.send("generate", requests=self.wave)
            self.wave = []

    def _finished(self) -> list[Completion]:
        """Return, on every rank, the completions that the first rank received. Collective over the engine."""
        done = []
        if self.process:
            if self.process.failed:
                raise RuntimeError(f"SGLang: {self.process.failed[0]}")
            done, self.process.done = self.process.done, []
        return [
            Completion(self.running.pop(line["done"]), line["tokens"], line["logp"], line["finish"], self.version)
            for line in self._share(done)
        ]

    def poll(self) -> list[Completion]:
        """Implements `Engine.poll`. Waits at most POLL_SECONDS for a completion while the server samples."""
        backlog, self.backlog = self.backlog, []
        if not self.running:
            return backlog
        if self.process:
            if len(self.wave) == len(self.running):
                self._send_wave()
            line = self.process.take(0 if backlog or self.process.done else POLL_SECONDS)
            if line is not None:
                raise RuntimeError(f"SGLang: {line.get('error', line)}")
        return backlog + self._finished()

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Implements `Engine.abort`."""
        keys = set(keys)
        names = [name for name, key in self.running.items() if key in keys]
        if not names:
            return []
        self._send_wave()
        if self.process:
            self.process.call("abort", ids=names)
        done = self._finished()
        self.backlog += [c for c in done if c.key not in keys]
        return [cut_short(c) for c in done if c.key in keys]

    def needs(self, entries: list[Entry]) -> Needs:
        """Implements `Engine.needs`."""
        types = {e.name: str(e.dtype or DTYPES[self.dtype]).removeprefix("torch.") for e in entries}
        tensors = json.dumps({"tensors": [(e.name, e.shape, types[e.name]) for e in entries], "kinds": self.kinds})
        long, *rows = self._answer(self.process.call("query", query=f"needs {tensors}") if self.process else None)
        lacking, (exact, *rows) = bytes(rows[:long]).decode(), rows[long:]
        check_filled("sglang", lacking.splitlines() if self.empty else [])
        needs = Needs(exact=bool(exact))
        while rows:
            index, counted, dims = rows[:3]
            bounds = rows[3 : 3 + 2 * dims]
            needs.boxes.append((index, tuple(zip(bounds[::2], bounds[1::2], strict=True))))
            needs.counted.append(bool(counted))
            self.parts.setdefault(entries[index].name, []).append(needs.boxes[-1][1])
            rows = rows[3 + 2 * dims :]
        if isinstance(self.transport, Broadcast) and self.group is not None:
            # The first rank broadcasts the full tensors to all processes.
            whole = [(i, entry.box) for i, entry in enumerate(entries)] if self.process else []
            return Needs(whole, [False] * len(whole))
        return needs

    @torch.no_grad()
    def load(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> None:
        """Implements `Engine.load`."""
        self.version = None
        # Running requests are aborted, because their tokens and cached prefixes were computed with the old weights.
        self.backlog += self.abort(list(self.running.values()))
        if self.process:
            self.process.call("begin")
        for bucket in buckets:
            self._send(bucket)
        if self.process:
            self.process.call("end")
        self.transport.done()
        self.version = version

    def _send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Send one bucket to the engine's processes. Collective over the engine.

        Raises:
            EngineDiedError: the engine process has exited. With `broadcast`, only the first rank raises these errors.
            CorruptWeightsError: the bytes that the engine received differ from the bytes that were sent.
        """
        if isinstance(self.transport, Broadcast):
            if self.process and tensors:
                try:
                    self.transport.push(self.process, tensors)
                except EngineDiedError:
                    raise
                except RuntimeError as error:
                    raise CorruptWeightsError(f"{error}{NOT_TAKEN}") from error
            return
        order = self.transport.put(tensors, self.parts)
        orders = [order]
        if self.group is not None:
            orders = [json.loads(text) for text in all_gather_text(json.dumps(order), self.group)]
        failure = None
        if self.process and any(o["entries"] for o in orders):
            try:
                self.process.call("load", workers=orders)
            except RuntimeError as error:
                failure = [isinstance(error, EngineDiedError), str(error)]
        # The other ranks may overwrite the bucket only after this broadcast. They also raise the first rank's error.
        failure = self._share(failure)
        if failure:
            died, text = failure
            raise EngineDiedError(text) if died else CorruptWeightsError(f"{text}{NOT_TAKEN}")

    def reset_prefix_cache(self) -> None:
        """Implements `Engine.reset_prefix_cache`."""
        if self.process:
            self.process.call("flush")

    def sleep(self, level: int) -> None:
        """Implements `Engine.sleep`."""
        self.abort(list(self.running.values()))
        self.backlog = []
        if level == 2 or (level == 1 and not self.on_cpu and not self.keeps_weights):
            # Level 2 also drops the version of an engine that is already asleep at level 1. SGLang keeps a host copy of
            # GPU weights only if it was started with that option.
            self.version = None
        gone = {"kv_cache"} if level == 1 and self.on_cpu else {"kv_cache", "weights"} if level else set()
        tags = sorted(gone - self.asleep)
        if tags and self.process:
            self.process.call("release", tags=tags)
        self.asleep |= gone

    def wake(self, what: Owner) -> None:
        """Implements `Engine.wake`."""
        if what in self.asleep:
            if self.process:
                self.process.call("resume", tags=[what])
            self.asleep.remove(what)

    def bytes_by_owner(self) -> dict[str, int]:
        """Implements `Engine.bytes_by_owner`.

        Each rank reports the memory of the scheduler process with the same index in the engine.
        """
        return {
            "engine weights": 0 if "weights" in self.asleep else self.held["weights"],
            "KV cache": 0 if "kv_cache" in self.asleep else self.held["kv_cache"],
        }

    def held_words(self) -> int | None:
        """Implements `Engine.held_words`."""
        high, low = self._answer(self.process.call("query", query="words") if self.process else None)
        return (high << 32) + low

    def close(self) -> None:
        """Implements `Engine.close`."""
        if self.process:
            self.process.close()
