"""Recomputes an optimizer step whose gradient norm spiked: `python -m spmdrl.tools.replay RUN/spikes/step_000012`.

A single process recomputes the loss and the gradient norm, and finds out how much episodes contribute to them. It uses
the batch that the run saved and the weights of the last checkpoint before the step. It takes no optimizer step and
writes no files.

    --model PATH   use the weights of this folder or hub name instead (as --model.path)
    --top N        show N episodes (8)
    --device NAME  auto, cpu or cuda
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.config.plan import count
from spmdrl.config.schema import Config, ParallelConfig
from spmdrl.session.environ import prepare
from spmdrl.tools.conversation_lines import conversation_lines

if TYPE_CHECKING:
    from spmdrl.data.batch import Batch
    from spmdrl.policy.objectives.algorithm import Algorithm


def main(argv: list[str] | None = None) -> None:
    """Replay the step saved in a folder and print the report."""
    parser = argparse.ArgumentParser("python -m spmdrl.tools.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a step that the run saved: RUN/spikes/step_000012")
    parser.add_argument("--model", default="", help="weights of this folder or hub name, as --model.path")
    parser.add_argument("--top", type=int, default=8, help="number of episodes shown")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(argv)
    prepare()
    try:
        for line in replay(options.folder, options.model, options.top, options.device):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m spmdrl.tools.replay: {error}")


def _alone(cfg: Config, device: str, model: str) -> Config:
    """Return a run's settings, adapted to a single process that only computes a gradient."""
    again = "none" if cfg.policy.activation_checkpointing == "none" else "full"
    policy = replace(cfg.policy, backend="fsdp", activation_checkpointing=again, offload="none", moe_bias_rate=0.0)
    return replace(
        cfg,
        run=replace(cfg.run, device=device),
        model=replace(cfg.model, path=model or cfg.model.path),
        parallel=ParallelConfig(),
        policy=policy,
        rollout=replace(cfg.rollout, tp=1),
    )


def replay(folder: Path, model: str = "", top: int = 8, device: str = "auto") -> Iterator[str]:
    """Recompute the step saved in a folder and yield the lines of the report.

    Raises:
        ValueError: the folder, its run or the weights cannot be read.
    """
    import torch

    from spmdrl.hub.resolve import resolve
    from spmdrl.hub.tokenizer import load_tokenizer
    from spmdrl.rl.compose import compose
    from spmdrl.rl.spikes import read
    from spmdrl.rl.tool_calls import call_reader
    from spmdrl.spmd.mesh import start
    from spmdrl.spmd.peers import Peers

    facts, batch = read(folder)
    run = folder.resolve().parents[1]
    cfg = _settings(run / "config.yaml")
    which = facts["model"]
    size = f"{count(len(batch), 'sequence')}, {count(batch.n_tokens, 'token')}"
    yield (
        f"step {facts['step']}, optimizer step {facts['updates_done']} of the {which}: {size}; the run's gradient "
        + (f"norm {facts['norm']:.8g}, median before {facts['median']:.4g}")
    )
    checkpoint, done = (None, None) if model else _weights_before(run, which, facts["updates_done"])
    path = {"critic": cfg.critic.path, "cost_critic": cfg.critic.path, "process": cfg.process_reward.path}.get(which)
    cfg = _alone(cfg, device, model if which == "policy" else "")
    world = start(cfg.parallel, 1, cfg.run.device, cfg.run.timeout)
    algo = compose(cfg)
    algo.state |= facts["algorithm"]
    policy, where = _build(cfg, world, which, (model or path or "") if which != "policy" else "", checkpoint)
    same = done == facts["updates_done"]
    named = f"of optimizer step {done}" if done is not None else "as named by --model"
    behind = "as at the start of the step" if same else named
    yield f"weights  {where}, {behind}" + ("" if same else ": results differ from the run's")
    policy.updates_done = facts["updates_done"]
    objective = _objective_of(algo, cfg, policy, facts, Peers(None, world.device))
    shared = objective.prepare(batch, facts["share"])
    rows = torch.arange(len(batch)) if shared.active is None else torch.nonzero(shared.active).flatten()
    stats = policy.gradient(policy.microbatches(batch.select(rows)), objective, shared)
    norm = policy.gradient_norm()
    policy.zero_grad()
    total = stats.reduce(lambda x, op: x).get("loss", math.nan)
    yield f"loss     {total:.8g}"
    yield f"norm     {norm:.8g}" + (f", {_verdict(norm, facts['norm'])}" if same else "")
    found = [_part_of(policy, batch, int(i), objective, shared) for i in rows if batch.begins[i]]
    tokenizer = load_tokenizer(resolve(cfg.model.path, cfg.model.trust_remote_code), cfg.model.trust_remote_code)
    try:
        reader = call_reader(cfg, tokenizer)
    except ValueError as error:
        reader = None
        yield f"calls    not shown: {error}"
    yield from _table(policy, batch, found, objective, shared, top, tokenizer, reader)


def _settings(file: Path) -> Config:
    """Return the resolved settings of a run.

    Raises:
        ValueError: the file does not exist or cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a folder inside its run, RUN/spikes/step_000012")
    try:
        return from_command_line(["--config", str(file)], "python -m spmdrl.tools.replay").config
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _weights_before(run: Path, which: str, updates_done: int) -> tuple[Path | None, int]:
    """Return the newest intact checkpoint from before the step, and its number of optimizer steps.

    If there is none, return None and 0, which stand for the model that the run started from.
    """
    from spmdrl.checkpoint.manifest import problems
    from spmdrl.checkpoint.published import steps_saved

    best: tuple[Path | None, int] = (None, 0)
    for step in steps_saved(run / "checkpoints"):
        folder = run / "checkpoints" / f"step_{step}"
        if problems(folder):
            continue
        state = json.loads((folder / "state" / "run.json").read_text())
        done = state["updates_done"] if which == "policy" else state["trained"].get(which, 0)
        if best[1] <= done <= updates_done and (best[0] is None or done > best[1]):
            best = folder, done
    return best


def _build(cfg: Config, world: Any, which: str, path: str, checkpoint: Path | None) -> tuple[Any, str]:
    """Return the step's model, with checkpointed or initial weights, and where the weights came from."""
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.models import placeholders
    from spmdrl.policy.self_check import choose_form

    head = "value" if which in ("critic", "cost_critic") else "lm"
    replayed = which == "policy" and cfg.rollout.routing_replay
    model = FsdpPolicy(cfg, world, 1, True, path, head, routing_replay=replayed, adapt=which == "policy")
    # The run also called `choose_form`, so run and replay use the same form of the model and compute the same numbers.
    choose_form(model, which, f"--model.path {path or cfg.model.path}", logging.getLogger("spmdrl").info)
    if head == "lm":
        model.exclude(placeholders(cfg, cfg.model.path))
    # There is no optimizer step, so only the checkpoint's weights are loaded.
    model.optimizer, optimizer = None, model.optimizer
    folder = checkpoint and (checkpoint if which == "policy" else checkpoint / which)
    if folder is not None:
        model.load(folder)
    model.optimizer = optimizer
    return model, str(folder or path or cfg.model.path)


def _objective_of(algo: "Algorithm", cfg: Config, policy: Any, facts: dict, peers: Any) -> Any:
    """Return the objective that the step used to train its model."""
    from spmdrl.policy.objectives.reinforcement import CriticObjective, PolicyObjective, ProcessObjective

    columns = {"critic": ("returns", "values"), "cost_critic": ("cost_returns", "cost_values")}
    if facts["model"] in columns:
        return CriticObjective(*columns[facts["model"]], cfg.critic.clip, peers)
    if facts["model"] == "process":
        return ProcessObjective(cfg.process_reward.beta, cfg.rollout.temperature, peers)
    start = policy.updates_done if facts["on_policy"] else -1
    return PolicyObjective(algo, policy, cfg.rollout.temperature, peers, start)


def _verdict(norm: float, want: float) -> str:
    """Compare the norm with the run's norm; return the result as text."""
    if not (math.isfinite(norm) and math.isfinite(want)):
        return "as in the run" if math.isfinite(norm) == math.isfinite(want) else "not as in the run"
    off = abs(norm - want) / max(abs(want), 1e-30)
    if off <= 1e-5:
        return f"equals the run's to {off:.1e}"
    return f"differs from the run's by {off:.1e}: the weights or the settings are not the run's"


def _part_of(policy: Any, batch: "Batch", index: int, objective: Any, shared: Any) -> dict:
    """Return an episode's contribution to the loss, and the maximum |logp - old_logp| of its tokens.

    index: index of the episode's first sequence.
    """
    import torch

    one = _episode(batch, index)
    with torch.no_grad():
        first_T, second_T = next(iter(policy.numbers([one], objective.temperature, "entropy")))
        value = objective.loss(one.to(first_T.device), first_T, second_T, shared).loss.item()
    mask_T, moved = one.token["mask"], math.nan
    old_T = one.token.get("old_logp", one.token["rollout_logp"])
    if mask_T.any():
        moved = (first_T.cpu() - old_T)[mask_T].abs().max().item()
    return {"index": index, "loss": value, "moved": moved}


def _norm_of(policy: Any, batch: "Batch", index: int, objective: Any, shared: Any) -> float:
    """Return the gradient norm of one episode's contribution to the loss. index: index of its first sequence."""
    policy.gradient([_episode(batch, index)], objective, shared)
    norm = policy.gradient_norm()
    policy.zero_grad()
    return norm


def _episode(batch: "Batch", index: int) -> "Batch":
    """Return all sequences of the episode that contains sequence `index`."""
    import torch

    return batch.select(torch.nonzero(batch.episode == batch.episode[index]).flatten())


def _table(policy, batch: "Batch", found: list[dict], objective, shared, top: int, tokenizer, reader) -> Iterator[str]:
    """Yield a table of episodes, sorted by descending gradient norm.

    Episodes with a non-finite loss or gradient come first. If all are finite, only the episodes with the largest |loss|
    and |logp - old_logp| are compared, since each norm takes a backward pass. reader: parses tool calls, or None for a
    run without an environment.
    """
    from spmdrl.data.pack import to_episodes

    def size(row: dict, name: str) -> float:
        return abs(row[name]) if math.isfinite(row[name]) else math.inf

    broken = [row for row in found if not math.isfinite(row["loss"])]
    by_loss = sorted(found, key=lambda row: -size(row, "loss"))[:top]
    by_move = sorted(found, key=lambda row: -size(row, "moved"))[: max(1, top // 2)]
    chosen = {row["index"]: row for row in broken[:top] + by_loss + by_move}
    rows = list(chosen.values())
    for row in rows:
        row["norm"] = _norm_of(policy, batch, row["index"], objective, shared)
    if not broken and all(math.isfinite(row["norm"]) for row in rows):
        rows.sort(key=lambda row: -row["norm"])
    else:
        # A finite loss can have a non-finite gradient, so the gradients of all episodes are computed.
        for row in (row for row in found if "norm" not in row):
            row["norm"] = _norm_of(policy, batch, row["index"], objective, shared)
        rows = sorted(found, key=lambda row: (math.isfinite(row["loss"]) and math.isfinite(row["norm"]), -row["norm"]))
    sampled_B, lengths = batch.sampled_per_episode[batch.episode], batch.lengths.tolist()
    advantage_B = batch.sum_episodes(batch.token["advantages"]) / sampled_B.clamp(min=1)
    yield f"{'prompt':>7} {'sample':>6} {'norm':>10} {'loss':>11} {'|dlogp|':>9} {'reward':>8} {'advantage':>10} tokens"
    for row in rows[:top]:
        i = row["index"]
        finite = math.isfinite(row["loss"]) and math.isfinite(row["norm"])
        reward, advantage = float(batch.seq["reward"][i]), float(advantage_B[i])
        yield (
            f"{int(batch.seq['prompt'][i]):>7} {int(batch.seq['sample'][i]):>6} {row['norm']:>10.4g} "
            f"{row['loss']:>11.4g} {row['moved']:>9.4g} {reward:>8.4g} {advantage:>10.4g} "
            f"{int(sampled_B[i])} of {lengths[i]}" + ("" if finite else "  NOT FINITE")
        )
        for episode in to_episodes(_episode(batch, i)):
            yield from (f"        {line}" for line in conversation_lines(episode, tokenizer.decode, reader))


if __name__ == "__main__":
    main()
