"""Compares fixed assignment, queue, over-sampling and partial rollouts for response lengths with a long tail.

    python benchmarks/longtail.py [--quick] [--json FILE] [--engine vllm] [--ranks 2] [--settings static partial]

It runs real training (`spmdrl.train.train`, one engine per rank, real updates and pushes). Only the length of each
response is fixed in advance, because a random policy would end responses at arbitrary lengths. Stop tokens are ignored,
and sample s of the p-th prompt has `length(p, s)` tokens, over as many steps as needed. So every setting has the same
prompts with the same lengths. The lengths are log-normal: their natural logarithm has standard deviation `--spread`,
half of the variance comes from the prompt and half from the sample, and the median is a twelfth of `max_new_tokens`.
Most responses are short, and a few are cut at the limit, as in DAPO, where the limit is 20,480 tokens
(https://arxiv.org/abs/2503.14476).

All settings run in one process on the same engine and policy, and take turns over `--rounds`. A run that is stopped, by
Ctrl-C or by `--seconds`, reports the settings of which it has counted steps. The first steps of a
setting, in which no samples are carried over from earlier ones, are not counted. Short responses end first, so
over-sampling trains on shorter ones. The figure to compare is therefore trained tokens per second, which is printed
together with the time of a step. vLLM batches continuously. The HF engine samples one prompt length at a time, so
carried responses have to wait.

The seconds of an engine's step are fitted as a + b n, where n is the number of its running sequences. A training step
with full engines to its end would take tokens / sequences x (a + b sequences), plus the time that is not sampling. The
time of `static` divided by this time is an upper bound of the speedup by any schedule of the same work.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Remove this folder from the path, because its megatron.py would hide the package `megatron`.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "benchmarks")]

from benchmarks._about import available, measured_on, refuse, save  # noqa: E402
from benchmarks._engine_steps import EngineSteps  # noqa: E402

SETTINGS = {
    "static": dict(assignment="static", oversample=1.0, partial_steps=0),
    "queue": dict(assignment="queue", oversample=1.0, partial_steps=0),
    "oversample": dict(assignment="queue", oversample=1.5, partial_steps=0),
    "partial": dict(assignment="queue", oversample=2.0, partial_steps=3),
}
TITLES = {"oversample": "queue, oversample 1.5", "partial": "queue, oversample 2, partial 3"}
GOAL = 1.5
SPREAD, OWN, MEDIAN = 1.0, 0.5, 1 / 12
"""Standard deviation of the log of a length, share of its variance that comes from the sample, and median length as a
share of the maximum."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("a") / (1 + len(solution_str))
"""


def length(position: int, sample: int, longest: int, spread: float) -> int:
    """Return the number of tokens of a response, which depends only on its prompt and sample."""
    prompt, own = (random.Random(key).gauss(0, 1) for key in (f"{position}", f"{position}.{sample}"))
    exponent = spread * (math.sqrt(1 - OWN) * prompt + math.sqrt(OWN) * own)
    return max(1, min(longest, round(MEDIAN * longest * math.exp(exponent))))


def random_model(folder: Path) -> Path:
    """Write a random model with the shape of the tiny policy and a longer context, and return its folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tiny = ROOT / "spmdrl" / "assets" / "tiny"
    values = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 1024}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**values)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


class Watched(EngineSteps):
    """Sets the length of each request, and records the work of each step."""

    def __init__(self, engine, longest: int, spread: float):
        super().__init__(engine)
        self.longest, self.spread = longest, spread

    def submit(self, request) -> None:
        """Submit a request for the remaining tokens of its fixed length."""
        before = self.longest - request.max_new_tokens
        position, sample = request.key[:2]
        request.max_new_tokens = length(position, sample, self.longest, self.spread) - before
        assert request.max_new_tokens > 0, "a complete response is not requested again"
        super().submit(request)


def side(folder: Path, args) -> None:
    """Run every setting in turns on one rank, and write the work of its engine."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    import torch

    torch.set_num_threads(1)
    from spmdrl.config.load import Loaded, from_command_line
    from spmdrl.session.open import open_run
    from spmdrl.train import JOB, train

    flags = {
        "run.dir": folder / "run",
        "model.path": folder / "model",
        # The self check is off because its requests would count as work of the engine.
        "model.self_check": "false",
        "reward.function": folder / "reward.py",
        "rollout.engine": args.engine,
        "rollout.prompts_per_step": args.prompts,
        "rollout.samples_per_prompt": args.samples,
        "rollout.max_sequences": args.sequences,
        "rollout.max_prompt_tokens": 32,
        "rollout.max_new_tokens": args.longest,
        "data.eval": "",
        "eval.every": 0,
        "checkpoint.at_end": "false",
        "tracking.samples": 0,
        "tracking.trackers": "jsonl",
        "tracking.console": "plain",
        # Weights only have to get new versions, as in a real run; the policy does not have to learn.
        "optimizer.lr": 1e-6,
    }
    config = from_command_line([word for name, value in flags.items() for word in (f"--{name}", str(value))]).config
    record = open(folder / f"rank_{os.environ.get('RANK', '0')}.jsonl", "a", buffering=1)  # noqa: SIM115 (to the end)
    with open_run(JOB, Loaded(config)) as run:
        run.memory.engine.stop = torch.zeros(0, dtype=torch.int64, device=run.world.device)
        run.memory.engine.stop_tokens = []
        watched, experience = Watched(run.memory.engine, args.longest, args.spread), run.experience

        def seen(step: int):
            watched.taken()
            done = experience(step)
            carried = sum(e.generated for group in done.carried for e in group.episodes)
            row = {"sampled": watched.tokens, "carried": carried, "polls": watched.polls}
            record.write(json.dumps(row | {"device": run.world.device.type}) + "\n")
            return done

        run.experience = seen
        for turn in range(args.rounds * len(args.settings)):
            setting = SETTINGS[args.settings[turn % len(args.settings)]]
            for name, value in setting.items():
                setattr(run.cfg.rollout, name, value)
            # Each turn uses the same prompts from the first one on, but different step numbers.
            first, last = turn * args.steps, (turn + 1) * args.steps
            run.checkpoints.start_step, run.cfg.run.steps, run.state.draws = first, last, 0
            run.sampler.start_step = run.sampler.step = first
            run.sampler.draws, run.sampler.carried = 0, []
            train(run)
        torch.distributed.barrier(group=run.world.host_group)


def median_ms(polls: list[tuple[int, float]], low: float, high: float) -> float:
    """Return the median milliseconds of engine steps with `low` to `high` running sequences."""
    return 1000 * statistics.median([s for n, s in polls if low < n <= high] or [math.nan])


def fit(polls: list[tuple[int, float]]) -> tuple[float, float]:
    """Return (a, b) of the fit seconds = a + b n: least squares over the median of every n, weighted by its count."""
    seen: dict[int, list[float]] = {}
    for n, seconds in polls:
        seen.setdefault(n, []).append(seconds)
    points = [(n, statistics.median(all_), len(all_)) for n, all_ in seen.items()]
    weight = sum(w for _, _, w in points)
    mean_n, mean_s = (sum(p[i] * p[2] for p in points) / weight for i in (0, 1))
    spread = sum(w * (n - mean_n) ** 2 for n, _, w in points)
    b = sum(w * (n - mean_n) * (s - mean_s) for n, s, w in points) / spread
    return mean_s - b * mean_n, b


def bound(static: dict, model: tuple[float, float], args) -> dict:
    """Return the step time of the setting `static` if engines were always full, and the measured time's ratio to it."""
    a, b = model
    tokens = static["mean_length"] * args.prompts * args.samples / args.ranks
    sampling = tokens / args.sequences * (a + b * args.sequences)
    step = static["step_mean_s"] - static["rollout_mean_s"] + sampling
    return {"a_ms": 1000 * a, "b_ms": 1000 * b, "step_s": step, "ratio": static["step_mean_s"] / step}


def summary(name: str, lines: list[dict], ranks: list[list[dict]], args) -> dict:
    """Return the figures of one setting. lines: its steps in metrics.jsonl. ranks: records of the engines."""
    counted = [i for i in range(len(lines)) if i % args.steps >= args.skip]
    kept, sequences = [lines[i] for i in counted], args.prompts * args.samples
    trained = sum(row["response_length/mean"] * sequences for row in kept)
    seconds = sum(row["time/step"] for row in kept)
    carried = [sum(rank[i]["carried"] for rank in ranks) for i in range(len(lines))]
    # Tokens that are carried over to the next step are not dropped.
    dropped = sum(
        sum(rank[i]["sampled"] for rank in ranks)
        + (carried[i - 1] if i % args.steps else 0)
        - carried[i]
        - lines[i]["response_length/mean"] * sequences
        for i in counted
    )
    polls = [poll for rank in ranks for i in counted for poll in rank[i]["polls"]]
    return {
        "setting": name,
        "step_s": statistics.median(row["time/step"] for row in kept),
        "step_mean_s": seconds / len(kept),
        "rollout_mean_s": statistics.mean(row["time/rollout"] + row.get("time/exchange", 0) for row in kept),
        "rollout_s": statistics.median(row["time/rollout"] for row in kept),
        "update_s": statistics.median(row["time/update"] for row in kept),
        "trained_tokens_per_s": trained / seconds,
        "mean_length": trained / sequences / len(kept),
        "longest": max(row["response_length/max"] for row in kept),
        "stale_share": sum(row.get("rollout/stale_tokens", 0) for row in kept) / trained,
        "dropped_share": dropped / trained,
        "engine_steps": len(polls) / len(ranks) / len(kept),
        "engine_step_ms_few": median_ms(polls, 0, args.sequences / 8),
        "engine_step_ms_full": median_ms(polls, args.sequences * 3 / 4, math.inf),
        "steps": len(kept),
        "polls": polls,
    }


def engine_of(wanted: str) -> str:
    """Resolve `auto` as the program does."""
    return ("vllm" if find_spec("vllm") else "hf") if wanted == "auto" else wanted


def default_ranks() -> int:
    """Return the default number of ranks: two on a CPU, otherwise one per GPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def measure(args) -> tuple[dict[str, dict], str]:
    """Start the ranks and read what they wrote; return the figures of each setting, and why the run ended early, or "".

    Raises:
        RuntimeError: the ranks ended before a step was counted; the message has the end of their output.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        random_model(folder / "model")
        (folder / "reward.py").write_text(REWARD)
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        words = [word for name in NUMBERS for word in (f"--{name}", str(getattr(args, name)))]
        words += ["--engine", args.engine, "--settings", *args.settings, "--side", work]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen([*launch, __file__, *words], env=environment, stdout=log, stderr=log)
            early = waited(process, args.seconds)
        rows = collect(folder, args)
        if early and not rows:
            raise RuntimeError(f"no step was counted, {early}:\n{(folder / 'log').read_text()[-3000:]}")
        return rows, early


def waited(process: subprocess.Popen, seconds: float) -> str:
    """Wait for the ranks, at most for some seconds; return why they ended early, or an empty text."""
    early = ""
    try:
        if code := process.wait(seconds or None):
            early = f"exit code {code}"
    except subprocess.TimeoutExpired:
        early = f"stopped after {seconds:g} s"
    except KeyboardInterrupt:
        early = "stopped by a signal"
    if process.poll() is None:
        process.terminate()  # When it is terminated, torchrun ends its ranks.
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
    return early


def whole_lines(file: Path) -> list[dict]:
    """Return the rows of a file of JSON lines, without a last line that is not complete."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def collect(folder: Path, args) -> dict[str, dict]:
    """Return the figures of each setting that has counted steps, from the files of a run that may not be complete."""
    lines = whole_lines(folder / "run" / "metrics.jsonl")
    ranks = [whole_lines(folder / f"rank_{rank}.jsonl") for rank in range(args.ranks)]
    done = min(map(len, [lines, *ranks]))
    out = {}
    for place, name in enumerate(args.settings):
        turns = range(place, args.rounds * len(args.settings), len(args.settings))
        steps = [i for turn in turns for i in range(turn * args.steps, (turn + 1) * args.steps) if i < done]
        if len(steps) > args.skip:
            out[name] = summary(name, [lines[i] for i in steps], [[rank[i] for i in steps] for rank in ranks], args)
            out[name]["device"] = ranks[0][steps[0]]["device"]
    return out


NUMBERS = ("ranks", "prompts", "samples", "sequences", "longest", "steps", "skip", "rounds", "spread")


def arguments() -> argparse.Namespace:
    """Return the parsed command line, with the defaults of `--quick` or of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="responses of up to 256 tokens, one turn of 8 steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=("auto", "vllm", "hf"), default="auto")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--ranks", type=int, default=0, help="0: two on a CPU, one for each GPU")
    parser.add_argument("--prompts", type=int, default=16, help="a step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--sequences", type=int, default=32, help="that an engine runs at a time")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest response. 0: 512, quick 256")
    parser.add_argument("--spread", type=float, default=SPREAD, help="standard deviation of the log of a length")
    parser.add_argument("--steps", type=int, default=0, help="of one turn of a setting. 0: 16, quick 8")
    parser.add_argument("--skip", type=int, default=4, help="first steps of a turn, which are not counted")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each setting. 0: 2, quick 1")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time; 0: run to the end")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.engine, args.ranks = engine_of(args.engine), args.ranks or default_ranks()
    for name, full, quick in (("longest", 512, 256), ("steps", 16, 8), ("rounds", 2, 1)):
        setattr(args, name, getattr(args, name) or (quick if args.quick else full))
    return args


def show_lengths(args: argparse.Namespace) -> dict[int, int]:
    """Print the job and its response lengths; return the length in tokens by percentile."""
    drawn = sorted(
        length(p, s, args.longest, args.spread) for p in range(args.prompts * args.steps) for s in range(args.samples)
    )
    share = {q: drawn[int(q / 100 * len(drawn))] for q in (50, 90, 99)}
    print(
        f"{args.ranks} ranks, engine {args.engine}, {args.prompts} prompts x {args.samples} samples, "
        f"{args.sequences} sequences an engine; lengths: mean {statistics.mean(drawn):.0f}, "
        + ", ".join(f"{q}% up to {n}" for q, n in share.items())
        + f", {sum(n == args.longest for n in drawn) / len(drawn):.1%} cut at {args.longest}"
    )
    return share


def show(rows: dict[str, dict]) -> None:
    """Print the table of the settings."""
    print(
        f"{'setting':<33}{'step s':>8}{'rollout s':>10}{'update s':>9}{'tokens/s':>9}{'length':>8}{'stale':>7}"
        f"{'dropped':>9}{'engine steps':>13}{'ms few/full':>13}"
    )
    for name, row in rows.items():
        print(
            f"{TITLES.get(name, name):<33}{row['step_s']:>8.3f}{row['rollout_s']:>10.3f}{row['update_s']:>9.3f}"
            f"{row['trained_tokens_per_s']:>9.0f}{row['mean_length']:>8.1f}{row['stale_share']:>7.1%}"
            f"{row['dropped_share']:>9.1%}{row['engine_steps']:>13.0f}"
            f"{row['engine_step_ms_few']:>7.1f}/{row['engine_step_ms_full']:.1f}"
        )


def show_ratios(rows: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Print the ratios of every setting to `static` and return them."""
    ratios = {}
    for name in [name for name in rows if name != "static"] if "static" in rows else []:
        ratios[name] = {
            "step_time": rows["static"]["step_s"] / rows[name]["step_s"],
            "trained_tokens_per_s": rows[name]["trained_tokens_per_s"] / rows["static"]["trained_tokens_per_s"],
        }
        print(
            f"static against {name}: step {ratios[name]['step_time']:.2f} times as fast, "
            f"{ratios[name]['trained_tokens_per_s']:.2f} times the trained tokens a second"
        )
    return ratios


def main() -> None:
    """Print a table and the target; write JSON."""
    args = arguments()
    if args.side:
        return side(args.side, args)
    kind = available()
    about = measured_on(kind, args.json) | {"engine": args.engine, "own": OWN, "median": MEDIAN}
    about |= {name: getattr(args, name) for name in NUMBERS} | {"lengths": show_lengths(args)}
    rows, early = measure(args)
    if others := {row.pop("device") for row in rows.values()} - {kind}:
        refuse(f"the ranks ran on {others.pop()}, not on {kind}")
    about |= {"settings": {name: SETTINGS[name] for name in rows}, "ended_early": early}
    show(rows)
    polls = [poll for row in rows.values() for poll in row.pop("polls")]
    model, most = fit(polls), None
    print(f"a step of the engine: {1000 * model[0]:.2f} ms + {1000 * model[1]:.3f} ms for each sequence")
    if "static" in rows:
        most = bound(rows["static"], model, args)
        print(f"bound on the speed-up, with engines that are full to the end: {most['ratio']:.2f}")
    ratios = show_ratios(rows)
    save(args.json, about, settings=rows, ratios=ratios, bound=most)
    if "partial" in ratios:
        ratio = ratios["partial"]["step_time"]
        print(f"target longtail-step-time {ratio:.2f} {GOAL} {'ok' if ratio >= GOAL else 'miss'}")
    if early:
        missing = ", ".join(name for name in args.settings if name not in rows)
        sys.exit(f"{early}: {f'no counted steps of {missing}' if missing else 'fewer steps than asked'}")


if __name__ == "__main__":
    main()
