"""Measures conversations with slow tools: utilisation of the engine, speed against lockstep, training on trees.

    python benchmarks/agents.py [--quick] [--json FILE]

*Rollout* runs the program's rollout, environments and processes with the HF engine and a random model: 256 episodes of
4 responses. After each response except the last, a tool sleeps. Its time depends on episode and turn, so that all sides
have the same times. They are log-normal with a median of 50 ms, and one in a hundred is above 0.5 s. All responses have
the same fixed length, and stop tokens are ignored, because a random policy would end responses at arbitrary lengths.

The engine counts as busy inside `engine.poll`. *Lockstep* is the same rollout with a barrier: no tool begins before all
episodes have responded, and no episode continues before all tools have answered. The tools run in parallel, or one
after another as synchronous tools do in TRL 1.16 (`GRPOTrainer._tool_call_loop`); TRL itself is not run. The sides take
turns on one engine. Any schedule takes at least the longer of two times: the engine's time for full batches, which is
its time under lockstep, and the time of the slowest episode for its sampling and its tools.

*Slowest episode* compares the time of 64 concurrent episodes with that of the slowest episode among them, which is the
sum of its tools and of the engine's steps in which it had a row. That episode is also run alone.

*Tree* runs forward and backward passes of episodes whose chat template drops earlier thoughts, so that each turn begins
a branch (`Episode.fork`). The paths are run separately and as a tree, in turns. Prompts are not shared between
episodes. The model is the random model of the rollout.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._about import measured_on, save  # noqa: E402
from benchmarks._agents import QUICK_SIZES, SIZES, SPREAD, Rollouts, compared, flags  # noqa: E402
from benchmarks._models import random_model  # noqa: E402

MEDIAN = 0.05
"""Median seconds of a tool."""
BUSY, LOCKSTEP, SLOWEST, TREE, SAME = 0.90, 2.0, 1.3, 2.0, 1e-5
"""Targets: busy share of the engine, speed relative to lockstep, time relative to the slowest episode, factor of tokens
saved by a tree. SAME is the maximum relative difference of gradients."""
PROMPT, THOUGHT, ANSWER, SEEN = 256, 48, 16, 48
"""Tokens of the tree's episodes: in the first prompt, and in the thought, answer and observation of each turn."""


# ── trees ────────────────────────────────────────────────────────────────────


def branching(index: int, turns: int, vocabulary: int):
    """Return a random episode in which the history of each turn lacks earlier thoughts."""
    from spmdrl.data.episode import Episode, prompt_segment

    rng = random.Random(index)
    draw = lambda n: [rng.randrange(3, vocabulary) for _ in range(n)]  # noqa: E731
    history = draw(PROMPT)
    episode = Episode(index, 0, index, [prompt_segment(history)])
    for turn in range(turns):
        if turn:
            episode.fork(history)
        answer = draw(ANSWER)
        episode.add_sampled(draw(THOUGHT) + answer, [0.0] * (THOUGHT + ANSWER), 0)
        history = history + answer + draw(SEEN)
    episode.finish = "stop"
    return episode


def trees(args: argparse.Namespace) -> dict[str, float]:
    """Return the tokens, seconds and gradient differences of episodes as flat paths and as trees."""
    import torch

    from spmdrl.data.pack import from_episodes
    from spmdrl.data.tree import plan_tree
    from spmdrl.hub.build import build_model
    from spmdrl.policy.attention import packed as attention
    from spmdrl.policy.heads import PackedLM

    sizes = QUICK_SIZES if args.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), "Qwen2", 0, **sizes, max_position_embeddings=1024)
        hf = build_model(model, "float32", False, attention.register())
    batch = from_episodes([branching(i, args.turns, hf.config.vocab_size) for i in range(args.trees)])
    tokens, mask = batch.token["tokens"], batch.token["mask"]
    tree = plan_tree(tokens, batch.lengths, mask, batch.begins)
    assert tree is not None and int(mask.sum()) == args.trees * args.turns * (THOUGHT + ANSWER)
    weight_T = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    sides = {share: PackedLM(hf, share=share).train() for share in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    gradients: dict[bool, torch.Tensor] = {}
    for i in range(args.repeats + 1):
        for share, side in sides.items():
            side.zero_grad(set_to_none=True)
            began = time.perf_counter()
            logp_T, entropy_T = side(side.plan(tokens, batch.lengths, mask, batch.begins), 1.0)
            ((logp_T * weight_T).sum() + 0.1 * entropy_T.sum()).backward()
            if i:
                seconds[share].append(time.perf_counter() - began)
            gradients[share] = torch.cat([p.grad.flatten() for p in hf.parameters() if p.grad is not None])
    difference = ((gradients[True] - gradients[False]).norm() / gradients[False].norm()).item()
    assert difference <= SAME, f"the gradients differ by {difference:.1e} of their norm"
    flat, shared = (statistics.median(seconds[share]) for share in (False, True))
    return {
        "flat_tokens": len(tokens),
        "tree_tokens": len(tree.keep),
        "fewer": len(tokens) / len(tree.keep),
        "flat_s": flat,
        "tree_s": shared,
        "ratio": flat / shared,
        "gradient_difference": difference,
    }


# ── the command ──────────────────────────────────────────────────────────────


def show(found: dict) -> None:
    """Print all figures, and one line for each target."""
    rollout, few, tree = found["rollout"], found["slowest"], found["tree"]
    print(f"{'rollout':<20}{'wall s':>8}{'engine s':>10}{'busy':>7}{'tools s':>9}{'polls':>7}")
    for name, rows in found["sides"].items():
        for row in rows:
            print(
                f"{name:<20}{row['wall_s']:>8.2f}{row['engine_s']:>10.2f}{row['busy']:>7.1%}{row['tools_s']:>9.1f}"
                f"{row['polls']:>7}"
            )
    print(
        f"tools take {rollout['tool_share']:.0%} of an episode that is alone; in lockstep with tools side by side the "
        f"engine waits {rollout['lockstep_waits']:.0%}; bound on the speed against that {rollout['bound_of_that']:.2f}"
    )
    for row in few:
        print(
            f"few at once: {row['wall_s']:.2f} s; the slowest one's own sampling and tools {row['slowest_s']:.2f} s "
            f"(tools {row['slowest_tools_s']:.2f} s), alone {row['alone_s']:.2f} s"
        )
    print(
        f"paths {tree['flat_tokens']} tokens, {tree['flat_s']:.3f} s; tree {tree['tree_tokens']} tokens, "
        f"{tree['tree_s']:.3f} s, {tree['ratio']:.2f} times as fast; gradients differ by "
        f"{tree['gradient_difference']:.1e}"
    )
    ratio = statistics.median(row["ratio"] for row in few)
    for name, value, goal, holds in (
        ("engine-busy", rollout["busy"], BUSY, rollout["busy"] >= BUSY and rollout["tool_share"] >= 0.5),
        ("lockstep-one-after-another", *against(rollout["against_one_after_another"], LOCKSTEP)),
        ("lockstep-side-by-side", *against(rollout["against_side_by_side"], LOCKSTEP)),
        ("slowest-episode", ratio, SLOWEST, ratio <= SLOWEST),
        ("tree-tokens", *against(tree["fewer"], TREE)),
    ):
        print(f"target {name} {value:.2f} {goal} {'ok' if holds else 'miss'}", flush=True)


def against(value: float, goal: float) -> tuple[float, float, bool]:
    """Return the value, its goal, and whether the value reaches the goal."""
    return value, goal, value >= goal


def arguments() -> argparse.Namespace:
    """Return the parsed command line, with the sizes of `--quick` or of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few episodes, short tools")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    full = dict(episodes=256, few=64, turns=4, tokens=12, sequences=64, rounds=3, trees=8, repeats=3, median=MEDIAN)
    quick = dict(episodes=12, few=6, turns=3, tokens=4, sequences=4, rounds=1, trees=2, repeats=1, median=0.01)
    vars(args).update(quick if args.quick else full)
    return args


def main() -> None:
    """Print figures and targets; write JSON."""
    args = arguments()
    about = measured_on("cpu", args.json) | {"spread": SPREAD}
    about |= {name: value for name, value in vars(args).items() if name != "json"}
    import torch

    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session.open import open_run
    from spmdrl.train import JOB

    torch.set_num_threads(1)
    found: dict = {"tree": trees(args)}
    with tempfile.TemporaryDirectory() as work:
        config = from_command_line(flags(Path(work), args)).config
        with open_run(JOB, Loaded(config)) as run:
            with run.memory.rollout_phase():
                rollouts = Rollouts(run, args)
                found["sides"] = rollouts.sides(args.rounds)
                one = [rollouts.time(rollouts.plan(200 + i, 1))["engine_s"] for i in range(3)]
                found["rollout"] = compared(found["sides"], statistics.median(one), args)
                found["slowest"] = rollouts.alone(args.rounds)
            show(found)
            save(args.json, about, **found)


if __name__ == "__main__":
    main()
