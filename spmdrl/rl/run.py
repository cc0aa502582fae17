"""Everything one run is made of, built in one place: world, models, engine, prompts, reward, trackers, checkpoints."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from spmdrl.algos.filters import FILTERS
from spmdrl.config.engines import pushed_parts, sleep_level
from spmdrl.config.paths import run_folder
from spmdrl.config.schema import Config
from spmdrl.data.batch import Batch, from_trajectories, share_out, to_trajectories
from spmdrl.data.order import drawn_indices
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.data.trajectory import Trajectory
from spmdrl.data.tree import prompt_lengths
from spmdrl.health.preempt import AbandonedError, PreemptedError, agreed, preemption
from spmdrl.health.status import here
from spmdrl.hub.resolve import resolve
from spmdrl.hub.routing import experts_of
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.attention.packed import check_attention
from spmdrl.policy.models import build_models
from spmdrl.rewards.load import check_cost, load_reward
from spmdrl.rl.algorithm import Algorithm
from spmdrl.rl.collect import Collected, Group, Round, collect, whole
from spmdrl.rl.compose import compose, load_function
from spmdrl.rl.evaluation import evaluate_round, evaluation_round, is_evaluated, model_score
from spmdrl.rl.experience import Ahead, Experience, Replay, check_parts, fill
from spmdrl.rl.journal import Journal, check_mismatch, describe, describe_age, told, with_rates
from spmdrl.rl.progress import Progress
from spmdrl.rl.resume import Holder
from spmdrl.rl.score import serve
from spmdrl.rl.spikes import Spikes
from spmdrl.rl.update import steer
from spmdrl.rollout.build import build_engine, check_engine, prompt_room, stop_tokens
from spmdrl.rollout.engine import Engine
from spmdrl.session.device_table import Memory, room_for_engine
from spmdrl.spmd.exchange import all_gather_text, all_reduce
from spmdrl.spmd.mesh import World
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import generator_for, seed_for
from spmdrl.spmd.storage import scratch_folder
from spmdrl.tracking.console import Console
from spmdrl.tracking.metrics import Metrics, Timer

log = logging.getLogger("spmdrl")


class Run:
    """One run on one rank. `open_run` makes it; `train.py` drives it."""

    def __init__(self, cfg: Config, world: World, timer: Timer, console: Console | None):
        self.cfg, self.world, self.timer, self.console = cfg, world, timer, console
        self.folder = run_folder(cfg)
        self.peers = world.data_peers
        self.algo: Algorithm = compose(cfg)
        self.keep = load_function(cfg.filter.keep, FILTERS) if cfg.filter.keep else None
        self.replay = Replay(cfg.filter, cfg.rollout.prompts_per_step)
        self.note("loading tokenizer and prompts")
        model_folder = resolve(cfg.model.path, cfg.model.trust_remote_code)
        check_engine(cfg, world.device.type == "cpu")
        check_attention(cfg, world.device)
        if "disk" in (cfg.policy.offload, cfg.reference.offload):
            scratch_folder()
        self.tokenizer = load_tokenizer(model_folder, cfg.model.trust_remote_code)
        room = prompt_room(cfg, model_folder)
        self.prompts = self._prompts(cfg.data.train, room, cfg.data.limit, "--data.limit")
        self.eval_prompts = None
        if is_evaluated(cfg):
            self.eval_prompts = self._prompts(cfg.data.eval, room, cfg.eval.prompts, "--eval.prompts")
        check_cost(cfg.reward, cfg.safety.cost)
        self.grader = load_reward(cfg.reward, finite=cfg.filter.bad_sample == "stop") if world.samples else None
        self.timeouts_seen = 0
        self.experts_width = 0
        if cfg.rollout.routing_replay:
            # Of every rank: one without samples needs the column too.
            self.experts_width = experts_of(model_folder, cfg.model.trust_remote_code).width
        self.note(f"building policy {cfg.model.path} ({cfg.model.dtype})")
        self.models = build_models(cfg, world, self.algo.needs)
        self.policy = self.models.policy
        self.spikes = Spikes(self.folder, world, self.models, self.algo, self.warn)
        self.progress = Progress(
            cfg,
            world,
            self.folder,
            self.models,
            self.algo,
            self.spikes,
            self.prompts.digest(),
            timer,
            self.note,
            self.warn,
        )
        self.start_step = self.progress.start_step
        self.ahead = Ahead(self._sample, cfg.rollout.staleness, self.start_step, cfg.run.steps, self.progress.draws)
        stop = stop_tokens(model_folder, self.tokenizer)
        self.note(f"starting engine {cfg.rollout.engine}")
        self.engine = self._engine(stop) if world.samples else None
        self.memory = Memory(cfg, self.models, self.engine, timer, world)
        self.journal = Journal(cfg, world, self.folder, console, self.tokenizer, self.start_step)
        self.eval_metrics: dict[str, float] = {}
        self.to_judge: list[Trajectory] | None = None
        """Samples of this rank's evaluation that the reward model has not seen."""
        self.progress.begin(Holder(cfg, world, self.prompts, self.ahead, self.replay, "greedy" in self.algo.needs))
        self.step_began = time.perf_counter()

    # ── building ─────────────────────────────────────────────────────────────

    def _engine(self, stop: set[int]) -> Engine:
        """The engine of this rank, asleep where the models of the same rank need its memory first."""
        with room_for_engine(self.models, self.cfg):
            engine = build_engine(self.cfg, self.world, stop)
            on_cpu = self.world.device.type == "cpu"
            level = sleep_level(self.cfg, on_cpu)
            if level == 2 and len(pushed_parts(self.cfg)) > 1:
                held = engine.bytes_by_owner().get("engine weights", 0) / 2**30
                self.warn(
                    f"--rollout.sleep-level 2 with --lora.push adapter: the {held:.2f} GiB beneath the adapters travel "
                    "to every engine rank at every step; 1 keeps them in host memory"
                )
            if self.policy is not None and not (on_cpu and self.cfg.policy.offload == "none"):
                engine.sleep(level)
        return engine

    def note(self, text: str) -> None:
        """One line on the console of rank 0 and in every rank's log."""
        log.info(text)
        if self.console:
            self.console.note(text)

    def warn(self, text: str) -> None:
        """The same, as a warning."""
        log.warning(text, extra={"file_only": True})
        if self.console:
            self.console.note(f"warning: {text}")

    def _prompts(self, spec: str, room: int, limit: int, flag: str) -> PromptSet:
        prompts = load_prompts(spec, self.cfg.data, self.tokenizer, room, limit)
        seen = all_gather_text(prompts.digest(), self.world.host_group)
        if len(set(seen)) > 1:
            odd = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            raise ValueError(f"{spec}: ranks {odd} read other prompts than rank 0; give every node the same files")
        dropped = f", {prompts.dropped} longer than {room} tokens dropped" if prompts.dropped else ""
        bounded = limit and len(prompts) + prompts.dropped == limit
        only = f", no more than the first {limit} being asked for ({flag} {limit})" if bounded else ""
        self.note(f"{len(prompts)} prompts from {prompts.source}{dropped}{only}")
        return prompts

    # ── one step ─────────────────────────────────────────────────────────────

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 0."""
        for step in range(self.start_step, self.cfg.run.steps):
            self.step_began = time.perf_counter()
            self.spikes.step = here.step = step + 1
            yield step
            here.done = step + 1

    def experience(self, step: int) -> Experience:
        """What this step learns from, sampled and graded here unless that was done ahead. Collective over samplers.

        Nothing on a rank that does not sample.

        Raises:
            PreemptedError: on every rank, where sampling was abandoned.
        """
        done, world = None, self.world
        with suppress(AbandonedError):
            done = self.ahead.take(step) if world.samples else Experience([])
        with self.timer("exchange"):
            self._unless(done is None, step, f"step {step + 1} was abandoned while it sampled")
        assert done is not None
        return done

    def _unless(self, abandoned: bool, step: int, what: str) -> None:
        """Go on only where those who sample, who agree among themselves, have not abandoned. Collective."""
        if self.world.roles.split:
            abandoned = agreed(abandoned, self.world.host_group)
        if abandoned:
            raise PreemptedError(step, what, abandoned=True)

    def stand_by(self, step: int, batch: Batch) -> Metrics:
        """What a rank that does not train does while others do. Collective over ranks of its kind.

        It samples the steps to come, or answers for the frozen models; what it has to tell stands in `log` anyway.
        """
        if self.world.samples:
            with suppress(AbandonedError):
                self.ahead.look_ahead(step)
        else:
            with self.timer("logp"):
                serve(batch, self.models, self.algo, self.cfg.rollout.temperature)
        return Metrics()

    def _sample(self, step: int, carried: list[Group]) -> Experience:
        assert self.engine and self.grader, "this rank samples"
        engine, grader = self.engine, self.grader
        return fill(
            lambda before, prompts: self.round(step, before, prompts),
            lambda round_: self._whole(collect(round_, engine, grader, self.tokenizer, self.world, self.timer)),
            self.keep,
            self.cfg,
            self.world,
            carried,
            step,
        )

    def _whole(self, done: Collected) -> Collected:
        """Engines wait for the slowest one here."""
        with self.timer("exchange"):
            return whole(done, self.world)

    def round(self, step: int, before: int, prompts: int) -> Round:
        """A round of `prompts` prompts, after `before` in this step; the same on every rank, for every world size."""
        cfg, first = self.cfg.rollout, self.ahead.draws + before
        drawn = drawn_indices(len(self.prompts), first, prompts, self.cfg.run.seed)
        return Round(
            f"train/{self.start_step}/{step}/{before}",
            [self.prompts.prompts[i] for i in drawn],
            cfg.samples_per_prompt,
            (self.cfg.run.seed, step),
            self.memory.version,
            cfg.max_new_tokens,
            cfg.temperature,
            cfg.top_p,
            cfg.assignment,
            first_position=first,
            greedy="greedy" in self.algo.needs,
            bad_sample=self.cfg.filter.bad_sample,
            may_end=lambda: preemption.sampling_over,
        )

    def pack(self, trajectories: list[Trajectory], step: int) -> Batch:
        """This rank's trajectories as a batch that knows which optimizer step uses which sequence. Collective."""
        names = sorted({name for t in trajectories for name in t.parts})
        # A rank without samples knows no names of reward parts, and the columns must agree.
        texts = all_gather_text("\n".join(names), self.world.host_group)
        names = tuple(sorted({name for text in texts for name in text.splitlines()}))
        prompts, seed = self.cfg.rollout.prompts_per_step, self.cfg.run.seed
        batch = from_trajectories(trajectories, names, self.experts_width)
        rows = zip(*(batch.seq[k].tolist() for k in ("prompt", "position", "sample")), strict=True)
        batch.seq["seed"] = torch.tensor([seed_for(seed, step, *row, 1) for row in rows], dtype=torch.int64)
        batch.seq["work"] = batch.lengths
        if self.algo.skip_zero_advantage:
            # Groups come whole from an engine; one that agrees will not be run, and counts as next to nothing.
            batch.seq["work"] = torch.where(batch.group_differs(), batch.lengths, 1)
        if self.policy.share if self.policy else self.cfg.policy.share_prompts:
            common = prompt_lengths(batch.lengths, batch.token["mask"])
            batch.seq["common"] = torch.minimum(common, batch.seq["work"] - 1)
        batch = self.replay.mix(batch, seed, step, Peers(self.world.group, self.world.device))
        check_parts(batch, self.cfg)
        order = list(range(prompts))
        generator_for(seed, step, 1).shuffle(order)
        return share_out(batch, self.cfg.algo.updates_per_step, prompts, order)

    def evaluate(self, step: int, force: bool = False) -> None:
        """Evaluate before this step's rollout if it is due; the numbers stand in that step's log line. Collective.

        With a reward model `judge` has to follow, in the training phase.

        Raises:
            PreemptedError: on every rank, where it was abandoned.
        """
        due = self.cfg.eval.every and (step % self.cfg.eval.every == 0 or force)
        if not due or self.eval_prompts is None:
            return
        with self.timer("eval"):
            abandoned, samples = True, []
            with suppress(AbandonedError):
                if self.engine and self.grader:
                    name, over = f"{self.start_step}/{step}/{force}", lambda: preemption.sampling_over
                    round_ = evaluation_round(self.cfg, self.eval_prompts.prompts, self.memory.version, name, over)
                    asked = self.engine, self.grader, self.tokenizer, self.world
                    self.eval_metrics, samples = evaluate_round(round_, *asked)
                abandoned = False
            self._unless(abandoned, step, f"the evaluation after step {step} was abandoned")
            self.eval_metrics = told(self.eval_metrics, self.world)
            self.to_judge = samples if self.cfg.reward.model else None

    def judge(self) -> None:
        """Add the reward model's score to `eval/score`, where an evaluation waits for it. Collective."""
        if self.to_judge is None:
            return
        with self.timer("eval"):
            score, self.to_judge = model_score(self.to_judge, self.models, self.world), None
        self.eval_metrics["eval/model"] = score
        self.eval_metrics["eval/score"] += self.cfg.reward.model_coef * score

    # ── after a step ─────────────────────────────────────────────────────────

    def log(self, step: int, batch: Batch, done: Experience, stats: Metrics) -> None:
        """Reduce this step's numbers over ranks and write them. Collective."""
        with self.timer("log"):
            self._log(step, batch, done, stats)

    def _log(self, step: int, batch: Batch, done: Experience, stats: Metrics) -> None:
        world, rollout = self.world, self.cfg.rollout
        stats.merge(done.stats)
        timeouts = self.grader.timeouts if self.grader else 0
        drawn = done.drawn * (world.rank == world.roles.samplers[0])
        counts = torch.tensor([timeouts - self.timeouts_seen, done.bad_samples, drawn])
        self.timeouts_seen = timeouts
        timeouts, bad, drawn = all_reduce(counts, "sum", world.host_group).tolist()
        # Of the steps that were learnt from: what was sampled ahead is sampled again after a resume.
        self.progress.draws += drawn
        if world.trains:
            describe(stats, batch, bool(self.cfg.reward.model))
            if world.roles.split or rollout.oversample > 1:
                describe_age(stats, batch, self.memory.version)
            stats.add("reward/timeouts", timeouts)
            if self.cfg.filter.bad_sample == "skip":
                stats.add("filter/bad_samples", bad)
        for name, gib in self.memory.metrics().items():
            stats.add_max(name, gib)
        for name, seconds in self.timer.flush().items():
            stats.add(name, seconds)
        stats.add_max("time/step", time.perf_counter() - self.step_began)
        if world.trains:
            values = with_rates(stats.reduce(lambda x, op: all_reduce(x, op, world.data_group), world.device))
            values |= {"version": self.policy.version}
        else:
            values = stats.reduce(lambda x, op: all_reduce(x, op, world.role_group))
        values = told(values, world) | self.eval_metrics | self.progress.saver.poll()
        self.progress.saver.know(step + 1, values)
        if step + 1 == self.cfg.run.steps:
            # `finish` evaluates once more, and its numbers join this line.
            values = {re.sub("^eval/", "eval_before/", name): value for name, value in values.items()}
        self.eval_metrics = {}
        steer(self.algo, self.cfg, values, rollout.prompts_per_step * rollout.samples_per_prompt)
        self.journal.step(step + 1, values, to_trajectories(batch) if world.roles.split else done.trajectories)
        # Once the step is written down: its numbers are what there is to look at.
        if warning := check_mismatch(step + 1, values, self.cfg):
            self.warn(warning)

    def checkpoint(self, step: int) -> None:
        """Agree on the step that was done, save if it is due, and leave if that is wanted. Collective."""
        self.progress.step_done(step, self.memory.version)

    def leave(self, left: PreemptedError) -> None:
        """Save what was learnt where no checkpoint has it. Collective."""
        if left.abandoned:
            # The weights may be off the device.
            with self.memory.training_phase():
                pass
        self.progress.leave(left)

    def finish(self) -> None:
        """Evaluate what was learnt, and say where everything is. Collective."""
        lines = []
        done = max(self.start_step, self.cfg.run.steps)
        here.step = here.done = done
        if self.cfg.eval.every and self.eval_prompts is not None:
            with self.memory.rollout_phase():
                self.evaluate(done, force=True)
            if self.to_judge is not None:
                with self.memory.training_phase():
                    self.judge()
            self.journal.numbers(done, self.eval_metrics | {"version": self.memory.version})
            self.progress.saver.know(done + 1, self.eval_metrics)
            lines.append("  ".join(f"{k} {v:.3f}" for k, v in self.eval_metrics.items()))
        self.progress.saver.finish()
        if written := self.progress.saver.poll():
            self.journal.numbers(done, written)
        latest = self.folder / "checkpoints" / "latest"
        lines.append(
            f"run {self.folder}  checkpoint {latest if latest.exists() else 'none'}  "
            f"curves {self.folder / 'metrics.jsonl'}"
        )
        if self.console:
            self.console.finish(lines)

    def close(self) -> None:
        """Close files and processes."""
        self.journal.close()
        if self.grader:
            self.grader.close()
