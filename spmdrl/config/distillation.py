"""Settings of on-policy distillation, and the rules for them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config.checks import run_problems
from spmdrl.config.declare import SHARE, Job, at_least, hides, section, setting
from spmdrl.config.divergence import DivergenceConfig, divergence_problems, divergence_words
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.learning import AlgoConfig, ShapingConfig
from spmdrl.config.named import name_weight
from spmdrl.config.plan import plan_lines
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import Config, ReferenceConfig, RunConfig


@hides(Job.DISTILL)
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
    """Return the teachers of `--distill.more-teachers` by name. Raises ValueError for an entry of another form."""
    found = {}
    for number, spec in enumerate(specs, 2):
        form = f"--distill.more-teachers {spec}: write path=weight with a number above 0, or path@source"
        path, _, source = spec.rpartition("@")
        weight: float | None = 1.0
        if not path:
            (path, weight), source = name_weight(spec, form), ""
        if weight is None:
            raise ValueError(form)
        found[f"teacher_{number}"] = FurtherTeacher(path, weight, source)
    return found


def _values(section: str) -> dict:
    """Return the values of a section in the preset `distill`."""
    named = PRESETS["distill"].settings.items()
    return {name.partition(".")[2]: value for name, value in named if name.startswith(f"{section}.")}


@hides(Job.DISTILL)
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
        """True if the teacher may have another tokenizer than the student."""
        return self.distill.align != "off"

    def further_teachers(self) -> dict[str, FurtherTeacher]:
        """Return the teachers beside the first one by name. Raises ValueError as `read_teachers` does."""
        return read_teachers(self.distill.more_teachers)

    def engine_teachers(self) -> dict[str, str]:
        """Return paths of the teachers in the engine by name, as `Config` says."""
        if not self.distill.on_engine:
            return {}
        return {"reference": self.reference.path} | {name: t.path for name, t in self.further_teachers().items()}


def check_distillation(config: DistillationConfig, world_size: int, here: bool = True) -> None:
    """Check all values together. here: as of `run_problems`. Raises ConfigError with every problem."""
    refuse(_problems(config) + run_problems(config, world_size, here))


def _problems(config: DistillationConfig) -> list[str]:
    distill = config.distill
    problems = Problems(config, divergence_problems(config, "distill"))
    try:
        config.further_teachers()
    except ValueError as error:
        problems.append(str(error))
    if distill.more_teachers and config.reference.refresh_every:
        advice = "a teacher that follows the student stands alone; take 0, or no --distill.more-teachers"
        problems.add("reference.refresh_every", advice)
    problems += _align_problems(config) if distill.align != "off" else []
    if config.parallel.scoring_ranks and not distill.top_k:
        advice = "a teacher on ranks of its own sends its likeliest tokens; set --distill.top-k, or take 0"
        problems.add("parallel.scoring_ranks", advice)
    return problems + (_engine_problems(config) if distill.on_engine else [])


def _engine_problems(config: DistillationConfig) -> list[str]:
    distill, rollout, engine, refreshed = (
        config.distill,
        config.rollout,
        engine_name(config),
        config.reference.refresh_every,
    )
    adapters, temperature = config.lora.rank and config.lora.push == "adapter", rollout.temperature
    vllm = (
        "vLLM tells log-probabilities of given tokens at temperature 1 alone; take --rollout.temperature 1 instead of "
        f"{temperature:g}, or --rollout.engine hf"
    )
    wrong_if = {
        "an engine tells the likeliest tokens; set --distill.top-k": not distill.top_k,
        "with --parallel.placement split the engine samples ahead; take colocated": config.parallel.placement
        == "split",
        "no teacher is in memory to be moved; leave --reference.offload out": config.reference.offload != "none",
        "a teacher in the engine stays as its folder is; take --reference.refresh-every 0": refreshed,
        "the engine is built for the student's prompts; leave --distill.teacher-template out": distill.teacher_template,
        "the engine keeps the student's model beneath the adapters; take --lora.push merged": adapters,
        f"--rollout.quantization {rollout.quantization} rounds a teacher, too; take none": rollout.quantization
        != "none",
        f"--rollout.dp {rollout.dp} gives each copy requests of its own; take 1": rollout.dp > 1,
        "SGLang is not asked for them; take --rollout.engine vllm or hf": engine == "sglang",
        vllm: engine == "vllm" and temperature != 1,
    }
    return [f"--distill.on-engine: {advice}" for advice, wrong in wrong_if.items() if wrong]


def _align_problems(config: DistillationConfig) -> list[str]:
    distill, align = config.distill, f"--distill.align {config.distill.align}"
    beta, refreshed = f"--distill.beta {distill.beta:g}", config.reference.refresh_every
    apart = config.parallel.scoring_ranks
    wrong_if = {
        f"{align}: the teacher lies on the student's ranks; leave --distill.on-engine out": distill.on_engine,
        f"{beta}: is read with --distill.align gold; leave it out": distill.align == "uld" and distill.beta != 1,
        f"{align}: probabilities of all tokens are sorted; take --distill.top-k 0": distill.top_k,
        f"{align}: there is one teacher; leave --distill.more-teachers out": distill.more_teachers,
        f"{align}: a teacher that follows the student has its tokens; take --reference.refresh-every 0": refreshed,
        f"{align}: the teacher lies on the student's ranks; take --parallel.scoring-ranks 0": apart,
    }
    return [line for line, wrong in wrong_if.items() if wrong]


def distillation_lines(config: DistillationConfig, world_size: int) -> list[str]:
    """Return how the counts multiply out, printed at the start and by `--dry-run`."""
    distill = config.distill
    temperature = config.rollout.temperature
    words = divergence_words(distill, temperature)
    if distill.align != "off":
        both = f"{words.partition(' over ')[0]} of tokens that both have, " if distill.align == "gold" else ""
        words = f"{both}distance of sorted probabilities, over spans of text, temperature {temperature:g}"
    lines = [*plan_lines(config, world_size), f"teacher  {config.reference.path}: {words}"]
    for each in config.further_teachers().values():
        share = f"alone for {each.source}" if each.source else f"weight {each.weight:g}"
        lines.append(f"teacher  {each.path}: {share}")
    if moves := config.reference.refresh_every:
        mix = config.reference.mix
        part = f"{mix:g} of the student and keeps {1 - mix:g} of itself" if mix != 1 else "the student's weights"
        lines.append(f"teacher  takes {part} every {moves:,} steps")
    if given := distill.given_per_step:
        sampled = config.rollout.prompts_per_step
        lines.append(f"given    {given:,} responses of the data set a step beside {sampled:,} prompts that are sampled")
    return lines
