"""Ranks as processes of one machine: `run_ranks(function, n, *args)` runs `function(world, *args)` on n gloo ranks.

Ranks are forked from a clean server process that has torch and the project imported, so that a group starts in well
under a second and nothing the test process did before (threads, CUDA, vLLM) comes along. `function` is therefore one
that can be imported: at the top of a test module. The parent never makes a process group.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils._python_dispatch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "hypothesis",
    "pytest",
    "safetensors.torch",
    "spmdrl.train",
    "spmdrl.session.open",
    "spmdrl.policy.fsdp.policy",
    "spmdrl.engines.hf.engine",
    "spmdrl.tracking.console",
    "spmdrl.checkpoint.background",
    "spmdrl.rl.agents",
    "spmdrl.env.pool",
    "peft",
    "tests.ranks.warmup",
]
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank failed, died or hung; the message names it and holds its traceback."""


def _context():
    context = multiprocessing.get_context("forkserver")
    # No effect once the server runs.
    context.set_forkserver_preload(PRELOAD)
    return context


def _rank_main(folder: str, rank: int, size: int, function, args, options: dict) -> None:
    # The server ends with the test process, and its ranks with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A full collection takes 0.4 s where it looks at all that the server imported.
    gc.freeze()
    out = Path(folder) / f"rank_{rank}.pt"
    try:
        from transformers.utils.logging import disable_progress_bar

        from spmdrl.config.schema import ParallelConfig
        from spmdrl.spmd.mesh import world_from_group

        disable_progress_bar()
        torch.set_num_threads(1)
        limit = timedelta(seconds=options["limit"])
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        parallel = ParallelConfig(**options["parallel"])
        world = world_from_group(parallel, options["rollout_tp"], torch.device("cpu"), rank, limit)
        dist.barrier()
        result = {"value": function(world, *args)}
    except BaseException as error:
        result = {
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "at": time.monotonic(),
        }
    torch.save(result, out.with_suffix(".part"))
    os.replace(out.with_suffix(".part"), out)
    if "value" in result:
        # Others may still be reading what this rank sent last; their errors are theirs to report.
        with contextlib.suppress(Exception):
            dist.barrier()
    # A process leaves at once: destructors of a group wait for ranks that may be gone.
    os._exit(0 if "value" in result else 1)


def run_ranks(
    function,
    n: int,
    *args,
    rollout_tp: int = 1,
    dp_replicate: int = 1,
    sp: int = 1,
    parallel: dict | None = None,
    limit: float = 120.0,
) -> list:
    """Returns the values of `function(world, *args)` on ranks 0 .. n - 1 (whatever torch.save takes).

    Args:
        function: at the top of an importable module.
        n: ranks; one rank is a process of its own too.
        args: picklable.
        rollout_tp: ranks of one engine.
        dp_replicate: HSDP copies; dp_shard takes the rest.
        sp: ranks that divide the tokens of a pack.
        parallel: other axes, as in ParallelConfig.
        limit: seconds after which all are killed.

    Raises:
        RankError: an exception on a rank (with its traceback), a rank that died, or ranks still running at the limit.
            All others are killed.
    """
    context = _context()
    with tempfile.TemporaryDirectory(prefix="spmdrl_ranks_") as folder:
        axes = {"dp_replicate": dp_replicate, "sp": sp} | (parallel or {})
        options = {"limit": limit, "rollout_tp": rollout_tp, "parallel": axes}
        ranks = [
            context.Process(target=_rank_main, args=(folder, r, n, function, args, options), name=f"rank {r}")
            for r in range(n)
        ]
        for process in ranks:
            process.start()
        try:
            return _gather(Path(folder), ranks, time.monotonic() + limit)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _gather(folder: Path, ranks: list, end: float) -> list:
    running, values, failures = dict(enumerate(ranks)), {}, []
    while running and time.monotonic() < end:
        wait([p.sentinel for p in running.values()], timeout=max(0.0, end - time.monotonic()))
        for r, process in list(running.items()):
            if process.is_alive():
                continue
            del running[r]
            file = folder / f"rank_{r}.pt"
            if not file.exists():
                failures.append((0.0, f"rank {r} of {len(ranks)} died with exit code {process.exitcode}"))
                continue
            # Written by a process of ours a moment ago.
            result = torch.load(file, weights_only=False)
            if "error" in result:
                text = f"rank {r} of {len(ranks)}: {result['error']}\n{result['traceback']}"
                failures.append((result["at"], text))
            else:
                values[r] = result["value"]
        if failures and running:
            # Others may fail of it a little before the cause is seen here: the first by the clock is named first.
            end = min(end, time.monotonic() + 0.5)
    if failures:
        raise RankError("\n".join(text for _, text in sorted(failures)))
    if running:
        late = [r for r in sorted(running) if not (folder / f"rank_{r}.pt").exists()]
        names = ", ".join(map(str, late or sorted(running)))
        raise RankError(f"rank(s) {names} of {len(ranks)} still running at the time limit; killed")
    return [values[r] for r in range(len(ranks))]
