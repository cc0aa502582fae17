"""Where a run stands: what is taken up at its start, saved after its steps, and left behind when it is asked to go."""

import json
from collections.abc import Callable
from pathlib import Path

from spmdrl import checkpoint
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import flag
from spmdrl.config.resume import file_digests
from spmdrl.config.schema import Config
from spmdrl.health.failure import mark, request
from spmdrl.health.preempt import PreemptedError, preemption
from spmdrl.policy.models import Models
from spmdrl.rl.algorithm import Algorithm
from spmdrl.rl.resume import Holder, rank_state, restore
from spmdrl.rl.spikes import Spikes
from spmdrl.spmd.agreement import Agreement
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.mesh import World
from spmdrl.tracking.metrics import Timer
from spmdrl.tracking.trackers import keep_wandb_id, wandb_id


def unlike(cfg: Config, found: Path, before: dict, now: dict) -> list[str]:
    """Names what has changed since the checkpoint `found` was made, one line each.

    before, now: digest of the `prompts`, `files` as of `file_digests`, type of the `device`. What an older checkpoint
    does not record is not compared.
    """
    files = before.get("files", {})
    lines = [
        f"{flag(name)} {path} has another content than when {found} was made"
        for name, (path, digest) in now["files"].items()
        if name in files and files[name][0] == path and files[name][1] != digest
    ]
    if before.get("prompts", now["prompts"]) != now["prompts"]:
        lines.append(f"{found} was trained on other prompts than {cfg.data.train} holds")
    device = before.get("device", now["device"])
    if device != now["device"] and engine_name(cfg) == "vllm":
        # Its generators are the device's; those of the other engines are not.
        lines.append(f"{found} was made on {device}; on {now['device']} vllm draws other tokens from the same seeds")
    return lines


class Progress:
    """Steps done, prompts drawn, and the checkpoints of them. Every method is collective over all ranks.

    Made once the models stand: they are loaded from the newest checkpoint here. `begin` follows when all else is built.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        folder: Path,
        models: Models,
        algo: Algorithm,
        spikes: Spikes,
        prompts: str,
        timer: Timer,
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        self.cfg, self.world, self.folder, self.timer, self.note = cfg, world, folder, timer, note
        self.models, self.algo, self.spikes = models, algo, spikes
        # What moves begins as the settings say.
        self.begun_with = dict(algo.state)
        self.saver = checkpoint.Saver(cfg, folder / "checkpoints", world)
        self.saver.prepare(models, warn)
        self.draws = 0
        """Prompts drawn for the steps that were learnt from."""
        self.rank_files: list[Path] = []
        self.made_with = {"prompts": prompts, "files": self._files(), "device": world.device.type}
        self.start_step = self._resume()

    def _resume(self) -> int:
        found = checkpoint.find_resume(self.folder / "checkpoints", self.world)
        if found is None:
            return 0
        state = checkpoint.load(found, self.models)
        self._compare(found, state)
        if self.models.policy:
            self.models.policy.version = state["version"]
            self.models.policy.updates_done = state["updates_done"]
        for name, model in self.models.trained().items():
            model.updates_done = state["trained"][name]
        for name, model in self.models.learning().items():
            # A checkpoint that does not tell is of a run whose schedule went by the steps taken.
            model.updates_due = state.get("due", {}).get(name, model.updates_done)
        # What was set anew (--run.allow-changes) is as it was set.
        begun = state.get("begun_with", self.begun_with)
        self.algo.state |= {k: v for k, v in state["algorithm"].items() if begun.get(k) == self.begun_with.get(k)}
        self.spikes.restore(state.get("guards", {}))
        self.draws = state["draws"]
        self.rank_files = checkpoint.rank_files(found)
        self.saver.resumed(state["step"])
        if self.world.is_first and state.get("wandb") and not wandb_id(self.folder):
            # A checkpoint that was moved to another folder.
            keep_wandb_id(self.folder, state["wandb"])
        self.note(f"resumed from {found}: step {state['step']}")
        return state["step"]

    def _compare(self, found: Path, state: dict) -> None:
        """Refuses to go on where data, files or device are others than when the run was made.

        Raises:
            ValueError: something changed, and `--run.allow-changes` is not given.
        """
        said = unlike(self.cfg, found, state, self.made_with)
        if said and not self.cfg.run.allow_changes:
            raise ValueError(
                f"{'; '.join(said)}: give it the same, take another --run.dir, --run.fresh (moves that folder aside "
                "and starts over), or --run.allow-changes (goes on so)"
            )
        for line in said:
            self.note(f"--run.allow-changes: {line}")

    def _files(self) -> dict[str, list[str]]:
        """`file_digests`, alike on all ranks. Collective.

        Raises:
            ValueError: they are not.
        """
        seen = [json.loads(text) for text in all_gather_text(json.dumps(file_digests(self.cfg)), self.world.host_group)]
        for name, (path, digest) in seen[0].items():
            odd = [rank for rank, files in enumerate(seen) if files[name][1] != digest]
            if odd:
                raise ValueError(
                    f"{flag(name)} {path}: ranks {odd} read another content than rank 0; give every node the same files"
                )
        return seen[0]

    def begin(self, holder: Holder) -> None:
        """Put back what every rank held, last before the first step: building an engine draws from the generators."""
        self.holder = holder
        self.agreement = Agreement(self.world, self.cfg.run.timeout)
        if self.start_step and (lost := restore(holder, self.rank_files)):
            self.note(lost)

    def step_done(self, step: int, version: int) -> None:
        """Agree with all ranks on this step, counted from 0; save if it is due, leave if that is wanted.

        Raises:
            LockstepError: ranks went different ways.
            PreemptedError: on every rank.
        """
        cfg = self.cfg.checkpoint
        done = step + 1
        with self.timer("agree"):
            held = {"step": step, "draws": self.draws, "version": version}
            leave = self.agreement(held, preemption.wanted)
        last = done == self.cfg.run.steps and cfg.at_end
        if last or (cfg.every and done % cfg.every == 0):
            self._save(done)
        if leave:
            raise PreemptedError(done, f"step {done} was finished")

    def leave(self, left: PreemptedError) -> None:
        """Save what was learnt where no checkpoint has it, wait until it is published, and say so in a file."""
        if left.step > self.start_step and self.saver.saved != left.step:
            self._save(left.step)
        with self.timer("checkpoint"):
            self.saver.finish()
        who = request()
        if self.world.is_first:
            mark(preemption.request, left.step)
        saved = f"step {left.step} is in {self.folder}/checkpoints/step_{left.step}"
        saved = saved if left.step else "nothing is learnt yet"
        self.note(f"preempted ({who}): {left}; {saved}, and the same command goes on from there")

    def _save(self, done: int) -> None:
        with self.timer("checkpoint"):
            with self.timer("checkpoint_wait"):
                self.saver.finish()
            # Rank 0 writes it, which trains.
            policy = self.models.policy
            state = policy and {
                "step": done,
                "version": policy.version,
                "updates_done": policy.updates_done,
                "trained": {name: model.updates_done for name, model in self.models.trained().items()},
                "due": {name: model.updates_due for name, model in self.models.learning().items()},
                "guards": self.spikes.state(),
                "algorithm": self.algo.state,
                "begun_with": self.begun_with,
                **self.made_with,
                "draws": self.draws,
                "seed": self.cfg.run.seed,
                "wandb": wandb_id(self.folder),
            }
            self.saver.save(done, state, rank_state(self.holder), self.models)
