"""Metrics of a step, and a few of its samples as text."""

import math

import torch

from spmdrl.algos.correction import finish_monitors
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch
from spmdrl.data.episode import FINISH_REASONS, Episode
from spmdrl.data.segment import PREVIOUS
from spmdrl.rl.tool_calls import CallReader
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

MODEL_PHASES = ("rollout", "logp", "update", "eval")
"""Phases of a step in which the engine or a model computes."""
SINGLE = 2
"""Number of segments of a single-turn episode that was not cut short: prompt and response."""


Columns = dict[tuple[int, int], dict[str, float]]
"""(position, sample) -> columns of that sample in samples.jsonl."""


def model_columns(batch: Batch, labels: tuple[str, ...], peers: Peers) -> Columns:
    """Return the reward model's scores of the samples of all ranks. Collective over the peers.

    The columns are `model`, `model/<label>`, `model/steps` if responses are scored by steps, and `reward`, which
    includes the model's score.
    """
    found = {"reward": "reward", "model": "model"} | {f"model/{name}": f"part/{name}" for name in labels}
    found |= {"model/steps": "steps"} if "steps" in batch.seq else {}
    columns = [batch.seq[key][batch.firsts].double() for key in ("position", "sample", *found.values())]
    rows = torch.cat(peers.rows(torch.stack(columns, 1))).tolist()
    return {(int(place), int(sample)): dict(zip(found, row, strict=True)) for place, sample, *row in rows}


def sample_row(step: int, episode: Episode, decode, reader: CallReader | None = None) -> dict:
    """Return an episode as a row of samples.jsonl.

    The row lists the segments if the run has an environment or the episode has more than a prompt and one response.

    reader: reads the tool calls of the episode's turns; None without an environment.
    """
    begin, rest = episode.segments[: episode.opening], episode.segments[episode.opening :]
    row = {
        "step": step,
        "prompt": decode([t for s in begin for t in s.tokens.tolist()]),
        "completion": decode([t for s in rest for t in s.tokens.tolist()], skip_special_tokens=True),
        "reward": episode.reward if math.isfinite(episode.reward) else None,
        "finish": episode.finish,
        "index": episode.prompt,
        "sample": episode.sample,
    } | {f"part/{name}": value for name, value in episode.parts.items()}
    if len(episode.segments) > SINGLE or reader:
        calls = reader.of(episode) if reader else {}
        row["segments"] = [
            {"turn": s.turn, "text": decode(s.tokens.tolist())}
            | ({"version": s.version} if s.sampled else {})
            | ({"calls": calls[i]} if i in calls else {})
            | ({"reward": s.reward} if s.reward else {})
            | ({"after": episode.before(i)} if s.after != PREVIOUS else {})
            for i, s in enumerate(episode.segments)
        ]
    return row


def describe(stats: Metrics, batch: Batch, reward_model: bool = False) -> None:
    """Add metrics of a batch's rewards and response lengths. Every rank adds the same names.

    reward_model: True if the run has a reward model. `reward/mean` is then computed from the batch, because the reward
    model does not score other samples.
    """
    seq = {name: x_B[batch.firsts] for name, x_B in batch.seq.items()}
    n = len(seq["reward"])
    # A response from the data set is not graded and has the reward nan.
    reward = seq["reward"][~seq["reward"].isnan()]
    for name in ("reward/trained", *(["reward/mean"] if reward_model else [])):
        stats.add(name, reward.mean() if len(reward) else 0.0, len(reward))
    for name in seq:
        if name.startswith("part/"):
            # A sample whose reward has no such part has the value nan, which is left out.
            part = seq[name][~seq[name].isnan()]
            stats.add(f"reward/{name}", part.mean(), len(part))
    sampled = batch.sampled_per_episode.double()
    stats.add("response_length/mean", sampled.mean() if n else 0.0, n)
    stats.add_max("response_length/max", sampled.max() if n else 0.0)
    cut = (seq["finish"] == FINISH_REASONS.index("length")).double()
    stats.add("response_length/cut", cut.mean() if n else 0.0, n)
    if "advantage" in batch.seq:
        nonzero = (seq["advantage"] != 0).double()
        stats.add("advantage/nonzero", nonzero.mean() if n else 0.0, n)
    stats.add_sum("tokens", batch.n_distinct)


def describe_age(stats: Metrics, batch: Batch, version: int) -> None:
    """Add the staleness of sampled tokens, in weight versions. version: weight version before this step's update."""
    age_T = (version - batch.token["version"][batch.sampled]).double()
    stats.add("rollout/staleness", age_T.mean(), len(age_T))


WARN_EXACT, WARN_ROUNDED = 1e-3, 0.1
"""Defaults of `--rollout.logp-diff-warn`: the first for float32 and float64, in which logp of engine and trainer differ
by about 1e-5; the second for 16 or 8 bits and for stale samples, with differences of 0.01 or more."""


def check_mismatch(step: int, values: dict[str, float], cfg: Config) -> str:
    """Return a warning if the engine's logp differ from the trainer's by more than the threshold; else an empty text.

    A mean difference of nan exceeds every threshold; a threshold of 0 disables the check.

    step: counted from 1. values: metrics reduced over ranks, so that every rank returns the same text.

    Raises:
        ValueError: the difference is above `--rollout.logp-diff-stop`.
    """
    rollout, found = cfg.rollout, values.get("logp_diff/mean")
    if found is None:
        return ""
    reasons = {
        f"--rollout.quantization {rollout.quantization}": rollout.quantization != "none",
        f"--rollout.staleness {rollout.staleness}": rollout.staleness,
        f"--rollout.top-p {rollout.top_p:g}": rollout.top_p < 1,
        f"--model.dtype {cfg.model.dtype}": cfg.model.dtype not in ("float32", "float64"),
    }
    warn = rollout.logp_diff_warn
    if warn is None:
        warn = WARN_ROUNDED if any(reasons.values()) else WARN_EXACT
    why = ", ".join(reason for reason, given in reasons.items() if given)
    why = f"they may differ because of {why}" if why else "no setting of this run explains the difference"
    says = f"step {step}: |logp of engine - logp of trainer| is {found:.4g} in the mean, above"
    if rollout.logp_diff_stop and not found <= rollout.logp_diff_stop:
        raise ValueError(
            f"{says} --rollout.logp-diff-stop {rollout.logp_diff_stop:g}: engine and trainer do not have the same "
            f"model; {why}. Compare with --rollout.engine hf, look at grad_norm of the steps before, or raise the "
            "threshold (0: never stop)"
        )
    if warn and not found <= warn:
        return (
            f"{says} --rollout.logp-diff-warn {warn:g}: {why}; look at logp_diff/max and mismatch/* "
            "in metrics.jsonl, and at --correction.kind"
        )
    return ""


def with_rates(values: dict[str, float]) -> dict[str, float]:
    """Return a step's reduced metrics, and in addition `tokens/s`, `mismatch/*` and `time/outside_model`.

    `tokens/s` counts tokens of prompts and responses of all ranks.
    """
    values = finish_monitors(values)
    values["tokens/s"] = values.pop("tokens") / values["time/step"]
    model = sum(values.get(f"time/{phase}", 0.0) for phase in MODEL_PHASES)
    values["time/outside_model"] = max(0.0, values["time/step"] - model)
    return values
