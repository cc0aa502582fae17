"""Loads a job's checkpoint at the start, and saves checkpoints after steps and on preemption."""

import json
from pathlib import Path
from typing import Any, Protocol

from spmdrl.checkpoint.background import Saver
from spmdrl.checkpoint.files import rank_files
from spmdrl.checkpoint.store import find_resume, load
from spmdrl.config.fields import flag
from spmdrl.config.resume import file_digests, fixed_settings
from spmdrl.config.schema import TrainingConfig
from spmdrl.health.failure import exit_reason, write_preempted
from spmdrl.health.preempt import PreemptedError, preemption
from spmdrl.policy.models import Models
from spmdrl.session.session import Session
from spmdrl.spmd.agreement import Agreement, rank_ranges
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.tracking.trackers import keep_wandb_id, wandb_id


class Kept(Protocol):
    """Interface for job state that is equal on all ranks. Models are saved separately."""

    def state(self) -> dict[str, Any]:
        """Return the state as a dict of JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a value returned by `state`, after the models are loaded. Older checkpoints may lack some keys."""
        ...


class RankKept(Protocol):
    """Interface for job state that differs between ranks, such as random number generators."""

    def tree(self) -> dict:
        """Return this rank's state between two steps, as a tree (see `checkpoint/treefile.py`)."""
        ...

    def restore(self, files: list[Path]) -> str:
        """Restore from files saved by any number of ranks. Returns a note about lost state, or "" if none."""
        ...


class Checkpoints:
    """Loads and saves the checkpoints of a job. Every method is collective over all ranks.

    The constructor loads the models from the newest checkpoint, if there is one. `begin` later restores the per-rank
    state.
    """

    def __init__(self, session: Session, models: Models, kept: Kept, data: str):
        """Load the newest checkpoint, if there is one. data: digest of the training data."""
        self.session, self.models, self.kept = session, models, kept
        self.saver = Saver(session.cfg, session.folder / "checkpoints", session.world)
        self.saver.prepare(models, session.warn)
        self.rank_files: list[Path] = []
        self.made_with = {"prompts": data, "files": self._files(), "device": session.world.device.type}
        self.start_step = self._resume()

    def _resume(self) -> int:
        session, models = self.session, self.models
        found = find_resume(session.folder / "checkpoints", session.world)
        if found is None:
            return 0
        state = load(found, models)
        self._compare(found, state)
        if models.policy:
            models.policy.version = state["version"]
            models.policy.updates_done = state["updates_done"]
        for name, model in models.trained().items():
            model.updates_done = state["trained"][name]
        for name, model in models.learning().items():
            # Older checkpoints have no `due`, because their learning rate schedules counted completed updates.
            model.updates_due = state.get("due", {}).get(name, model.updates_done)
            if model.loss_scale is not None and (held := state.get("loss_scales", {}).get(name)):
                model.loss_scale.restore(held)
        self.kept.restore(state)
        self.rank_files = rank_files(found)
        self.saver.resumed()
        if session.world.is_first and state.get("wandb") and not wandb_id(session.folder):
            # The checkpoint was moved to a folder without the W&B run id, so store the id there.
            keep_wandb_id(session.folder, state["wandb"])
        session.note(f"resumed from {found}: step {state['step']}")
        return state["step"]

    def _compare(self, found: Path, state: dict) -> None:
        """Compare data, files and device type with those of the checkpoint.

        Raises:
            ValueError: one of them changed, and `--run.allow-changes` is not set.
        """
        changes = changes_since(self.session.cfg, found, state, self.made_with)
        if changes and not self.session.cfg.run.allow_changes:
            raise ValueError(
                f"{'; '.join(changes)}: undo this, choose another --run.dir, or set --run.fresh (moves that folder "
                "aside and starts over) or --run.allow-changes (continues with the changes)"
            )
        for line in changes:
            self.session.note(f"--run.allow-changes: {line}")

    def _files(self) -> dict[str, list[str]]:
        """Return the digests of the files named in the settings (`file_digests`). Collective.

        Raises:
            ValueError: ranks read files with different contents.
        """
        text = json.dumps(file_digests(self.session.cfg))
        seen = [json.loads(each) for each in all_gather_text(text, self.session.world.host_group)]
        for name, (path, digest) in seen[0].items():
            odd = [rank for rank, files in enumerate(seen) if files[name][1] != digest]
            if odd:
                who = f"{'rank' if len(odd) == 1 else 'ranks'} {rank_ranges(odd)}"
                raise ValueError(
                    f"{flag(name)} {path}: {who} read a file with other contents than rank 0; give every node the same "
                    "files"
                )
        return seen[0]

    def begin(self, ranks: RankKept) -> None:
        """Restore the per-rank state, right before the first step.

        Building an engine draws from the random number generators, so their states are restored afterwards.
        """
        self.ranks = ranks
        self.agreement = Agreement(self.session.world, self.session.cfg.run.timeout)
        if self.start_step and (lost := ranks.restore(self.rank_files)):
            self.session.note(lost)

    def step_done(self, step: int, held: dict[str, int]) -> None:
        """Check that all ranks agree after a step (0-based), and save a checkpoint if one is due.

        held: numbers that must be equal on all ranks.

        Raises:
            LockstepError: the numbers differ between ranks.
            PreemptedError: the job is being preempted. Every rank raises it after the step.
        """
        cfg, done = self.session.cfg, step + 1
        with self.session.timer("agree"):
            leave = self.agreement({"step": step, **held}, preemption.requested)
        last = done == cfg.run.steps and cfg.checkpoint.at_end
        if last or (cfg.checkpoint.every and done % cfg.checkpoint.every == 0):
            self._save(done)
        if leave:
            raise PreemptedError(done, f"step {done} was finished")

    def leave(self, left: PreemptedError) -> None:
        """Save the last completed step, unless it is already saved, and write the file PREEMPTED.

        The file is written only after the checkpoint is published.
        """
        if left.step > self.start_step and self.saver.saved != left.step:
            self._save(left.step)
        with self.session.timer("checkpoint"):
            self.saver.finish()
        who = exit_reason()
        if self.session.world.is_first:
            write_preempted(preemption.request, left.step)
        saved = f"step {left.step} is in {self.session.folder}/checkpoints/step_{left.step}"
        saved = saved if left.step else "no step is finished yet"
        self.session.note(f"preempted ({who}): {left}; {saved}, and the same command continues from there")

    def _save(self, done: int) -> None:
        with self.session.timer("checkpoint"):
            with self.session.timer("checkpoint_wait"):
                self.saver.finish()
            # The state is written by rank 0, which always has a policy. Ranks that only sample have no policy.
            policy = self.models.policy
            state = policy and {
                "step": done,
                "version": policy.version,
                "updates_done": policy.updates_done,
                "trained": {name: model.updates_done for name, model in self.models.trained().items()},
                "due": {name: model.updates_due for name, model in self.models.learning().items()},
                "loss_scales": {n: m.loss_scale.state() for n, m in self.models.learning().items() if m.loss_scale},
                **self.kept.state(),
                **self.made_with,
                "seed": self.session.cfg.run.seed,
                "wandb": wandb_id(self.session.folder),
            }
            self.saver.save(done, state, self.ranks.tree(), self.models)


def changes_since(cfg: TrainingConfig, found: Path, before: dict, now: dict) -> list[str]:
    """Return what has changed since the checkpoint `found` was made, one line per change.

    before, now: dicts with a digest of the `prompts`, the digests of `files` (see `file_digests`) and the `device`
    type. Keys that an older checkpoint lacks are not compared.
    """
    files = before.get("files", {})
    lines = [
        f"{flag(name)} {path} has changed since {found} was made"
        for name, (path, digest) in now["files"].items()
        if name in files and files[name][0] == path and files[name][1] != digest
    ]
    if before.get("prompts", now["prompts"]) != now["prompts"]:
        lines.append(f"{found} was trained on other prompts than {cfg.data.train} contains")
    device = before.get("device", now["device"])
    if device != now["device"] and fixed_settings(cfg).get("rollout.engine") == "vllm":
        # vLLM samples with the device's random number generators; other engines do not.
        lines.append(f"{found} was made on {device}; on {now['device']} vllm samples other tokens from the same seeds")
    return lines
