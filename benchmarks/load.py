"""Measures the peak memory of a rank while it loads a model, compared with the memory of the loaded model.

    python benchmarks/load.py [--quick] [--json FILE] [--only KIND ...] [--ranks N ...]

A random Llama of 1.24B parameters in bfloat16 (quick: 135M) is loaded on 2 and 4 ranks of this machine (quick: 2) as a
trained model, a frozen one, a critic, a model with adapters, and by Megatron under layouts that use all ranks. The
share of a rank is its memory after the model is built: parameters, and buffers that the optimizer allocates at the
start (Megatron's float32 weights and gradient buffers). The peak is the maximum of the process's anonymous and shared
memory during loading, minus that before. Pages of memory-mapped files are not counted, because the system can reclaim
them at any time.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

# Replace this folder in the path, because its megatron.py would hide the package `megatron`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks._about import measured_on, save  # noqa: E402

MIB = 1 << 20
BEYOND = 512.0
"""Maximum MiB that a rank may use in addition to its share."""
SHAPES = {
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "1B": (2048, 8192, 16, 32, 8, 128256),
    # SmolLM2-135M, with numbers of heads that are divisible by two.
    "135M": (576, 1536, 30, 8, 4, 49152),
}
"""Sizes of models, in the order of `NAMES`."""
NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
KINDS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"trainable": False},
    "critic": {"head": "value"},
    "adapters": {"adapt": True},
    "megatron tp": {"axes": {"tp": 2}},
    "megatron pp": {"axes": {"pp": 2}},
    "megatron tp pp": {"axes": {"tp": 2, "pp": 2}},
}


def kinds_on(ranks: int) -> list[str]:
    """Return the kinds of models to measure on a number of ranks, with Megatron layouts that use all of them."""
    return [kind for kind in KINDS if "axes" not in KINDS[kind] or math.prod(KINDS[kind]["axes"].values()) == ranks]


def make_folder(folder: Path, size: str, **more: Any) -> str:
    """Write a random Llama as a HF folder, one layer at a time."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from spmdrl.weights.safetensors import SafetensorsWriter

    tokens = dict(bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, max_position_embeddings=2048)
    config = LlamaConfig(**(dict(zip(NAMES, SHAPES[size], strict=True)) | tokens | more))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    writer, draw = SafetensorsWriter(folder, shard_bytes=512 << 20), torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        row = torch.empty(p.shape[-1]).normal_(0.0, 0.02, generator=draw)
        shift = torch.arange(p.shape[0]) % 64
        writer.add({name: (row if p.dim() == 1 else row[None] + 0.001 * shift[:, None]).bfloat16()})
    writer.close()
    for file in (Path(__file__).resolve().parents[1] / "spmdrl" / "assets" / "tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def resident() -> int:
    """Return the bytes of anonymous and shared memory of this process, without pages of files."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


class Peak:
    """A context manager that measures the growth of resident memory to its peak, by a thread that samples constantly.

    The kernel's high-water mark cannot be used because it includes pages of files.
    """

    def __enter__(self):
        self.before = self.most = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.is_set():
            self.most = max(self.most, resident())
            time.sleep(0.002)

    def __exit__(self, *error: Any) -> None:
        self.done.set()
        self.thread.join()
        self.most = max(self.most, resident())
        self.bytes = self.most - self.before


def settings(folder: str, kind: str) -> Any:
    """Return the settings of a run for a kind of model."""
    from spmdrl.config.schema import Config, LoraConfig, ModelConfig, ParallelConfig, PolicyConfig

    backend = "megatron" if "axes" in KINDS[kind] else "fsdp"
    return Config(
        model=ModelConfig(path=folder, dtype="bfloat16"),
        policy=PolicyConfig(backend=backend),
        parallel=ParallelConfig(**KINDS[kind].get("axes", {})),
        lora=LoraConfig(rank=16 if kind == "adapters" else 0),
    )


def loaded(world: Any, folder: str, kind: str) -> dict:
    """Build one model; return this rank's share and peak in bytes. Collective."""
    from spmdrl.policy.models import backend

    cfg, options = settings(folder, kind), {k: v for k, v in KINDS[kind].items() if k != "axes"}
    make = backend(cfg.policy.backend)
    if cfg.policy.backend == "megatron":
        from spmdrl.policy.megatron.model import require

        require()
    begun = time.perf_counter()
    with Peak() as peak:
        policy = make(cfg, world, 10, **options)
    share = sum(policy.bytes_by_owner().values())
    return {"share": share, "peak": peak.bytes, "seconds": time.perf_counter() - begun}


def rank_main(rank: int, ranks: int, store: str, folder: str, kind: str, out: str) -> None:
    """Run one rank of a measurement."""
    import torch
    import torch.distributed as dist

    from spmdrl.session.environ import keep_freed_memory
    from spmdrl.spmd.mesh import world_from_group

    try:
        torch.set_num_threads(1)
        keep_freed_memory()  # A run on CPUs does this too.
        limit = timedelta(minutes=10)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
        parallel = settings(folder, kind).parallel
        world = world_from_group(parallel, 1, torch.device("cpu"), rank, limit)
        found = loaded(world, folder, kind)
        dist.barrier()
    except BaseException:
        found = {"error": traceback.format_exc()}
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    os._exit(0)


def measure(folder: str, kind: str, ranks: int, scratch: Path) -> dict:
    """Measure a kind on all ranks; return the row of the rank whose peak exceeds its share most.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    name = f"{kind.replace(' ', '_')}_{ranks}"
    out, store = str(scratch / name), str(scratch / f"{name}.store")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, store, folder, kind, out)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    files = [Path(f"{out}.{rank}") for rank in range(ranks)]
    found = [json.loads(f.read_text()) if f.exists() else {"error": "a rank was killed"} for f in files]
    if errors := [each["error"] for each in found if "error" in each]:
        raise RuntimeError(f"{kind} on {ranks} ranks: {errors[0]}")
    worst = max(found, key=lambda each: each["peak"] - each["share"])
    share, peak = worst["share"] / MIB, worst["peak"] / MIB
    seconds = max(each["seconds"] for each in found)
    return {"kind": kind, "ranks": ranks, "share": share, "peak": peak, "beyond": peak - share, "seconds": seconds}


def main() -> None:
    """Run the measurements, print a table and the targets, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="135M parameters, 2 ranks")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of ranks (default: 2 and 4)")
    args = parser.parse_args()
    about = measured_on("cpu", args.json)
    os.environ["OMP_NUM_THREADS"] = "1"
    size, rows = "135M" if args.quick else "1B", []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch) / "model", size)
        print(f"{'model':6} {'kind':14} {'ranks':>5} {'share MiB':>10} {'peak MiB':>10} {'beyond MiB':>10} {'s':>6}")
        for ranks in args.ranks or ([2] if args.quick else [2, 4]):
            for kind in [kind for kind in kinds_on(ranks) if kind in args.only]:
                row = {"model": size} | measure(folder, kind, ranks, Path(scratch))
                rows.append(row)
                numbers = f"{row['share']:10.0f} {row['peak']:10.0f} {row['beyond']:10.0f} {row['seconds']:6.1f}"
                print(f"{size:6} {kind:14} {ranks:5} {numbers}", flush=True)
    for row in rows:
        name, ok = f"load_{row['kind'].replace(' ', '_')}_{row['ranks']}_ranks_mib", row["beyond"] <= BEYOND
        print(f"target {name} {row['beyond']:.0f} {BEYOND:.0f} {'ok' if ok else 'miss'}")
    save(args.json, about, goal_mib=BEYOND, rows=rows)


if __name__ == "__main__":
    main()
