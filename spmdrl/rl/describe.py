"""Computes the metrics of a step, and formats a few of its samples as text."""

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
"""Step phases in which the engine or a model is running."""
SINGLE = 2
"""Number of segments of a single-turn episode that was not cut short: prompt and response."""


Columns = dict[tuple[int, int], dict[str, float]]
"""Maps the (position, sample) of a sample to its columns in samples.jsonl."""


def model_columns(batch: Batch, labels: tuple[str, ...], peers: Peers) -> Columns:
    """Return the reward-model scores of the samples on all ranks. Collective over the peers.

    The columns are `model`, `model/<label>`, `model/steps` if responses are scored per step, and `reward`, which
    includes the model's score.
    """
    found = {"reward": "reward", "model": "model"} | {f"model/{name}": f"part/{name}" for name in labels}
    found |= {"model/steps": "steps"} if "steps" in batch.seq else {}
    columns = [batch.seq[key][batch.firsts].double() for key in ("position", "sample", *found.values())]
    rows = torch.cat(peers.rows(torch.stack(columns, 1))).tolist()
    return {(int(place), int(sample)): dict(zip(found, row, strict=True)) for place, sample, *row in rows}


def sample_row(step: int, episode: Episode, decode, reader: CallReader | None = None) -> dict:
    """Convert an episode to a row of samples.jsonl.

    The row lists the segments if the run has an environment or the episode has more than a prompt and one response.

    reader: parser for the tool calls in the episode's turns, or None without an environment.
    """
    begin, rest = episode.segments[: episode.opening], episode.segments[episode.opening :]
    row = {
        "step": step,
        "prompt": decode([t for s in begin for t in s.readable()]),
        "completion": decode([t for s in rest for t in s.readable()], skip_special_tokens=True),
        "reward": episode.reward if math.isfinite(episode.reward) else None,
        "finish": episode.finish,
        "index": episode.prompt,
        "sample": episode.sample,
    } | {f"part/{name}": value for name, value in episode.parts.items()}
    if len(episode.segments) > SINGLE or reader:
        calls = reader.of(episode) if reader else {}
        row["segments"] = [
            {"turn": s.turn, "text": decode(s.readable())}
            | ({"version": s.version} if s.sampled else {})
            | ({"calls": calls[i]} if i in calls else {})
            | ({"reward": s.reward} if s.reward else {})
            | ({"after": episode.before(i)} if s.after != PREVIOUS else {})
            for i, s in enumerate(episode.segments)
        ]
    return row


def describe(stats: Metrics, batch: Batch, reward_model: bool = False) -> None:
    """Add reward and response-length metrics for a batch. Every rank adds the same names.

    reward_model: True if the run has a reward model. `reward/mean` is then computed from the batch alone, because the
    reward model scores only the samples in the batch.
    """
    seq = {name: x_B[batch.firsts] for name, x_B in batch.seq.items()}
    n = len(seq["reward"])
    # Responses from the data set are not graded and have reward nan.
    reward = seq["reward"][~seq["reward"].isnan()]
    for name in ("reward/trained", *(["reward/mean"] if reward_model else [])):
        stats.add(name, reward.mean() if len(reward) else 0.0, len(reward))
    for name in seq:
        if name.startswith("part/"):
            # A sample whose reward lacks this part has nan here. Skip these values.
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
    """Add the staleness of sampled tokens, in weight versions. version: the version before this step's update."""
    age_T = (version - batch.token["version"][batch.sampled]).double()
    stats.add("rollout/staleness", age_T.mean(), len(age_T))


WARN_EXACT, WARN_ROUNDED = 1e-3, 0.1
"""Defaults of `--rollout.logp-diff-warn`. The first is for float32 and float64, because engine and trainer logp then
differ by only about 1e-5. The second is for 16-bit and 8-bit dtypes and for stale samples, because a difference of 0.01
or more is then normal."""


def check_mismatch(step: int, values: dict[str, float], cfg: Config) -> str:
    """Return a warning if engine and trainer logp differ by more than the threshold, otherwise an empty string.

    A mean difference of nan exceeds every threshold; a threshold of 0 disables the check.

    step: 1-based. values: metrics reduced over ranks, so that every rank returns the same text.

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
    """Return a step's reduced metrics with `tokens/s`, `mismatch/*` and `time/outside_model` added.

    `tokens/s` counts the prompt and response tokens on all ranks.
    """
    values = finish_monitors(values)
    values["tokens/s"] = values.pop("tokens") / values["time/step"]
    model = sum(values.get(f"time/{phase}", 0.0) for phase in MODEL_PHASES)
    values["time/outside_model"] = max(0.0, values["time/step"] - model)
    return values
