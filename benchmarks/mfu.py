"""Measures model flops utilization of forward and backward passes for spmdrl's policies and plain HF with FSDP2.

    python benchmarks/mfu.py [--quick] [--json FILE] [--only SIDE ...] [--tokens N] [--length N]

The script uses one device: a GPU with a random Qwen2 of Qwen2.5-1.5B's shapes in bfloat16 over float32 masters
(Megatron: bfloat16 with float32 gradients), or a CPU with a small one in float32. `fsdp` and `megatron` are the
policies as in a run: packed sequences, logp and entropy without logits. `plain` is the usual code with transformers and
FSDP2: padded rows, logits, `F.cross_entropy`. On a GPU, the sides in `LADDER` (`_mfu_sides.py`) show the gain of each
setting. All sides take turns on the same `--tokens` tokens in two forms: sequences of equal length, and sequences of
different lengths, for which padding costs time. A side that fails, that does not fit into memory, or whose loss is not
that of the others has an `error` in its row and no figures. A side whose package is missing is reported and left out.
Results are saved after each round.

The flops of a step follow PaLM (https://arxiv.org/abs/2204.02311, appendix B, with the causal half of attention): 6 N T
for the matrices, with N parameters without the input embedding and T real tokens, and 12 L H d sum(s^2) / 2 for
attention, with L layers, H heads of width d, and s the length of each sequence. Padded or recomputed tokens do not
count. Utilization is relative to the fastest of several matmuls in the same run, and to the vendor's peak if it is
known. On a CPU, times are CPU seconds of the process on one thread, which do not depend on other load. GiB is the
memory that a step needs on the device in addition to the models of all sides. `busy` is the share of a step in which a
GPU works: the seconds of its kernels and copies in a separate traced step, divided by the seconds of a step.
"""

import argparse
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
# Remove this folder from the path, because its megatron.py would hide the package `megatron`.
others = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks"]
sys.path[:] = [str(ROOT), *others]

import torch  # noqa: E402 (threads and paths first)

from benchmarks._about import available, measured_on, save  # noqa: E402
from benchmarks._mfu_rounds import build, measure, seconds  # noqa: E402
from benchmarks._mfu_sides import LADDER  # noqa: E402

MODELS = {
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, heads=(12, 2), vocab_size=151936),
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, heads=(14, 2), vocab_size=151936),
    "20M": dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, heads=(6, 2), vocab_size=8192),
    "2M": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, heads=(3, 1), vocab_size=2048),
}
"""Shapes of Qwen2.5-1.5B and 0.5B, and of small models."""
MAKERS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A100": 312e12}
"""Dense bfloat16 flops per second from data sheets, by a part of the device name in torch."""
SIDES = ("fsdp", "megatron", "plain")
"""The sides on a CPU. A GPU runs those of LADDER too."""
SMALL = 0.36
"""Minimum utilization (target) with the shapes of Qwen2.5-0.5B on a GPU."""


def make_model(folder: Path, name: str, longest: int, device: torch.device) -> Any:
    """Write a random model to a HF folder; return its config. device: where its numbers are drawn."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    values = dict(MODELS[name], tie_word_embeddings=True, max_position_embeddings=max(longest, 1024), eos_token_id=2)
    heads, groups = values.pop("heads")
    config = Qwen2Config(**values, num_attention_heads=heads, num_key_value_heads=groups)
    with device:
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return config


def flops(config: Any, lengths: list[int]) -> float:
    """Return the flops of forward and backward, by the formula in the module's docstring."""
    width = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * width * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    squares = sum(s * s for s in lengths) / 2
    return 6 * matrices * sum(lengths) + 12 * config.num_hidden_layers * config.hidden_size * squares


def lengths_of(tokens: int, longest: int) -> dict[str, list[int]]:
    """Return lengths of sequences with about `tokens` tokens in total, by kind: equal lengths and ragged ones."""
    from spmdrl.spmd.seeds import generator_for

    rng, ragged = generator_for(2), []
    while sum(ragged) < tokens:
        ragged.append(rng.randrange(longest // 8, longest + 1))
    ragged[-1] -= sum(ragged) - tokens
    return {"even": [longest] * (tokens // longest), "ragged": [n for n in ragged if n > 1]}


def sequences(config: Any, lengths: list[int]) -> list[torch.Tensor]:
    """Return random tokens [length] for each sequence."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, config.vocab_size, (n,), generator=generator) for n in lengths]


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the flops per second of the fastest of several square matmuls."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    inner = 20 if device.type == "cuda" else 4
    best = min(seconds(lambda: [a @ b for _ in range(inner)], device) for _ in range(10))
    return 2 * size**3 * inner / best


def groups(wanted: list[str]) -> list[list[str]]:
    """Return the sides in the groups that are measured one after the other."""
    # The compiler may take a minute, so all other sides are measured and saved before it starts.
    found = [[side for side in wanted if (side == "compiled") is last] for last in (False, True)]
    return [group for group in found if group]


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer repetitions")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=(*SIDES, *LADDER), help="default: all (quick: not compiled)")
    parser.add_argument("--model", choices=MODELS, help="default: 1.5B on a GPU (quick 0.5B), 20M on a CPU (quick 2M)")
    parser.add_argument("--tokens", type=int, help="of a step; default 65536 on a GPU (quick 16384), 2048 on a CPU")
    parser.add_argument("--length", type=int, help="of the longest sequence; default 4096 on a GPU, 256 on a CPU")
    parser.add_argument("--tokens-per-microbatch", type=int, help="default 8192 on a GPU, 1024 on a CPU")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing on every side")
    return parser.parse_args()


def show(case: str, row: dict) -> None:
    """Print one line of the table."""
    if "error" in row:
        print(f"{case:7} {row['side']:9} {row['error']}")
        return
    cells = [f"{row[k]:.2f}" if row[k] else "-" for k in ("mfu_maker", "ratio", "busy")]
    print(
        f"{case:7} {row['side']:9} {row['seconds']:9.3f} {row['tokens_per_s']:9.0f} "
        f"{row['flops_per_s'] / 1e12:8.3g} {row['mfu']:6.2f} {cells[0]:>10} {cells[1]:>8} "
        f"{cells[2]:>6} {row['step_gib']:6.1f}"
    )


def complete(
    found: list[dict], case: str, lengths: list[int], before: list[dict], config: Any, peaks: tuple[float, float | None]
) -> None:
    """Add the numbers that follow from the seconds of each row.

    before: rows of earlier sides. peaks: flops per second of the fastest matmul, and of the vendor if they are known.
    """
    timed = [row for row in found if "seconds" in row]
    alike = [row for row in before if row["kind"] == case and "seconds" in row] + timed
    base = next((row["seconds"] for row in alike if row["side"] == "plain"), None)
    for row in found:
        row |= {"kind": case, "tokens": sum(lengths)}
    for row in timed:
        row["flops_per_s"] = flops(config, lengths) / row["seconds"]
        row["tokens_per_s"] = sum(lengths) / row["seconds"]
        row["mfu"] = row["flops_per_s"] / peaks[0]
        row["mfu_maker"] = row["flops_per_s"] / peaks[1] if peaks[1] else None
        row["ratio"] = base / row["seconds"] if base else None


def main() -> None:
    """Print the table and one line per target; write JSON."""
    args = arguments()
    from transformers.utils.logging import disable_progress_bar

    from spmdrl.config.schema import ParallelConfig
    from spmdrl.session.environ import keep_freed_memory, prepare
    from spmdrl.spmd.mesh import start

    about = measured_on(available(), args.json)
    prepare()
    disable_progress_bar()
    world = start(ParallelConfig(), 1, "auto", 300.0)
    device, on_gpu = world.device, world.device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
        torch.set_num_threads(1)
    name = args.model or (("0.5B", "1.5B") if on_gpu else ("2M", "20M"))[not args.quick]
    total = args.tokens or ((65536, 16384) if on_gpu else (4096, 2048))[args.quick]
    longest = args.length or (4096 if on_gpu else 256)
    budget = max(longest, args.tokens_per_microbatch or (8192 if on_gpu else 1024))
    kind = "bfloat16" if on_gpu else "float32"
    dtype = getattr(torch, kind)
    peak = matmul_peak(device, dtype)
    label = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    maker = next((value for part, value in MAKERS.items() if part in label), None) if on_gpu else None
    about |= {"model": name, "dtype": kind, "matmul_flops": peak, "maker_flops": maker}
    about |= {"budget": budget, "longest": longest, "recompute": args.recompute}
    rows: list[dict] = []

    def keep(case: str, lengths: list[int], found: list[dict]) -> None:
        complete(found, case, lengths, rows, config, (peak, maker))
        save(args.json, about, rows=rows + found)

    with tempfile.TemporaryDirectory() as scratch:
        config = make_model(Path(scratch), name, longest, device)
        print(f"{name} of {label}, {kind}; matmul {peak / 1e12:.3g} TFLOPS, maker's figure ", end="")
        print(f"{maker / 1e12:.0f}" if maker else "unknown: MFU is against the matmul of this machine")
        head = ("kind", "side", "step s", "tokens/s", "TFLOPS", "MFU", "of maker's", "to plain", "busy", "GiB")
        print("{:7} {:9} {:>9} {:>9} {:>8} {:>6} {:>10} {:>8} {:>6} {:>6}".format(*head))
        # The compiler would take most of the time of a quick run.
        ladder = [side for side in LADDER if on_gpu and not (args.quick and side == "compiled")]
        for group in groups(args.only or [*SIDES, *ladder]):
            sides = {side: build(side, (scratch, kind, world, budget, args.recompute)) for side in group}
            for case, lengths in lengths_of(total, longest).items():
                tokens = sequences(config, lengths)
                losses = [row["loss"] for row in rows if row["kind"] == case and "error" not in row]
                found = measure(sides, tokens, 3 if args.quick else 7, device, losses, partial(keep, case, lengths))
                rows.extend(found)
                for row in found:
                    show(case, row)
    print()
    for row in [row for row in rows if "error" not in row]:
        goals: dict[str, tuple[float, float]]
        goals = {f"mfu_{row['side']}_over_plain_{row['kind']}": (row["ratio"], 1)} if row["ratio"] else {}
        if on_gpu and name == "0.5B" and row["kind"] == "even":
            goals[f"mfu_{row['side']}"] = row["mfu"], SMALL
        for goal, (value, least) in goals.items() if row["side"] in ("fsdp", "megatron") else ():
            print(f"target {goal} {value:.3f} >={least} {'ok' if value >= least else 'miss'}")
    sys.stdout.flush()
    # Skip the destructors of process groups, which may wait forever.
    os._exit(0)


if __name__ == "__main__":
    main()
