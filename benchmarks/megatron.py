"""Compares the Megatron policy on a CPU with the FSDP policy in speed, and its communication with a formula.

    python benchmarks/megatron.py [--quick] [--json FILE] [--only speed bytes]

*Speed* trains a random Qwen2 in float32 by GRPO (with an entropy bonus, so that the loss is not 0) on one synthetic
batch of ragged lengths, with one thread per rank. On one rank both policies are in one process and take turns; the
figures are medians of the CPU seconds of the process, which do not depend on other load. Before the timing, logp and
two updates of both must agree. Neither policy shares prompts, which Megatron cannot do; a separate row shows the gain
of FSDP with shared prompts. Figures on two ranks have no target: layouts run one after the other in the same processes
and are measured in wall-clock time. *Bytes* counts the bytes that one update sends per rank; see `_axis_bytes.py`.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
# Remove this folder from the path, because this file has the same name as the package `megatron`.
others = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks"]
sys.path[:] = [str(ROOT), *others]

import torch  # noqa: E402 (threads and paths first)
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks._about import measured_on, save  # noqa: E402

SIZES = {
    "30M": dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, vocab_size=16384, heads=8),
    "5M": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, vocab_size=4096, heads=4),
    "tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=4, vocab_size=4096, heads=4),
}
BATCHES = {"30M": (4, 4, 48, 160), "5M": (4, 4, 16, 64), "bytes": (16, 2, 8, 56)}
"""Number of prompts, samples per prompt, tokens of a prompt, and maximum tokens of a reply."""
TOKENS = 4096
"""Number of different tokens in the batches."""
BUDGET = 512
GOAL = 0.8
LIMITS = {"logp": 1e-5, "loss": 1e-5, "grad_norm": 1e-5}
"""Maximum relative differences. Megatron's own gradient norm, which squares gradients in float32, would be off by 3e-5
at 5M parameters; both policies compute the norm in float64."""
TWO_RANKS = {
    "fsdp 2": ("fsdp", {}),
    "megatron dp2": ("megatron", {}),
    "megatron tp2": ("megatron", {"tp": 2}),
    "megatron pp2": ("megatron", {"pp": 2}),
    "megatron cp2": ("megatron", {"cp": 2}),
}
LAYOUTS = {
    2: {
        "tp2": ("dense", {"tp": 2}),
        "tp2, no sequence parallelism": ("dense", {"tp": 2, "sequence_parallel": False}),
        "cp2": ("dense", {"cp": 2}),
        "pp2": ("dense", {"pp": 2}),
        "pp2 in 2 virtual stages": ("dense", {"pp": 2, "virtual_stages": 2}),
        "dp2": ("dense", {}),
        "ep2": ("mixture", {"ep": 2}),
    },
    4: {
        "tp2 pp2": ("dense", {"tp": 2, "pp": 2}),
        "tp2 cp2": ("dense", {"tp": 2, "cp": 2}),
        "tp2 ep2": ("mixture", {"tp": 2, "ep": 2}),
    },
}


def make_model(folder: Path, size: str, mixture: bool = False) -> str:
    """Write a random model to a HF folder and return its path."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    values = dict(SIZES[size], tie_word_embeddings=True, max_position_embeddings=1024, eos_token_id=2)
    heads = values.pop("heads")
    values |= dict(num_attention_heads=heads, num_key_value_heads=heads // 2)
    if mixture:
        more = dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, head_dim=64, norm_topk_prob=True)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**values | more | {"tie_word_embeddings": False})).save_pretrained(folder)
    else:
        Qwen2ForCausalLM(Qwen2Config(**values)).save_pretrained(folder)
    return str(folder)


def open_group(rank: int, ranks: int, folder: str) -> None:
    """Join the other forked ranks over gloo."""
    from spmdrl.session.environ import keep_freed_memory, prepare

    prepare()
    keep_freed_memory()  # A run on CPUs does this too.
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))


def open_policy(kind: str, model: str, axes: dict, share: bool = False):
    """Return the config, the world with these axes, and the policy; create Megatron's groups again. Collective."""
    from spmdrl.config.presets import with_preset
    from spmdrl.config.schema import Config, ParallelConfig
    from spmdrl.policy.models import backend
    from spmdrl.spmd.mesh import world_from_group

    cfg, parallel = with_preset(Config(), "grpo"), ParallelConfig(**axes)
    cfg = dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=model, dtype="float32"),
        algo=dataclasses.replace(cfg.algo, entropy_coef=0.01),
        optimizer=dataclasses.replace(cfg.optimizer, lr=1e-4, eps=1e-4),
        policy=dataclasses.replace(cfg.policy, backend=kind, share_prompts=share, max_tokens_per_microbatch=BUDGET),
        parallel=parallel,
    )
    world = world_from_group(parallel, 1, torch.device("cpu"), dist.get_rank(), timedelta(seconds=120))
    if kind == "megatron":
        from spmdrl.policy.megatron.model import initialize
        from spmdrl.policy.megatron.policy import layout_of

        initialize(layout_of(cfg))
    return cfg, world, backend(kind)(cfg, world, 1000)


def episodes(batch: str) -> list:
    """Return episodes of random tokens, with replies of different lengths and a different reward for every sample."""
    from spmdrl.data.episode import episode_of
    from spmdrl.spmd.seeds import generator_for

    prompts, samples, prompt, longest = BATCHES[batch]
    out = []
    for position in range(prompts):
        rng = generator_for(5, position)
        head = [rng.randrange(3, TOKENS) for _ in range(prompt)]
        for sample in range(samples):
            reply = [rng.randrange(3, TOKENS) for _ in range(rng.randrange(longest // 4, longest))]
            mask = torch.tensor([False] * len(head) + [True] * len(reply))
            logp = torch.full((len(mask),), -5.0) * mask
            out.append(
                episode_of(position, sample, position, torch.tensor(head + reply), mask, logp, 0, reward=rng.random())
            )
    return out


class Side:
    """A policy whose actions can be timed, with its scored share of the batch."""

    def __init__(self, kind: str, model: str, axes: dict, batch: str, share: bool = False):
        """Open the policy and score its share of the batch. batch: key of BATCHES. Collective."""
        from spmdrl.data.distribute import assign_updates, balance
        from spmdrl.data.pack import from_episodes
        from spmdrl.policy.models import Models
        from spmdrl.rl.compose import compose
        from spmdrl.rl.score import score

        self.cfg, self.world, self.policy = open_policy(kind, model, axes, share)
        everyone, prompts = episodes(batch), BATCHES[batch][0]
        self.tokens = sum(len(t.tokens) for t in everyone)
        mine = from_episodes([t for t in everyone if t.position % self.world.size == self.world.rank])
        mine.seq["work"] = mine.lengths
        mine = balance(assign_updates(mine, 1, prompts, list(range(prompts))), self.world)
        self.algo, self.models = compose(self.cfg), Models(self.policy)
        score(mine, self.models, self.algo, self.cfg, self.world.data_peers)
        self.batch = self.algo.advantages(mine, self.world.data_peers)

    def logprobs(self) -> torch.Tensor:
        """Return the log-probabilities [T] of this rank's share."""
        return self.policy.logprobs(self.batch, 1.0)[0]

    def update(self) -> dict[str, float]:
        """Run one update; return its metrics, which are the same on every rank."""
        from spmdrl.rl.update import update
        from spmdrl.spmd.exchange import all_reduce

        stats = update(self.batch, self.models, self.algo, self.cfg, 0, self.world.data_peers)
        return stats.reduce(lambda x, op: all_reduce(x, op, self.world.data_group), self.world.device)

    def time(self, action) -> float:
        """Return the seconds of an action: CPU time on one rank, otherwise wall-clock time between two barriers."""
        clock = time.process_time if self.world.size == 1 else time.perf_counter
        dist.barrier()
        began = clock()
        action()
        dist.barrier()
        return clock() - began


def agree(one: Side, other: Side) -> dict[str, float]:
    """Check that two updates of both policies agree, and that logp agrees before and after each update.

    Raises:
        RuntimeError: they differ by more than LIMITS.
    """
    worst = {"logp": 0.0, "loss": 0.0, "grad_norm": 0.0}
    for turn in range(3):
        a, b = one.logprobs(), other.logprobs()
        worst["logp"] = max(worst["logp"], (a - b).abs().max().item() / a.abs().max().item())
        if turn < 2:
            a, b = one.update(), other.update()
            for name in ("loss", "grad_norm"):
                worst[name] = max(worst[name], abs(a[name] - b[name]) / max(abs(a[name]), 1e-2))
    if any(worst[name] > limit for name, limit in LIMITS.items()):
        raise RuntimeError(f"the two policies differ: {worst} with limits {LIMITS}")
    return worst


def one_rank(rank: int, ranks: int, models: dict, size: str, times: int, folder: str) -> None:
    """Time both policies in turns; write the medians."""
    open_group(rank, ranks, folder)
    sides = {
        "fsdp": Side("fsdp", models[size], {}, size),
        "megatron tp1": Side("megatron", models[size], {}, size),
        "fsdp, shared prompts": Side("fsdp", models[size], {}, size, share=True),
    }
    differ = agree(sides["fsdp"], sides["megatron tp1"])
    taken = {name: ([], []) for name in sides}
    for turn in range(times):
        for name in sorted(sides, reverse=bool(turn % 2)):
            side = sides[name]
            taken[name][0].append(side.time(side.update))
            taken[name][1].append(side.time(side.logprobs))
    rows = []
    for name, (updates, passes) in taken.items():
        row = {"size": size, "ranks": 1, "side": name, "tokens": sides[name].tokens}
        rows.append(row | {"update_s": statistics.median(updates), "logprobs_s": statistics.median(passes)})
        rows[-1]["update_s_all"] = updates
    write(folder, rank, {"rows": rows, "differ": differ})


def two_ranks(rank: int, ranks: int, models: dict, size: str, times: int, folder: str) -> None:
    """Time one layout after the other; write the medians."""
    open_group(rank, ranks, folder)
    rows = []
    for name, (kind, axes) in TWO_RANKS.items():
        side = Side(kind, models[size], axes, size)
        side.update()
        updates, passes = ([side.time(action) for _ in range(times)] for action in (side.update, side.logprobs))
        row = {"size": size, "ranks": ranks, "side": name, "tokens": side.tokens, "update_s_all": updates}
        rows.append(row | {"update_s": statistics.median(updates), "logprobs_s": statistics.median(passes)})
    write(folder, rank, {"rows": rows})


def count(rank: int, ranks: int, models: dict, layouts: dict, folder: str) -> None:
    """Count the bytes of one update in every layout, compute them by the formula, and write both for this rank."""
    open_group(rank, ranks, folder)
    write(folder, rank, {name: bytes_of(models[kind], axes) for name, (kind, axes) in layouts.items()})


def bytes_of(model: str, axes: dict) -> dict:
    """Return the bytes that this rank sends in one update by axis, as counted and by the formula. Collective."""
    from megatron.core import parallel_state

    from benchmarks._axis_bytes import Counter, Shapes, Work, formula
    from spmdrl.policy.megatron.attention import make_packs
    from spmdrl.policy.megatron.policy import layout_of
    from spmdrl.policy.megatron.schedule import stand_in

    side = Side("megatron", model, axes, "bytes")
    layout, divide, seen = layout_of(side.cfg), side.policy.microbatches, []
    side.policy.microbatches = lambda batch: seen.append(divide(batch)) or seen[-1]
    with Counter() as counter:
        side.update()
    runs = [micro if len(micro) else stand_in() for micro in seen[-1]]
    packs = make_packs(runs, layout, 0, before=True)
    work = Work(
        [pack.tokens.shape[1] for pack in packs],
        [run.n_tokens for run in runs],
        [int(run.token["mask"].sum()) for run in runs],
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expected = formula(Shapes.of(side.policy.hf_config), layout, work, side.world.size, stage)
    return {"sent": counter.bytes, "formula": expected, "calls": counter.calls}


def write(folder: str, rank: int, result: dict) -> None:
    """Write a rank's results for the process that forked it, and exit."""
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    # Skip the destructors of process groups, which would wait for ranks that may have exited.
    os._exit(0)


def ranks_of(function, ranks: int, *args) -> list[dict]:
    """Run a function on forked ranks and return the results that they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(function, (ranks, *args, folder), ranks, start_method="fork")
        return [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(ranks)]


def speed(models: dict, sizes: list[str], times: int) -> tuple[list, list]:
    """Measure speed, print the table, and return its rows and targets."""
    rows, targets = [], []
    print(f"{'model':6} {'ranks':>5} {'side':22} {'update s':>9} {'tokens/s':>9} {'logprobs s':>10} {'to fsdp':>8}")
    for size in sizes:
        (alone,) = ranks_of(one_rank, 1, models, size, times)
        both = ranks_of(two_ranks, 2, models, size, max(2, times // 2))[0]
        for part in (alone, both):
            for row in part["rows"]:
                base = part["rows"][0]
                row["tokens_per_s"] = row["tokens"] / row["update_s"]
                row["ratio"] = base["update_s"] / row["update_s"]
                row["logprobs_ratio"] = base["logprobs_s"] / row["logprobs_s"]
                rows.append(row)
                print(
                    f"{size:6} {row['ranks']:5} {row['side']:22} {row['update_s']:9.3f} {row['tokens_per_s']:9.0f} "
                    f"{row['logprobs_s']:10.3f} {row['ratio']:8.2f}"
                )
        print(f"{size}: logp, loss and gradient norm of both agree to", *(f"{x:.1e}" for x in alone["differ"].values()))
        one = next(row for row in rows if row["size"] == size and row["side"] == "megatron tp1")
        targets.append((f"megatron_tp1_over_fsdp_{size}", one["ratio"], ">= 0.8", one["ratio"] >= GOAL))
        ratio = one["logprobs_ratio"]
        targets.append((f"megatron_tp1_over_fsdp_logprobs_{size}", ratio, ">= 0.8", ratio >= GOAL))
    return rows, targets


def traffic(models: dict, ranks: list[int]) -> tuple[list, list]:
    """Measure bytes, print the table, and return its rows and targets."""
    from benchmarks._axis_bytes import AXES

    rows, targets = [], []
    print("\nbytes of one update that a rank sends, mean over ranks")
    print(f"{'ranks':>5} {'layout':30} {'axis':>4} {'sent KiB':>10} {'formula KiB':>11} {'ratio':>7}")
    for n in ranks:
        each = ranks_of(count, n, models, LAYOUTS[n])
        for name in LAYOUTS[n]:
            for axis in AXES:
                measured, expected = (sum(r[name][k][axis] for r in each) / n for k in ("sent", "formula"))
                if not measured and not expected:
                    continue
                ratio = measured / expected if expected else float("inf")
                calls = {k.split()[1]: v for k, v in each[0][name]["calls"].items() if k.split()[0] == axis}
                rows.append(dict(ranks=n, layout=name, axis=axis, sent=measured, formula=expected, ratio=ratio))
                rows[-1]["calls_of_rank_0"] = calls
                print(f"{n:5} {name:30} {axis:>4} {measured / 1024:10.1f} {expected / 1024:11.1f} {ratio:7.4f}")
            rest = sum(r[name]["sent"]["rest"] for r in each) / n
            rows.append(dict(ranks=n, layout=name, axis="rest", sent=rest))
    for axis in AXES:
        found = [row["ratio"] for row in rows if row["axis"] == axis]
        far = max(found, key=lambda x: abs(x - 1))
        targets.append((f"megatron_bytes_{axis}", far, "0.9..1.1", 0.9 <= far <= 1.1))
    rest = max(row["sent"] for row in rows if row["axis"] == "rest")
    print(f"on groups of no axis (counts, the gradient's norm, metrics): at most {rest:.0f} bytes a rank")
    return rows, targets


def main() -> None:
    """Print tables and one line per target; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5M parameters, fewer repetitions, two ranks at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=("speed", "bytes"), default=("speed", "bytes"))
    args = parser.parse_args()
    about = measured_on("cpu", args.json)
    from transformers.utils.logging import disable_progress_bar

    import spmdrl.policy.fsdp.policy  # noqa: F401
    import spmdrl.rl.update  # noqa: F401 (once, before ranks are forked)
    from spmdrl.policy.megatron.model import require

    require()
    disable_progress_bar()
    torch.set_num_threads(1)
    result, targets = {}, []
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["5M"] if args.quick else ["5M", "30M"]
        models = {size: make_model(Path(folder) / size, size) for size in sizes}
        models |= {"dense": models["5M"], "mixture": make_model(Path(folder) / "mixture", "5M", True)}
        if "speed" in args.only:
            result["speed"], found = speed(models, sizes, 3 if args.quick else 9)
            targets += found
        if "bytes" in args.only:
            result["bytes"], found = traffic(models, [2] if args.quick else [2, 4])
            targets += found
    print()
    for name, value, goal, ok in targets:
        print(f"target {name} {value:.3f} {goal.replace(' ', '')} {'ok' if ok else 'miss'}")
    save(args.json, about, **result)


if __name__ == "__main__":
    main()
