"""The server process: runs SGLang's Engine and exchanges JSON lines with its rank.

Requests and commands arrive on stdin. Completions and answers are written to the original stdout. All other output to
stdout is redirected to stderr.
"""

import asyncio
import ctypes
import gc
import inspect
import json
import os
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draws import seed_at
from inside import run_scheduler

FLUSH_TRIES = 2000
"""Maximum number of attempts, 10 ms apart, to flush the cache while the scheduler finishes its last batch."""
ABORT_AGAIN_SECONDS = 0.1
"""Seconds between abort messages for the same request."""


def build(config: dict):
    """Start SGLang's Engine with a scheduler process per TP rank.

    There is no detokenizer, because only tokens are exchanged.
    """
    import multiprocessing

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    if lacking := sorted(config["options"].keys() - inspect.signature(ServerArgs).parameters.keys()):
        raise ValueError(
            f"SGLang {version('sglang')} has no {', '.join(lacking)}; take --rollout.ep 1 and --rollout.dp 1, "
            "or the version that launch/locks has"
        )
    on_cpu = config["options"]["device"] == "cpu"

    class TokenEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_, **__):
            return [], []

        @classmethod
        def _launch_scheduler_processes(cls, *args, **kwargs):
            # On CPU, SGLang runs the garbage collector at every flush. Scanning imported objects would take 0.5 s each
            # time.
            gc.freeze()
            if on_cpu:
                # A forked process reuses the imported modules, which take 5 s to import. CUDA does not support forking.
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return TokenEngine(sampling_backend="pytorch", skip_tokenizer_init=True, log_level="error", **config["options"])


def unlink_shared_memory(processes: list[int]) -> None:
    """Unlink the shared memory that these processes have mapped, so that the OS frees it when the last of these
    processes exits.

    Without this, SGLang would leave files in /dev/shm when killed by a signal.
    """
    for process in processes:
        with open(f"/proc/{process}/maps") as maps:
            names = {line.split()[-1] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
        for name in names:
            if re.match("/dev/shm/(sglang|sgl)_", name):
                Path(name).unlink(missing_ok=True)


class Server:
    """Executes the commands that one rank sends, and writes the results back."""

    def __init__(self, engine: Any, config: dict, out: int):
        self.engine, self.tokenizer_manager, self.out = engine, engine.tokenizer_manager, out
        self.tp, self.stop = config["options"]["tp_size"], config["stop"]
        self.running: dict[str, asyncio.Task] = {}
        self.updating = False

    def write(self, **line) -> None:
        """Write one line to the rank.

        The write blocks only briefly, because a thread of the rank reads continuously.
        """
        data = memoryview((json.dumps(line) + "\n").encode())
        while data:
            data = data[os.write(self.out, data) :]

    async def serve(self) -> None:
        """Serve commands until the rank closes its end of the pipe."""
        reader = asyncio.StreamReader(limit=1 << 30)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        facts = await self.query("facts")
        unlink_shared_memory([os.getpid(), *self.engine.get_all_child_pids()])
        self.write(answer=facts)
        while line := await reader.readline():
            command = json.loads(line)
            name = command.pop("do")
            if name == "generate":
                task = asyncio.create_task(self.generate(**command))
                self.running |= {request["id"]: task for request in command["requests"]}
                continue
            try:
                self.write(answer=await getattr(self, name)(**command))
            except Exception as error:
                self.write(error=f"{type(error).__name__}: {error}")

    async def generate(self, requests: list[dict]) -> None:
        """Send requests to the scheduler in one message, and write their completions to the rank.

        requests: dicts with the keys id, prompt, seed, new (maximum number of new tokens), temperature and top_p.
        """
        ids = [request["id"] for request in requests]
        params = [
            {
                "temperature": request["temperature"],
                "top_p": request["top_p"],
                "max_new_tokens": request["new"],
                "stop_token_ids": self.stop,
                "sampling_seed": seed_at(request["seed"], len(request["prompt"])),
            }
            for request in requests
        ]
        try:
            outs = await self.engine.async_generate(
                input_ids=[request["prompt"] for request in requests],
                sampling_params=params,
                return_logprob=True,
                rid=ids,
            )
            for id, out in zip(ids, outs, strict=True):
                meta = out["meta_info"]
                logp = [row[0] for row in meta.get("output_token_logprobs") or []]
                self.write(done=id, tokens=out["output_ids"], logp=logp, finish=meta["finish_reason"]["type"])
        except Exception as error:
            names = f"request {ids[0]}" + (f" and {len(ids) - 1} more" if ids[1:] else "")
            self.write(failed=ids[0], error=f"{names}: {type(error).__name__}: {error}")
        finally:
            for id in ids:
                del self.running[id]

    async def abort(self, ids: list[str]) -> None:
        """Abort requests, and return once their last tokens have been written to the rank."""
        from sglang.srt.managers.io_struct import AbortReq

        while left := {id: self.running[id] for id in ids if id in self.running}:
            for id in left:
                # The scheduler ignores an abort that arrives before its request, so the abort is resent until the
                # request ends. SGLang's abort_request would send the abort only once.
                self.tokenizer_manager._dispatch_to_scheduler(AbortReq(rid=id))
            await asyncio.wait(left.values(), timeout=ABORT_AGAIN_SECONDS)

    async def query(self, query: str) -> list[int]:
        """Send a query to the scheduler processes (`inside.install_memory`) and return their answers."""
        from sglang.srt.managers.io_struct import GetWeightsByNameReqInput

        request = GetWeightsByNameReqInput(name=query, truncate_size=0)
        values = await self.tokenizer_manager.get_weights_by_name(request, None)
        # With DP attention, SGLang returns one list per data-parallel rank. Each list already contains the answers of
        # all processes, so the first is enough.
        return [int(x) for x in (values[0] if values and isinstance(values[0], list) else values)]

    async def begin(self) -> None:
        """Begin a weight update, after ending an unfinished one if there is one."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self.updating:
            await self.end()
        await self.flush()
        self.check(await self.tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all"), None))
        self.updating = True

    async def load(self, workers: list[dict]) -> None:
        """Load one bucket from shared memory.

        workers: for each scheduler process, the shared-memory file and the entries of its tensors.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        orders = [json.dumps(order).encode() for order in workers]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=orders, flush_cache=False)
        self.check(await self.tokenizer_manager.update_weights_from_tensor(request, None))

    async def join(self, host: str, port: int, backend: str) -> None:
        """Join the process group for weight broadcasts. The spmdrl rank is rank 0 of this group."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=1 + self.tp,
            group_name="spmdrl",
            backend=backend,
        )
        self.check(await self.tokenizer_manager.init_weights_update_group(request, None))

    async def receive(self, entries: list[dict]) -> None:
        """Receive one bucket over the process group created by `join`."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        await self.query(f"expect {json.dumps([e['hash'] for e in entries])}")
        request = UpdateWeightsFromDistributedReqInput(
            names=[e["name"] for e in entries],
            dtypes=[e["dtype"] for e in entries],
            shapes=[e["shape"] for e in entries],
            group_name="spmdrl",
            flush_cache=False,
        )
        self.check(await self.tokenizer_manager.update_weights_from_distributed(request, None))

    async def end(self) -> None:
        """End the update and drop cached prefixes, which belong to the old weights."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self.updating = False
        self.check(await self.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput(), None))
        await self.flush()

    async def flush(self) -> None:
        """Empty the prefix cache when the scheduler is idle."""
        # After its last batch, SGLang's scheduler may sleep for a second. Every message wakes it, so the flush is
        # retried instead of waiting inside SGLang.
        for _ in range(FLUSH_TRIES):
            result = await self.tokenizer_manager.flush_cache()
            if result.success:
                return
            await asyncio.sleep(0.01)
        self.check((False, f"the prefix cache could not be emptied: {result.message or 'requests are running'}"))

    async def release(self, tags: list[str]) -> None:
        """Free the memory of `tags` (`weights`, `kv_cache`)."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()
        await self.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        """Reallocate the memory of `tags`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    @staticmethod
    def check(result: tuple[bool, str]) -> None:
        """Raise RuntimeError if SGLang reports a failure."""
        if not result[0]:
            raise RuntimeError(result[1] or "SGLang refused without a reason")


def main() -> None:
    """Serve the rank that started this process until that rank exits."""
    config = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process dies with its parent
    if os.getppid() != config["parent"]:
        return
    # Ctrl-C reaches the whole process group, but only the rank decides how to handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If vLLM is installed, SGLang would import all of it for its kernels.
    sys.modules["vllm"] = None  # type: ignore[assignment]
    out = os.dup(1)
    os.dup2(2, 1)
    engine = build(config)
    engine.loop.run_until_complete(Server(engine, config, out).serve())
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
