"""What a run tells: metrics, sample completions and the console, all written by rank 0."""

import json
import logging
from pathlib import Path

from spmdrl.algos.correction import finish_monitors
from spmdrl.config.dump import to_dict
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.trajectory import FINISH_REASONS, Trajectory
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.mesh import World
from spmdrl.tracking.console import Console
from spmdrl.tracking.metrics import Metrics
from spmdrl.tracking.trackers import cut_lines, open_trackers

log = logging.getLogger("spmdrl")

MODEL_PHASES = ("rollout", "logp", "update", "eval")
"""Phases that are engine or model compute; the rest of a step is the program's own."""


class Journal:
    """Where a run's numbers and samples go. Other ranks hold one too, which writes to their log file only."""

    def __init__(self, cfg: Config, world: World, folder: Path, console: Console | None, tokenizer, start_step: int):
        self.world, self.console, self.tokenizer, self.count = world, console, tokenizer, cfg.tracking.samples
        self.trackers, self.samples = [], None
        if world.is_first:
            tracking = cfg.tracking
            self.trackers = open_trackers(
                tracking.trackers, folder, tracking.project, cfg.run.name, to_dict(cfg), start_step + 1
            )
            samples = folder / "samples.jsonl"
            if samples.exists() and samples.stat().st_size:
                cut_lines(samples, start_step + 1)
            self.samples = open(samples, "a", encoding="utf-8")  # noqa: SIM115 (see `close`)

    def step(self, step: int, values: dict[str, float], trajectories: list[Trajectory]) -> None:
        """One finished step, counted from 1; values are alike on every rank, trajectories are this rank's."""
        rows = self._rows(step, trajectories) if self.samples else []
        if self.samples:
            self.samples.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.samples.flush()
        if self.console:
            self.console.step(step, values, rows)
        self.numbers(step, values)
        log.info("step %d %s", step, json.dumps({k: round(v, 6) for k, v in values.items()}))

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Further numbers of a step; on the last step they join its line."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def _rows(self, step: int, trajectories: list[Trajectory]) -> list[dict]:
        """A few completions as text."""
        if not self.count:
            return []
        decode, spread = self.tokenizer.decode, max(1, len(trajectories) // self.count)
        return [
            {
                "step": step,
                "prompt": decode(t.tokens[~t.mask].tolist()),
                "completion": decode(t.tokens[t.mask].tolist(), skip_special_tokens=True),
                "reward": t.reward,
                "finish": t.finish,
                "index": t.prompt,
                "sample": t.sample,
            }
            for t in trajectories[::spread][: self.count]
        ]

    def close(self) -> None:
        """Close every file."""
        for tracker in self.trackers:
            tracker.close()
        if self.samples:
            self.samples.close()


def describe(stats: Metrics, batch: Batch, reward_model: bool = False) -> None:
    """Add what a batch says of itself: rewards, lengths, endings. Every rank adds the same names.

    reward_model: its rewards are known here alone, so `reward/mean` is of the batch, and not of all that was graded.
    """
    reward, n = batch.seq["reward"], len(batch)
    for name in ("reward/trained", *(["reward/mean"] if reward_model else [])):
        stats.add(name, reward.mean() if n else 0.0, n)
    for name in batch.seq:
        if name.startswith("part/"):
            # nan: a sample without it.
            part = batch.seq[name][~batch.seq[name].isnan()]
            stats.add(f"reward/{name}", part.mean(), len(part))
    sampled = batch.sampled_per_seq.double()
    stats.add("response_length/mean", sampled.mean() if n else 0.0, n)
    stats.add_max("response_length/max", sampled.max() if n else 0.0)
    cut = (batch.seq["finish"] == FINISH_REASONS.index("length")).double()
    stats.add("response_length/cut", cut.mean() if n else 0.0, n)
    stats.add("advantage/nonzero", (batch.seq["advantage"] != 0).double().mean() if n else 0.0, n)
    stats.add_sum("tokens", batch.n_tokens)


def describe_age(stats: Metrics, batch: Batch, version: int) -> None:
    """Add how many versions older than `version`, where the update begins, sampled tokens are."""
    age_T = (version - batch.token["version"][batch.sampled]).double()
    stats.add("rollout/staleness", age_T.mean(), len(age_T))


def check_mismatch(step: int, values: dict[str, float], cfg: Config) -> str:
    """What to tell of a step whose engine reported other logp than the trainer's; empty where they agree.

    A mean that is not a number is above every threshold, and a threshold of 0 is none. step: counted from 1; values:
    reduced, so that every rank comes to the same end.

    Raises:
        ValueError: above `--rollout.logp-diff-stop`.
    """
    rollout, found = cfg.rollout, values.get("logp_diff/mean")
    if found is None:
        return ""
    reasons = {
        f"--rollout.quantization {rollout.quantization}": rollout.quantization != "none",
        f"--rollout.staleness {rollout.staleness}": rollout.staleness,
        f"--model.dtype {cfg.model.dtype}": cfg.model.dtype == "bfloat16",
    }
    why = ", ".join(reason for reason, given in reasons.items() if given)
    why = f"what sets them apart by intent here is {why}" if why else "no setting of this run sets them apart"
    says = f"step {step}: |logp of engine - logp of trainer| is {found:.4g} in the mean, above"
    if rollout.logp_diff_stop and not found <= rollout.logp_diff_stop:
        raise ValueError(
            f"{says} --rollout.logp-diff-stop {rollout.logp_diff_stop:g}: engine and trainer do not hold the same "
            f"model; {why}. Compare with --rollout.engine hf, look at grad_norm of the steps before, or raise the "
            "threshold (0: never stop)"
        )
    if rollout.logp_diff_warn and not found <= rollout.logp_diff_warn:
        return (
            f"{says} --rollout.logp-diff-warn {rollout.logp_diff_warn:g}: {why}; look at logp_diff/max and mismatch/* "
            "in metrics.jsonl, and at --correction.kind"
        )
    return ""


def told(values: dict[str, float], world: World) -> dict[str, float]:
    """Numbers of the ranks that train, score and sample together, on every rank. Collective under `split`.

    values: alike on ranks that do the same. Of a name that several have, what those say who train, else who sample;
    of memory the most.
    """
    if not world.roles.split:
        return values
    texts = all_gather_text(json.dumps(values), world.host_group)
    out: dict[str, float] = {}
    for ranks in (world.roles.scorers, world.roles.samplers, world.roles.trainers):
        said = json.loads(texts[ranks[0]])
        memory = {k: max(v, out.get(k, 0.0)) for k, v in said.items() if k.startswith("memory/")}
        out |= said | memory
    return out


def with_rates(values: dict[str, float]) -> dict[str, float]:
    """Reduced numbers plus `tokens/s` (prompt and response, all ranks), what the engine's logp mismatch amounts to, and
    `time/outside_model` in seconds.
    """
    values = finish_monitors(values)
    values["tokens/s"] = values.pop("tokens") / values["time/step"]
    model = sum(values.get(f"time/{phase}", 0.0) for phase in MODEL_PHASES)
    values["time/outside_model"] = max(0.0, values["time/step"] - model)
    return values
