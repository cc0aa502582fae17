"""Settings of on-policy distillation, and the rules for them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config.checks import run_problems
from spmdrl.config.declare import DISTILL, SHARE, at_least, hides, section, setting
from spmdrl.config.divergence import DivergenceConfig, divergence_problems, divergence_words
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import refuse
from spmdrl.config.learning import (
    AlgoConfig,
    ShapingConfig,
)
from spmdrl.config.named import name_weight
from spmdrl.config.plan import plan_lines
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import Config, ReferenceConfig, RunConfig


@hides(DISTILL)
@dataclass
class TeacherConfig(ReferenceConfig):
    """The teacher: a frozen model."""

    path: str = ""
    """The teacher, as `--model.path`. It reads the student's tokens; its vocabulary may be padded to another length."""
    mix: float = setting(1.0, SHARE, only_with=lambda c: c.reference.refresh_every)
    """Share of the student in the teacher at each `--reference.refresh-every`: below 1 the teacher is a moving average
    of the student's weights (SDFT, https://arxiv.org/abs/2601.19897); 1 takes the student's weights."""


@dataclass
class DistillSection(DivergenceConfig):
    """The divergence that the student learns by, further teachers, and what they and the student read."""

    more_teachers: tuple[str, ...] = ()
    """Further teachers. `path=weight`: its divergence counts that much, and the first teacher's 1, in a weighted mean.
    `path@source`: it alone teaches the rows whose `data_source` is that."""
    given_per_step: int = setting(0, at_least(0))
    """Prompts of a step, beside `--rollout.prompts-per-step`, whose response is the data set's and not the student's.
    GKD's lambda, the share of the student's own, is P x S / (P x S + N) with P prompts of S samples and N of these."""
    given_column: str = setting("", only_with=lambda c: c.distill.given_per_step)
    """Column with those responses, text. Empty: `--data.answer-column`."""
    teacher_template: str = ""
    """Text around the prompt that the teacher alone reads, in place of `--data.template`: what only it is told stands
    there as `{column}` (SDFT, https://arxiv.org/abs/2601.19897). Empty: it reads what the student reads."""
    on_engine: bool = False
    """The teachers read in the run's own engine, in which their weights take the student's place once a step is
    sampled; none is in the trainer's memory. They have the student's architecture."""
    align: Literal["off", "uld", "gold"] = "off"
    """A teacher with another tokenizer reads the student's text. `uld`: distance of sorted probabilities over spans of
    text (https://arxiv.org/abs/2402.12030). `gold`: tokens that both have by the divergence, the others sorted."""
    merge: Literal["first", "last"] = setting("first", only_with=lambda c: c.distill.align != "off")
    """Distribution of a span of several tokens: that at its first token times the probabilities of the later ones, or
    that at its last times those of the earlier ones."""


@dataclass(frozen=True)
class FurtherTeacher:
    """One of `--distill.more-teachers`."""

    path: str
    weight: float
    """Beside the first teacher's 1."""
    source: str
    """The `data_source` that it alone teaches; empty: it is mixed in everywhere else."""


def read_teachers(specs: tuple[str, ...]) -> dict[str, FurtherTeacher]:
    """Read `--distill.more-teachers`: the teachers by name.

    Raises:
        ValueError: an entry that is neither `path=weight` nor `path@source`.
    """
    found = {}
    for number, spec in enumerate(specs, 2):
        form = f"--distill.more-teachers {spec}: write path=weight with a number above 0, or path@source"
        path, _, source = spec.rpartition("@")
        weight = 1.0
        if not path:
            path, weight = name_weight(spec, form)
            source = ""
        if weight is None:
            raise ValueError(form)
        found[f"teacher_{number}"] = FurtherTeacher(path, weight, source)
    return found


def _values(section: str) -> dict:
    """The preset `distill`'s values of a section."""
    named = PRESETS["distill"].settings.items()
    return {name.partition(".")[2]: value for name, value in named if name.startswith(f"{section}.")}


@hides(DISTILL)
@dataclass
class DistillationConfig(Config):
    """On-policy distillation of a language model. Every rank runs this same program."""

    run: RunConfig = section(RunConfig, name="distill")
    reference: TeacherConfig = section(TeacherConfig, enabled="on")
    distill: DistillSection = section(DistillSection)
    algo: AlgoConfig = section(AlgoConfig, preset="distill", **_values("algo"))
    shaping: ShapingConfig = section(ShapingConfig, **_values("shaping"))
    learns_from_rewards: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = True

    @property
    def aligns_tokens(self) -> bool:
        """True where the teacher may have another tokenizer than the student."""
        return self.distill.align != "off"

    def further_teachers(self) -> dict[str, FurtherTeacher]:
        """The teachers beside the first one by name. Raises ValueError as `read_teachers`."""
        return read_teachers(self.distill.more_teachers)

    def engine_teachers(self) -> dict[str, str]:
        """See `Config`."""
        if not self.distill.on_engine:
            return {}
        return {"reference": self.reference.path} | {name: t.path for name, t in self.further_teachers().items()}


def check_distillation(config: DistillationConfig, world_size: int) -> None:
    """Check all values together.

    Raises:
        ConfigError: listing every problem.
    """
    refuse(_problems(config) + run_problems(config, world_size))


def _problems(config: DistillationConfig) -> list[str]:
    distill = config.distill
    problems = divergence_problems(distill, "distill", config.policy.backend, config.model.dtype)
    try:
        config.further_teachers()
    except ValueError as error:
        problems.append(str(error))
    if distill.more_teachers and config.reference.refresh_every:
        problems.append(
            f"--reference.refresh-every {config.reference.refresh_every}: a teacher that follows the student stands "
            "alone; take 0, or no --distill.more-teachers"
        )
    problems += _aligning(config)
    if config.parallel.scoring_ranks and not distill.top_k:
        problems.append(
            f"--parallel.scoring-ranks {config.parallel.scoring_ranks}: a teacher on ranks of its own sends its "
            "likeliest tokens; set --distill.top-k, or take 0"
        )
    return problems + (_engine_problems(config) if distill.on_engine else [])


def _engine_problems(config: DistillationConfig) -> list[str]:
    name, distill, rollout, problems = "--distill.on-engine", config.distill, config.rollout, []
    if not distill.top_k:
        problems.append(f"{name}: an engine tells the likeliest tokens; set --distill.top-k")
    if config.parallel.placement == "split":
        problems.append(f"{name}: with --parallel.placement split the engine samples ahead; take colocated")
    if config.reference.offload != "none":
        problems.append(f"{name}: no teacher is in memory to be moved; leave --reference.offload out")
    if config.reference.refresh_every:
        problems.append(f"{name}: a teacher in the engine stays as its folder is; take --reference.refresh-every 0")
    if distill.teacher_template:
        problems.append(f"{name}: the engine is built for the student's prompts; leave --distill.teacher-template out")
    if config.lora.rank and config.lora.push == "adapter":
        problems.append(f"{name}: the engine keeps the student's model beneath the adapters; take --lora.push merged")
    if rollout.quantization != "none":
        problems.append(f"{name}: --rollout.quantization {rollout.quantization} rounds a teacher, too; take none")
    if rollout.dp > 1:
        problems.append(f"{name}: --rollout.dp {rollout.dp} gives each copy requests of its own; take 1")
    engine = engine_name(config)
    if engine == "sglang":
        problems.append(f"{name}: SGLang is not asked for them; take --rollout.engine vllm or hf")
    if engine == "vllm" and rollout.temperature != 1:
        problems.append(
            f"{name}: vLLM tells log-probabilities of given tokens at temperature 1 alone; take --rollout.temperature "
            f"1 instead of {rollout.temperature:g}, or --rollout.engine hf"
        )
    return problems


def _aligning(config: DistillationConfig) -> list[str]:
    distill, align = config.distill, f"--distill.align {config.distill.align}"
    if distill.align == "off":
        return []
    problems = []
    if distill.on_engine:
        problems.append(f"{align}: the teacher lies on the student's ranks; leave --distill.on-engine out")
    if distill.align == "uld" and distill.beta != 1:
        problems.append(f"--distill.beta {distill.beta:g}: is read with --distill.align gold; leave it out")
    if distill.top_k:
        problems.append(f"{align}: probabilities of all tokens are sorted; take --distill.top-k 0")
    if distill.more_teachers:
        problems.append(f"{align}: there is one teacher; leave --distill.more-teachers out")
    if config.reference.refresh_every:
        problems.append(f"{align}: a teacher that follows the student has its tokens; take --reference.refresh-every 0")
    if config.parallel.scoring_ranks:
        problems.append(f"{align}: the teacher lies on the student's ranks; take --parallel.scoring-ranks 0")
    return problems


def distillation_lines(config: DistillationConfig, world_size: int) -> list[str]:
    """How the counts multiply out, printed at the start and by `--dry-run`."""
    distill = config.distill
    told = divergence_words(distill, config.rollout.temperature)
    if distill.align != "off":
        both = f"{told.partition(' over ')[0]} of tokens that both have, " if distill.align == "gold" else ""
        told = f"{both}distance of sorted probabilities, over spans of text, temperature {config.rollout.temperature:g}"
    line = f"teacher  {config.reference.path}: {told}"
    given, sampled = distill.given_per_step, config.rollout.prompts_per_step
    mixed = [f"given    {given:,} responses of the data set a step beside {sampled:,} prompts that are sampled"]
    more = [
        f"teacher  {each.path}: " + (f"alone for {each.source}" if each.source else f"weight {each.weight:g}")
        for each in config.further_teachers().values()
    ]
    moves, mix = config.reference.refresh_every, config.reference.mix
    if moves:
        what = (
            f"takes {mix:g} of the student and keeps {1 - mix:g} of itself"
            if mix != 1
            else "takes the student's weights"
        )
        more.append(f"teacher  {what} every {moves:,} steps")
    return [*plan_lines(config, world_size), line, *more, *(mixed if given else [])]
