"""Builds a run on every rank: prompts, models, checkpoints and engine, in an order that limits peak memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.algos.filters import FILTERS
from spmdrl.config.environment import COLUMN, ROWS, read_environment, weight_of
from spmdrl.config.judge import engine_judges
from spmdrl.config.judge import judges as judge_files
from spmdrl.config.named import load_function
from spmdrl.config.rewards import runs_programs
from spmdrl.config.schema import Config
from spmdrl.data.prompts import PromptSet, load_prompts
from spmdrl.data.row_columns import unread_line
from spmdrl.data.step_batch import ReplayBuffer
from spmdrl.data.template_ends import job_template
from spmdrl.engines.build import check_engine, prompt_limit, stop_tokens
from spmdrl.hub.resolve import resolve
from spmdrl.hub.routing import experts_of
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.attention.packed import check_attention
from spmdrl.policy.models import Models, build_models, check_models, exclude_placeholders
from spmdrl.policy.objectives.algorithm import Algorithm
from spmdrl.rewards.load import check_cost, check_truths, load_reward, scores_timeouts
from spmdrl.rl.compose import compose
from spmdrl.rl.engine_judges import EngineJudges
from spmdrl.rl.environment import Environment, OnFirstRank
from spmdrl.rl.evaluation import Evaluation
from spmdrl.rl.image_checks import check_image_prompts, text_setting
from spmdrl.rl.reading import at_last, reading_of
from spmdrl.rl.run import PolicyGradient, Run
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.spikes import Spikes
from spmdrl.rl.state import RankState, RunState
from spmdrl.rl.tool_calls import conversation_of
from spmdrl.session.checkpoints import Checkpoints
from spmdrl.session.device_table import Memory
from spmdrl.session.engine import sleeping_engine
from spmdrl.session.engine_check import EngineCheck, check_frequencies
from spmdrl.session.image_reader import ImageReader, image_reader
from spmdrl.session.journal import Journal
from spmdrl.session.session import Session
from spmdrl.spmd.agreement import rank_ranges
from spmdrl.spmd.exchange import all_gather_text
from spmdrl.spmd.storage import scratch_folder


@dataclass(frozen=True)
class Sources:
    """The tokenizer and the prompts, which a run loads before it builds any model."""

    folder: Path
    """Folder of the policy's model."""
    tokenizer: Any
    images: ImageReader | None
    """Reads the images of prompts; None if the model reads text only."""
    limit: int
    """Maximum prompt length in tokens."""
    stop: set[int]
    """Tokens that end a response."""
    prompts: PromptSet
    eval_prompts: PromptSet | None
    """Evaluation prompts, or None if the run never evaluates."""

    @property
    def sets(self) -> list[PromptSet]:
        """The sets of prompts that there are."""
        return [each for each in (self.prompts, self.eval_prompts) if each]


def build_run(session: Session[Config], method: Callable[[Run], PolicyGradient] = PolicyGradient) -> Run:
    """Build a run. Collective over all ranks. method: factory for the run's learning method."""
    cfg, world = session.cfg, session.world
    algo = compose(cfg)
    keep = load_function(cfg.filter.keep, FILTERS) if cfg.filter.keep else None
    read = read_sources(session)
    placeholder = read.images.vision.image if read.images else None
    for line in _warnings(cfg):
        session.warn(line)
    finite = cfg.filter.bad_sample == "stop"
    data_sources = {prompt.data_source for each in read.sets for prompt in each.prompts}
    grader = load_reward(cfg.reward, cfg.sandbox, finite, data_sources) if world.samples else None
    judges = EngineJudges(cfg, world, read.tokenizer, grader) if grader and grader.on_engine else None
    # Every rank computes this width, because batches must have the same columns even on ranks without samples.
    experts_width = experts_of(read.folder, cfg.model.trust_remote_code).width if cfg.rollout.routing_replay else 0
    session.note(f"building policy {cfg.model.path} ({cfg.model.dtype})")
    environment = None
    if cfg.env and world.samples:
        environment = open_environment(session, read.tokenizer, read.stop, read.limit, read.images)
    models = open_models(session, algo, read)
    if judges and models.policy:
        judges.frozen.check_policy(models.policy)
    spikes = Spikes(session.folder, world, models, algo, session.warn)
    state = RunState(algo, spikes)
    checkpoints = Checkpoints(session, models, state, read.prompts.digest())
    first, greedy = checkpoints.start_step, "greedy" in algo.needs
    session.note(f"starting engine {cfg.rollout.engine}")
    engine = sleeping_engine(session, models, read.stop) if world.samples else None
    sampler = None
    if engine and grader:
        sampler = Sampler(cfg, world, session.timer, read.prompts, engine, grader, read.tokenizer, first, keep, greedy)
        sampler.judges, sampler.environment, sampler.images = judges, environment, read.images
        sampler.step, sampler.draws = first, state.draws
    replay = ReplayBuffer(cfg.filter, cfg.rollout.prompts_per_step)
    memory = Memory(cfg, models, engine, session.timer, world)
    shown = read.images if any(prompt.images for each in read.sets for prompt in each.prompts) else None
    memory.check = EngineCheck(cfg, world, models.policy, engine, experts_width, shown)
    if judges:
        judges.engine, judges.memory = engine, memory
    run = Run(
        session=session,
        algo=algo,
        models=models,
        spikes=spikes,
        state=state,
        checkpoints=checkpoints,
        sampler=sampler,
        replay=replay,
        evaluation=Evaluation(cfg, world, read.eval_prompts, sampler, models, placeholder),
        memory=memory,
        journal=Journal(session, first),
        tokenizer=read.tokenizer,
        prompts=read.prompts,
        experts_width=experts_width,
        images=read.images,
    )
    run.method = method(run)
    spikes.replays = run.method.replays
    checkpoints.begin(RankState(cfg, world, read.prompts, sampler, replay, greedy))
    return run


def read_sources(session: Session[Config]) -> Sources:
    """Load the tokenizer and the prompts of a run. Collective over all ranks.

    Raises:
        ValueError: a file cannot be read or contradicts the settings; the message names the flag.
    """
    cfg, trust = session.cfg, session.cfg.model.trust_remote_code
    session.note("loading tokenizer and prompts")
    folder = resolve(cfg.model.path, trust)
    check_engine(cfg, session.world.device.type == "cpu")
    check_attention(cfg, session.world.device)
    if "disk" in (cfg.policy.offload, cfg.reference.offload):
        scratch_folder()
    tokenizer = load_tokenizer(folder, trust)
    limit, stop = prompt_limit(cfg, folder), stop_tokens(folder, tokenizer, job_template(cfg, tokenizer))
    images = image_reader(folder, tokenizer, trust)
    prompts = same_prompts(session, tokenizer, cfg.data.train, limit, cfg.data.limit, "--data.limit", images)
    eval_prompts = None
    if cfg.is_evaluated:
        given = cfg.data.eval, limit, cfg.eval.prompts, "--eval.prompts"
        eval_prompts = same_prompts(session, tokenizer, *given, images)
    for each in filter(None, (prompts, eval_prompts)):
        check_image_prompts(cfg, each, folder)
    check_cost(cfg.reward, cfg.safety.cost)
    return Sources(folder, tokenizer, images, limit, stop, prompts, eval_prompts)


def open_models(session: Session[Config], algo: Algorithm, read: Sources) -> Models:
    """Build and check the models of a run, and set up reward-model scoring. Collective over all ranks.

    Raises:
        ValueError: a model does not fit its role, or computes wrong results on this machine.
    """
    cfg = session.cfg
    models = build_models(cfg, session.world, algo.needs)
    check_models(models, cfg, algo.needs, session.note)
    exclude_placeholders(models, cfg)
    if models.policy and cfg.run.steps:
        check_frequencies(cfg, models.policy.hf_config)
    models.reading = reading_of(cfg, models.labels, read.tokenizer, read.prompts)
    models.cost_reading = at_last("--safety.cost-model", cfg.safety.cost_model, cfg.model.trust_remote_code)
    if models.labels:
        session.note(models.labels.note)
    return models


def open_environment(
    session: Session[Config], tokenizer, ends: set[int], room: int, images: ImageReader | None
) -> Environment:
    """Open the environment for episodes on this rank's engine. Collective over the engine.

    ends: tokens that end a response. room: maximum length of an episode's first prompt in tokens. images: reads the
    images that environments show; None if the model reads text only.

    Raises:
        ValueError: the environment does not exist, or the chat template cannot render conversations.
    """
    from spmdrl.rl.agents import Agents

    cfg, world = session.cfg, session.world
    found, renderer = conversation_of(cfg, tokenizer)
    if world.engine_tp_rank:
        return OnFirstRank(found.turn_tokens, found.max_open)
    images = None if text_setting(cfg) else images
    agents = Agents(found, renderer, ends, room, cfg.data.answer_column, weight_of(cfg.reward), images)
    session.note(f"environment {cfg.env}: {agents.hello}; calls in the format {agents.format}")
    if renderer.rewrites:
        way = "continues with the sampled tokens" if found.history == "keep" else "starts a branch"
        history = f"history {found.history} {way}"
        session.note(f"the chat template renders earlier turns differently in later prompts; {history}")
    return agents


def check_named(env: str, prompts: PromptSet) -> None:
    """Raise ValueError if `--env rows` is set and no row names an environment."""
    if read_environment(env).environment == ROWS and not any(prompt.extra.get(COLUMN) for prompt in prompts.prompts):
        raise ValueError(
            f"{prompts.source}: no row names its environment in a column {COLUMN!r}, as --env {env} requires; add the "
            "column, or name one environment for all rows by --env"
        )


def _warnings(cfg: Config) -> Iterator[str]:
    """Yield warnings about valid settings whose effect a user may not expect."""
    if cfg.sandbox.provider == "none" and runs_programs(cfg.reward):
        yield "--sandbox.provider none: programs of the model run on this machine without isolation"
    if cfg.run.deterministic and scores_timeouts(cfg.reward):
        yield (
            f"--run.deterministic: a grading that takes more than --reward.timeout {cfg.reward.timeout:g} s scores 0, "
            "so rewards depend on the clock; watch reward/timeouts, or take --reward.on-timeout error"
        )
    if cfg.run.deterministic and len(judge_files(cfg.reward)) > len(engine_judges(cfg)):
        yield (
            "--run.deterministic: a judge may grade the same response differently in another run, unless its answers "
            "are in its cache"
        )


def same_prompts(
    session: Session, tokenizer, spec: str, room: int, limit: int, flag: str, images: ImageReader | None = None
) -> PromptSet:
    """Load prompts from a source, and check that all ranks loaded the same ones. Collective over all ranks."""
    prompts = load_prompts(spec, session.cfg.data, tokenizer, room, limit, bool(session.cfg.env), images=images)
    check_truths(prompts, session.cfg.reward)
    if session.cfg.env:
        check_named(session.cfg.env, prompts)
    seen = all_gather_text(prompts.digest(), session.world.host_group)
    if len(set(seen)) > 1:
        odd = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
        raise ValueError(
            f"{spec}: rank 0 read other prompts than rank{'s' if len(odd) > 1 else ''} {rank_ranges(odd)}; give every "
            "node the same files"
        )
    if prompts.unread:
        session.warn(f"{spec}: {unread_line(prompts.unread)}")
    for line in prompts.left:
        session.warn(f"{spec}: {line}")
    if prompts.beside:
        session.note(f"{spec}: only rewards and environments get the columns {', '.join(prompts.beside)}")
    dropped = f", {prompts.dropped} longer than {room} tokens dropped" if prompts.dropped else ""
    bounded = limit and len(prompts) + prompts.dropped == limit
    only = f", limited to the first {limit} ({flag} {limit})" if bounded else ""
    session.note(f"{len(prompts)} prompts from {prompts.source}{dropped}{only}")
    return prompts
