"""Composed settings at random: each number is a configuration, which is trained, interrupted, laid out, taken apart.

    python -m tests.ranks.fuzz 17 [18 ...]        configurations by number, one JSON line each

A configuration is a preset and a few settings of other sections, read as a run reads them (flags, then `check`). What
is refused at start counts as refused; the flags that the message names are taken away until the rest is accepted, so
that every number ends in a run. Of a run are asked:

- one rank and two (data-parallel, sp, copies or split) give the same metrics and weights;
- a run that goes on from the checkpoint of its middle is the same to the last bit;
- without one of its settings it is another run, or, if the setting is one of those that change speed and memory alone
  (`free` in its declaration), the same one;
- every number is finite.
"""

import contextlib
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from spmdrl.config.checks import check
from spmdrl.config.composition import aggregation
from spmdrl.config.declare import Free, declared
from spmdrl.config.fields import ConfigError, flag
from spmdrl.config.load import Loaded, from_command_line
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import Config
from spmdrl.config.use import check_use
from spmdrl.hub.folder import TINY
from spmdrl.rl.build import build_run
from spmdrl.session.session import Session
from spmdrl.spmd.seeds import generator_for
from spmdrl.tracking.metrics import Timer
from spmdrl.train import train
from tests.ranks.cases import float64_softmax, full_weights, small_model
from tests.ranks.demo import metrics, untimed
from tests.ranks.harness import RankError, run_ranks

STEPS, SEED = 3, 77
TOLERANCE = 1e-5
"""Tolerance: of metrics relative, of weights relative to their way in the run. float64 models have float32 norms."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    n = 1 + len(solution_str)
    parts = {"early": float(solution_str[:1] in "abcdefg"), "vowels": sum(solution_str.count(c) for c in "aeiou") / n}
    cost = sum(solution_str.count(c) for c in "xyz0123") / n
    score = round(0.6 * parts["early"] + 0.4 * parts["vowels"] + 0.05 * (len(solution_str) % 3), 3)
    return {"score": score, "cost": cost, **parts}
"""
LAYOUTS = {
    "2 ranks": {},
    "2 ranks, sp 2": {"parallel.sp": "2"},
    "2 ranks, 2 copies": {"parallel.dp_replicate": "2"},
    "1 trainer, 1 sampler": {"parallel.placement": "split", "parallel.rollout_ranks": "1"},
}

HORIZON = 8
"""Tokens of a response, unless drawn otherwise."""
CUT = {"rollout.oversample": ("1.75",), "rollout.max_sequences": ("8",), "rollout.max_new_tokens": ("16",)}
STALE = CUT | {"rollout.partial_steps": ("2",)}
GAE = {"algo.preset": ("ppo", "pf_ppo", "safe_rlhf")}
TWICE = {"algo.updates_per_step": ("2", "4")}
KL = {"algo.kl_coef": ("0.05", "0.3")}
SETTINGS: dict[str, tuple[tuple[str, ...], dict]] = {
    "algo.advantage": (("grpo", "dr_grpo", "rloo", "reinforce", "opo", "gdpo", "gae", "reinforce_plus_plus"), {}),
    "algo.loss": (("ppo", "reinforce", "gspo", "cispo", "sapo", "gmpo", "kl_cov", "dppo_kl", "dro", "gpg"), TWICE),
    "algo.aggregation": (("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"), {}),
    "algo.updates_per_step": (("2", "4"), {}),
    "algo.gamma": (("0.9",), {"algo.preset": ("ppo", "reinforce_pp", "gigpo", "prime")}),
    "algo.lam": (("0.8",), GAE),
    "algo.critic_lam": (("0.7",), GAE),
    "algo.length_adaptive": (("0.4",), {"algo.preset": ("vapo",)}),
    "algo.step_weight": (("0.5",), {"algo.preset": ("gigpo",)}),
    "algo.part_weights": (("early=2 vowels=0.5",), {"algo.preset": ("gdpo",)}),
    "algo.clip_low": (("0.03",), TWICE | {"algo.loss": ("ppo", "gspo", "gspo_token", "gmpo")}),
    "algo.clip_high": (("0.03",), TWICE | {"algo.loss": ("ppo", "gspo", "cispo", "gmpo")}),
    "algo.dual_clip": (("1.1",), TWICE | {"algo.loss": ("ppo",)}),
    "algo.tau_pos": (("2.0",), TWICE | {"algo.loss": ("sapo",)}),
    "algo.tau_neg": (("3.0",), TWICE | {"algo.loss": ("sapo",)}),
    "algo.cov_ratio": (("0.2",), TWICE | {"algo.loss": ("kl_cov", "clip_cov")}),
    "algo.cov_kl_coef": (("0.5",), TWICE | {"algo.loss": ("kl_cov",), "algo.cov_ratio": ("0.2",)}),
    "algo.cov_low": (("-0.5",), TWICE | {"algo.loss": ("clip_cov",), "algo.cov_ratio": ("0.2",)}),
    "algo.ratio_cap": (("1.1",), TWICE | {"algo.loss": ("dppo_tv", "dppo_kl")}),
    "algo.beta": (("0.3",), TWICE | {"algo.loss": ("dro",)}),
    "algo.eta": (("0.3",), {"algo.preset": ("sppo",)}),
    "algo.positive_coef": (("0.2",), {}),
    "algo.kl_coef": (("0.05", "0.3"), {}),
    "algo.kl_in": (("reward",), KL),
    "algo.kl_estimator": (("k1", "abs", "k2", "k1+", "k3+"), KL),
    "algo.kl_target": (("5.0",), KL | {"algo.kl_horizon": ("50",)}),
    "algo.entropy_coef": (("0.01", "-0.02"), {}),
    "algo.old_logp": (("policy", "rollout"), {}),
    "algo.skip_zero_advantage": (("true",), {}),
    "correction.kind": (("tis_sequence", "icepop", "mis_token", "mis_sequence"), STALE),
    "correction.low": (("0.95",), STALE | {"correction.kind": ("icepop", "mis_token", "mis_sequence")}),
    "correction.high": (("1.05",), STALE | {"correction.kind": ("tis_token", "icepop", "mis_sequence")}),
    "correction.reject_low": (("0.98",), STALE),
    "correction.reject_high": (("1.02",), STALE),
    "shaping.reward_coef": (("0.5", "-2"), {}),
    "shaping.clip_low": (("0.2",), {}),
    "shaping.clip_high": (("0.12",), {}),
    "shaping.normalize": (("batch", "running"), {}),
    "shaping.overlong_buffer": (("4",), {}),
    "shaping.overlong_factor": (("0.5",), {"shaping.overlong_buffer": ("4",)}),
    "shaping.mask_cut": (("true",), {}),
    "shaping.length_penalty": (("linear", "group"), {}),
    "shaping.length_coef": (("0.3",), {"shaping.length_penalty": ("linear", "group")}),
    "filter.keep": (("mixed", "accuracy_range"), {}),
    "filter.metric": (("vowels", "early"), {"filter.keep": ("mixed",)}),
    "filter.resample": (("pow", "pow=1", "max_min", "max_random", "best_random", "best_worst"), GAE),
    "filter.replay_steps": (("1", "2"), GAE),
    "filter.bad_sample": (("skip",), {}),
    "critic.lr": (("2e-3", "2e-2"), GAE),
    "critic.clip": (("none", "0.02"), GAE | TWICE | {"critic.lr": ("2e-2",)}),
    "critic.warmup_steps": (("1",), GAE),
    "process_reward.lr": (("1e-3",), {"algo.preset": ("prime",)}),
    "process_reward.beta": (("0.5",), {"algo.preset": ("prime",)}),
    "process_reward.process_coef": (("0.3",), {"algo.preset": ("prime",)}),
    "process_reward.outcome_coef": (("0.3",), {"algo.preset": ("prime",)}),
    "safety.cost": (("cost",), {"algo.preset": ("ppo", "grpo", "rloo")}),
    "safety.limit": (("0.02",), {"algo.preset": ("safe_rlhf",)}),
    "safety.multiplier": (("0.3",), {"algo.preset": ("safe_rlhf",)}),
    "safety.lr": (("1.0",), {"algo.preset": ("safe_rlhf",)}),
    "safety.cost_model": (("SCALAR",), {"algo.preset": ("ppo", "grpo")}),
    "lora.rank": (("2", "4"), {}),
    "lora.alpha": (("4",), {"lora.rank": ("4",)}),
    "lora.targets": (("q_proj v_proj",), {"lora.rank": ("4",)}),
    "lora.push": (("merged",), {"lora.rank": ("4",)}),
    "reference.enabled": (("on",), {}),
    "reference.path": (("OTHER",), KL),
    "reference.refresh_every": (("1", "2"), KL),
    "reward.model": (("SCALAR",), {}),
    "reward.model_coef": (("0.3",), {"reward.model": ("SCALAR",)}),
    "rollout.temperature": (("0.7", "1.3"), {}),
    "rollout.samples_per_prompt": (("2", "4"), {}),
    "rollout.oversample": (("1.5", "2.0"), CUT),
    "rollout.partial_steps": (("1", "3"), CUT),
    "rollout.max_sequences": (("5",), {}),
    "rollout.deterministic": (("true",), {}),
    "rollout.quantization": (("int8",), {}),
    "rollout.push_bucket_mib": (("1",), {}),
    "rollout.sleep_level": (("0", "2"), {}),
    "optimizer.weight_decay": (("0.1",), {}),
    "optimizer.clip_grad_norm": (("0.01", "0"), {}),
    "optimizer.schedule": (("linear", "cosine"), {}),
    "optimizer.warmup_steps": (("2",), {}),
    "optimizer.min_lr_ratio": (("0.5",), {"optimizer.schedule": ("linear", "cosine")}),
    "optimizer.betas": (("0.8 0.95",), {}),
    "optimizer.eps": (("1e-4",), {}),
    "policy.max_tokens_per_microbatch": (("40", "70"), {}),
    "policy.activation_checkpointing": (("full",), {}),
    "policy.gather": (("once", "layers"), {}),
    "policy.reduce_gradients": (("each",), {}),
    "policy.attention": (("padded", "eager"), {}),
    "policy.chunked_loss": (("false",), {}),
    "policy.share_prompts": (("false",), {}),
    "policy.offload": (("host", "disk"), {}),
    "reference.offload": (("disk",), KL),
    "run.deterministic": (("true",), {}),
    "data.limit": (("16",), {}),
    "data.shuffle": (("false",), {}),
    "eval.every": (("2",), {"data.eval": ("builtin:reverse:eval",), "eval.prompts": ("6",)}),
    "eval.samples": (("2",), {"eval.every": ("2",), "data.eval": ("builtin:reverse:eval",), "eval.prompts": ("6",)}),
    "checkpoint.background": (("true",), {}),
    "reward.workers": (("2",), {}),
}
"""Setting -> (values, settings with which it is of use: their values). Values are strong enough for few steps."""

ALIKE: dict[str, tuple[str, ...]] = {
    # Means over tokens that the update runs are then of fewer sequences, see docs/metrics.md.
    "algo.skip_zero_advantage": (
        "entropy",
        "kl/",
        "clip_fraction",
        "ratio",
        "positive",
        "logp_diff",
        "mismatch",
        "part",
    ),
    # The same number from elsewhere, as long as all samples are of the newest weights.
    "algo.old_logp": (),
    # No sample here is bad.
    "filter.bad_sample": ("filter/bad_samples",),
}
"""Settings that give the same run here though no law is declared with them -> metrics that may differ."""
RATIOS = (
    *("algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.tau_pos", "algo.tau_neg", "algo.ratio_cap"),
    *("algo.beta", "algo.cov_kl_coef", "critic.clip"),
)
"""Settings that act only where a ratio of the update is not 1, or a value has moved in it."""
STALENESS = {"rollout.partial_steps", "filter.replay_steps", "rollout.quantization"}
"""Settings with which samples come from other weights than the trainer's."""
MISMATCHES = ("correction.low", "correction.high", "correction.reject_low", "correction.reject_high")
"""Settings on the ratio of engine and trainer: few tokens are not of the newest weights, and they show it by chance."""


@dataclass
class Case:
    """One configuration and its findings."""

    number: int
    layout: str
    flags: dict[str, str]
    """Flags of the run, besides BASE."""
    refused: list[str] = field(default_factory=list)
    """Messages on the settings that were taken away."""
    problems: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    """Setting that was taken away from the run -> `differs`, `same`, `refused`."""
    seconds: float = 0.0


def draw(number: int) -> Case:
    """Draws the configuration of a number."""
    rng = generator_for(SEED, number)
    flags = {"algo.preset": rng.choice(sorted(PRESETS))} if rng.random() < 0.7 else {}
    for name in rng.sample(sorted(SETTINGS), rng.randrange(2, 7)):
        values, companions = SETTINGS[name]
        # Mostly with what gives it something to do.
        if rng.random() < 0.9:
            for other, choices in companions.items():
                if flags.get(other) not in choices:
                    flags[other] = rng.choice(choices)
        flags[name] = rng.choice(values)
    preset = flags.get("algo.preset", "grpo")
    if preset == "distill":
        flags["reference.path"] = "OTHER"
    if preset == "vapo":
        flags.setdefault("critic.warmup_steps", "1")
        flags.setdefault("algo.length_adaptive", "0.4")
    keep = flags.get("filter.keep", PRESETS[preset].settings.get("filter.keep"))
    if keep:
        flags |= {"filter.max_rounds": "50"} | (
            {"filter.low": "0.02", "filter.high": "0.98"} if keep != "mixed" else {}
        )
    return Case(number, rng.choice([*LAYOUTS, "2 ranks"]), flags)


class Bench:
    """Models and files that configurations share."""

    def __init__(self, root: Path):
        self.root = root
        self.models = {name: root / name for name in ("POLICY", "OTHER", "SCALAR")}
        for seed, (name, folder) in enumerate(self.models.items()):
            small_model(folder, seed, name == "SCALAR", pad_token_id=None)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TINY / file, folder / file)
            # A random model ends by chance in one of its 47 tokens: more often, and responses differ in length.
            ends = {"eos_token_id": [2, 5, 11, 17, 23], "bos_token_id": 1}
            (folder / "generation_config.json").write_text(json.dumps(ends))
        (root / "reward.py").write_text(REWARD)

    def words(self, flags: dict[str, str]) -> list[str]:
        """Words of the command line of a run."""
        base = {
            "run.steps": STEPS,
            "run.seed": 3,
            "model.path": "POLICY",
            "model.dtype": "float64",
            "optimizer.lr": 1e-2,
            "rollout.engine": "hf",
            "rollout.prompts_per_step": 4,
            "rollout.samples_per_prompt": 3,
            "rollout.max_new_tokens": HORIZON,
            "rollout.max_prompt_tokens": 16,
            "rollout.assignment": "static",
            "data.limit": 64,
            "data.eval": "",
            "reward.function": self.root / "reward.py",
            "reward.timeout": 60,
            "eval.every": 0,
            "checkpoint.every": 1,
            "checkpoint.keep": 9,
            "tracking.trackers": "jsonl",
            "tracking.samples": 100,
        }
        out = []
        for name, value in (base | flags).items():
            out += [flag(name), *([""] if value == "" else str(self.models.get(str(value), value)).split())]
        return out

    def config(self, flags: dict[str, str], layout: str = "") -> Config:
        """Config that the command line of a run gives. Raises ConfigError where it is refused."""
        return self._checked(flags, layout).config

    def refusal(self, flags: dict[str, str], layout: str = "") -> str:
        """Message with which `spmdrl.train` refuses a run at start; empty where it does not."""
        try:
            check_use(self._checked(flags, layout))
        except ConfigError as error:
            return str(error)
        return ""

    def _checked(self, flags: dict[str, str], layout: str) -> Loaded[Config]:
        loaded = from_command_line(self.words(flags | LAYOUTS.get(layout, {})))
        check(loaded.config, 2 if layout else 1)
        return loaded


# ── one configuration ────────────────────────────────────────────────────────


def accepted(bench: Bench, case: Case) -> None:
    """Takes away the settings that are refused, naming them, until the rest is a run."""
    for layout in ("", case.layout):
        while said := bench.refusal(case.flags, layout):
            case.refused.append(said)
            # A line begins with the flag to change; others that it names are what it does not go with.
            named = re.findall(r"^ *--([\w.-]+)", said, re.MULTILINE) + re.findall(r"--([\w.-]*\w)", said)
            named = [name.replace("-", "_") for name in named]
            gone = [name for name in named if name in case.flags]
            if gone and gone[0] == named[0]:
                del case.flags[gone[0]]
            elif named and named[0] == "algo.aggregation":
                case.flags["algo.aggregation"] = ""
            elif gone:
                del case.flags[gone[0]]
            elif layout and any(name.startswith("parallel.") for name in named):
                layout = case.layout = "2 ranks"
            else:
                case.problems.append(f"refused by a message that names no flag of the run: {said}")
                return


def one_run(world, cfg: Config, folder: Path) -> dict | None:
    """Runs to the end; returns on rank 0 metrics, samples and weights, and the first step."""
    for seed in (torch.manual_seed, random.seed):
        seed(world.rank)
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    run = build_run(Session(replace(cfg, run=replace(cfg.run, dir=str(folder))), world, Timer()))
    before = full_weights(run.models.policy) if run.models.policy else {}
    first = run.checkpoints.start_step
    train(run)
    weights = {}
    # An evaluation at the end may have left them where they are while the engine samples.
    with run.memory.training_phase():
        if run.models.policy:
            models = {"policy": run.models.policy, **run.models.trained()}
            weights = {f"{name}/{n}": w for name, model in models.items() for n, w in full_weights(model).items()}
    run.close()
    if world.rank:
        return None
    rows = [{k: v for k, v in row.items() if "tokens/s" not in k} for row in untimed(metrics(folder))]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    moved = {f"policy/{n}": w for n, w in before.items()}
    return {"first": first, "rows": rows, "samples": samples, "weights": weights, "before": moved}


def on_one_rank(world, cfg: Config, root: str, middle: int, others: dict[str, Config]) -> dict:
    """Makes the run, the resumed run, and other runs by name; a message stands for one that is refused as it begins."""
    place, out = Path(root), {}
    with float64_softmax():
        out["whole"] = one_run(world, cfg, place / "whole")
        shutil.copytree(place / "whole", place / "resumed", symlinks=True)
        for later in (place / "resumed" / "checkpoints").glob("step_*"):
            if int(later.name[5:]) > middle:
                shutil.rmtree(later)
        out["resumed"] = one_run(world, cfg, place / "resumed")
        for name, other in others.items():
            try:
                out[name] = one_run(world, other, place / f"without_{name}")
            except ValueError as error:
                out[name] = str(error)
    return out


def on_two_ranks(world, cfg: Config, root: str) -> dict | None:
    """Makes the run in another layout."""
    with float64_softmax():
        return one_run(world, cfg, Path(root) / "two")


def differences(want: dict, got: dict, tolerance: float, skip: tuple[str, ...] = ()) -> list[str]:
    """Differences between two runs: metrics, samples, weights. tolerance 0: bit for bit."""
    out = []
    if len(want["rows"]) != len(got["rows"]):
        out.append(f"{len(got['rows'])} steps instead of {len(want['rows'])}")
    for a, b in zip(want["rows"], got["rows"], strict=False):
        names = {name for name in a.keys() | b.keys() if not any(word in name for word in skip)}
        for name in sorted(names):
            x, y = a.get(name), b.get(name)
            if x is None or y is None:
                same = x is None and y is None and (name in a) == (name in b)
            else:
                same = x == y or abs(x - y) <= tolerance * max(1.0, abs(x))
            if not same:
                out.append(f"step {a['step']} {name}: {y} instead of {x}")
    if want["weights"].keys() != got["weights"].keys():
        out.append(f"weights: {sorted(want['weights'].keys() ^ got['weights'].keys())[:4]}")
    else:
        for model in sorted({name.split("/")[0] for name in want["weights"]}):
            mine = [name for name in want["weights"] if name.startswith(model + "/")]
            far = sum((want["weights"][n] - got["weights"][n]).square().sum().item() for n in mine) ** 0.5
            start = [want["before"].get(n, torch.zeros(())) for n in mine]
            moved = sum((want["weights"][n] - s).square().sum().item() for n, s in zip(mine, start, strict=True)) ** 0.5
            if not far <= tolerance * 10 * moved:
                out.append(f"weights of {model}: {far:.1e} apart, moved {moved:.1e}")
    return out


def sample_set(run: dict) -> list:
    """Completions in an order that does not depend on the engine that made them."""
    return sorted((s["step"], s["index"], s["sample"], s["completion"]) for s in run["samples"])


def layout_shows(flags: dict[str, str]) -> str:
    """Reason why two ranks need not give one rank's run; empty where they must."""
    if float(flags.get("rollout.oversample", 1)) > 1:
        return "whom over-sampling cuts goes by the engines"
    return ""


def changes_nothing(name: str, flags: dict[str, str]) -> bool:
    """True for a setting that, by a documented law, changes speed and memory alone."""
    if name == "rollout.max_sequences" and layout_shows(flags):
        return False
    if name == "algo.old_logp" and flags[name] == "rollout" and STALENESS & flags.keys():
        return False
    return declared(Config)[name].free in (Free.KEPT, Free.LAYOUT, Free.COMPUTED, Free.DRAWN, Free.LIMIT) or name in (
        "run.deterministic",
        *ALIKE,
    )


def is_idle(name: str, flags: dict[str, str]) -> bool:
    """True for a setting that is read without effect here: on ratios that are all 1, or equal to what `auto` means."""
    if name == "filter.keep":
        # Groups of a part that is 0 or 1 are mixed where their mean is in between.
        return "filter.keep" in PRESETS[flags.get("algo.preset", "grpo")].settings
    if name == "algo.cov_ratio":
        # Hardly any covariance here is above the paper's lower bound of 1.
        return flags.get("algo.loss") == "clip_cov" and "algo.cov_low" not in flags
    if name == "reference.enabled":
        return "algo.kl_coef" in flags.keys() | PRESETS[flags.get("algo.preset", "grpo")].settings.keys()
    once = "algo.updates_per_step" not in flags and not STALENESS & flags.keys()
    return name in MISMATCHES or (name in RATIOS and once)


def measured_later(name: str, flags: dict[str, str]) -> tuple[str, ...]:
    """Metrics that depend on the moment: without a pass before the update, entropy is of the updates' passes."""
    several = "algo.updates_per_step" in flags or "updates_per_step" in str(
        PRESETS[flags.get("algo.preset", "grpo")].settings
    )
    return ("entropy",) if name == "algo.old_logp" and several else ()


def reaches_nothing(name: str, flags: dict[str, str], run: dict) -> bool:
    """True for a penalty of long responses in a run that has none, such as one whose over-sampling cuts them."""
    if name not in ("shaping.overlong_buffer", "shaping.overlong_factor"):
        return False
    bound = int(flags.get("rollout.max_new_tokens", HORIZON)) - int(flags.get("shaping.overlong_buffer", 0))
    return all(row["response_length/max"] <= bound for row in run["rows"])


def run_case(bench: Bench, number: int, most_without: int = 2) -> Case:
    """Draws, reads, runs and compares."""
    began, case = time.monotonic(), draw(number)
    accepted(bench, case)
    if not case.problems:
        rng = generator_for(SEED, number, 1)
        middle = rng.randrange(1, STEPS)
        with tempfile.TemporaryDirectory() as root:
            try:
                examine(bench, case, root, middle, chosen(bench, case, rng, most_without))
            except RankError as error:
                case.problems.append(cause(str(error)))
    case.seconds = round(time.monotonic() - began, 1)
    return case


def cause(text: str) -> str:
    """Returns the last lines of a rank's traceback, and its message."""
    lines = [line for line in text.splitlines() if line.strip()]
    places = [line.strip() for line in lines if line.strip().startswith("File") and "spmdrl/" in line]
    return f"failed: {lines[0][:600]} ({'; '.join(places[-2:])})"


def chosen(bench: Bench, case: Case, rng, most: int) -> list[str]:
    """Settings to take away, among those without which the rest is another run that is accepted."""
    out, names = [], sorted(set(case.flags) - {"algo.preset", "filter.low", "filter.high", "filter.max_rounds"})
    whole = settled(bench.config(case.flags))
    for name in rng.sample(names, len(names)):
        rest = {k: v for k, v in case.flags.items() if k != name}
        if bench.refusal(rest):
            case.without[name] = "refused"
        elif settled(bench.config(rest)) == whole:
            case.without[name] = "its preset's or default value"
        elif len(out) < most:
            out.append(name)
    return out


def settled(cfg: Config) -> dict:
    """Returns all settings, with the aggregation that an empty one stands for."""
    found = aggregation(cfg)
    return asdict(cfg) | {"aggregation": found, "algo": asdict(replace(cfg.algo, aggregation=""))}


def examine(bench: Bench, case: Case, root: str, middle: int, without: list[str]) -> None:
    """Makes all runs of a configuration; returns the problems found."""
    unsaved = {"checkpoint.every": "0", "checkpoint.at_end": "false"}
    rests = {name: {k: v for k, v in case.flags.items() if k != name} | unsaved for name in without}
    others = {name: bench.config(rest) for name, rest in rests.items()}
    (one,) = run_ranks(on_one_rank, 1, bench.config(case.flags), root, middle, others, limit=300.0)
    whole, resumed = one["whole"], one["resumed"]
    if len(whole["rows"]) != STEPS:
        case.problems.append(f"{len(whole['rows'])} lines of metrics")
    for row in whole["rows"]:
        case.problems += [
            f"step {row['step']} {name} is {value}"
            for name, value in row.items()
            if value is None or (isinstance(value, float) and not math.isfinite(value))
        ]
    if resumed["first"] != middle:
        case.problems.append(f"resumed at {resumed['first']} and not at {middle}")
    case.problems += [f"resumed at {middle}: {line}" for line in differences(whole, resumed, 0.0)[:6]]
    for name in without:
        rest = one[name]
        if isinstance(rest, str):
            case.without[name] = "refused"
            if "--" not in rest:
                case.problems.append(f"without {name}: refused by a message that names no flag: {rest}")
            continue
        free = changes_nothing(name, case.flags)
        skip = ("microbatches", "eval", *ALIKE.get(name, ()), *measured_later(name, case.flags)) if free else ()
        found = differences(whole, rest, TOLERANCE if free else 0.0, skip)
        if sample_set(whole) != sample_set(rest):
            found.append("samples")
        case.without[name] = "differs" if found else "same"
        what = f"{name} {case.flags[name]}"
        if free and found:
            case.problems.append(f"{what} should change nothing: {'; '.join(found[:4])}")
        if not free and not found and not is_idle(name, case.flags) and not reaches_nothing(name, case.flags, whole):
            case.problems.append(f"{what} changes nothing")
    if why := layout_shows(case.flags):
        case.without["layout"] = why
    parallel = {name.split(".")[1]: int(v) if v.isdigit() else v for name, v in LAYOUTS[case.layout].items()}
    cfg = bench.config(case.flags | unsaved, case.layout)
    two = run_ranks(on_two_ranks, 2, cfg, root, parallel=parallel, limit=300.0)[0]
    if not why:
        skip = ("microbatches", "rollout/")
        if {"reward.model", "safety.cost_model"} & case.flags.keys():
            # Two equal responses have scores that differ in their last bit, where they stand in different packs.
            skip += ("advantage/nonzero",)
        found = differences(whole, two, TOLERANCE, skip)
        case.problems += [f"{case.layout}: {line}" for line in found[:6]]


def main() -> None:
    """Runs configurations by number."""
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root))
        for number in map(int, sys.argv[1:]):
            with contextlib.suppress(KeyboardInterrupt):
                print(json.dumps(asdict(run_case(bench, number))), flush=True)


if __name__ == "__main__":
    main()
