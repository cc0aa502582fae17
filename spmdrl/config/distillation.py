"""Settings for on-policy distillation, with their rules."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config.checks import run_problems
from spmdrl.config.declare import SHARE, Job, at_least, hides, section, setting
from spmdrl.config.divergence import DivergenceConfig, divergence_problems, divergence_words
from spmdrl.config.engines import engine_name
from spmdrl.config.fields import Problems, refuse
from spmdrl.config.learning import AlgoConfig, ShapingConfig
from spmdrl.config.named import name_weight
from spmdrl.config.plan import count, plan_lines
from spmdrl.config.presets import PRESETS
from spmdrl.config.schema import Config, ReferenceConfig, RunConfig


@hides(Job.DISTILL)
@dataclass
class TeacherConfig(ReferenceConfig):
    """The teacher, a frozen model that the student learns from."""

    path: str = ""
    """The teacher, in any form that `--model.path` accepts. Unless `--distill.align` is set, it reads the student's
    tokens, but its vocabulary can be padded to a different size."""
    mix: float = setting(1.0, SHARE, only_with=lambda c: c.reference.refresh_every)
    """Weight m of the student in each update of the teacher (`--reference.refresh-every`): the new teacher is
    m x student + (1 - m) x teacher. With m below 1 it is a moving average of the student (SDFT,
    https://arxiv.org/abs/2601.19897); with m = 1 it is a copy of the student."""


@dataclass
class DistillSection(DivergenceConfig):
    """The divergence between student and teachers, additional teachers, and the text that each model reads."""

    more_teachers: tuple[str, ...] = ()
    """Teachers in addition to `--reference.path`. `path=weight`: the loss is the weighted mean of the divergences from
    these teachers and from the first teacher, whose weight is 1. `path@source`: rows with this `data_source` use only
    this teacher."""
    given_per_step: int = setting(0, at_least(0))
    """Number N of prompts per step whose responses come from the data set instead of the student, in addition to
    `--rollout.prompts-per-step`. With P prompts of S samples, the fraction of student responses (GKD's lambda) is P x S
    / (P x S + N)."""
    given_column: str = setting("", only_with=lambda c: c.distill.given_per_step)
    """Column with the response text from the data set. Empty: `--data.answer-column`."""
    teacher_template: str = ""
    """Prompt template for the teacher, used instead of `--data.template`; `{column}` inserts a column that only the
    teacher reads (SDFT, https://arxiv.org/abs/2601.19897). Empty: the teacher reads the student's prompt."""
    on_engine: bool = False
    """Run the teachers in the run's engine to keep them out of the trainer's memory: after a step is sampled, a
    teacher's weights replace the student's in the engine. Teachers must have the student's architecture."""
    align: Literal["off", "uld", "gold"] = "off"
    """Loss for a teacher with a different tokenizer from the student's; the teacher reads the student's response as
    text. `uld`: distance between the sorted probabilities of both models over spans of text
    (https://arxiv.org/abs/2402.12030). `gold`: the divergence for tokens in both vocabularies, and `uld` for the
    others. `off`: both models use the same tokens."""
    merge: Literal["first", "last"] = setting("first", only_with=lambda c: c.distill.align != "off")
    """Distribution used for a span of several tokens. `first`: the distribution at its first token, times the
    probabilities of the later tokens. `last`: the distribution at its last token, times the probabilities of the
    earlier tokens."""


@dataclass(frozen=True)
class FurtherTeacher:
    """A teacher from `--distill.more-teachers`."""

    path: str
    weight: float
    """Weight of this teacher's divergence in the loss; the first teacher has weight 1."""
    source: str
    """The `data_source` of the rows that use only this teacher. Empty: it is used together with the first teacher, for
    all rows that are not reserved for one teacher."""


def read_teachers(specs: tuple[str, ...]) -> dict[str, FurtherTeacher]:
    """Return the teachers in `--distill.more-teachers` by name. Raises ValueError for a malformed entry."""
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
    """Return the values that the `distill` preset sets in a section."""
    named = PRESETS["distill"].settings.items()
    return {name.partition(".")[2]: value for name, value in named if name.startswith(f"{section}.")}


@hides(Job.DISTILL)
@dataclass
class DistillationConfig(Config):
    """On-policy distillation for language models. Every rank runs this same program."""

    run: RunConfig = section(RunConfig, name="distill")
    reference: TeacherConfig = section(TeacherConfig, enabled="on")
    distill: DistillSection = section(DistillSection)
    algo: AlgoConfig = section(AlgoConfig, preset="distill", **_values("algo"))
    shaping: ShapingConfig = section(ShapingConfig, **_values("shaping"))
    learns_from_rewards: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = True

    @property
    def aligns_tokens(self) -> bool:
        """True if the teacher can have a different tokenizer from the student."""
        return self.distill.align != "off"

    def further_teachers(self) -> dict[str, FurtherTeacher]:
        """Return name -> teacher for all teachers except the first. Raises ValueError as `read_teachers` does."""
        return read_teachers(self.distill.more_teachers)

    def engine_teachers(self) -> dict[str, str]:
        """Return name -> path for the teachers that run in the engine, or {} without `--distill.on-engine`."""
        if not self.distill.on_engine:
            return {}
        return {"reference": self.reference.path} | {name: t.path for name, t in self.further_teachers().items()}


def check_distillation(config: DistillationConfig, world_size: int, here: bool = True) -> None:
    """Check all settings together. here: as in `run_problems`. Raises ConfigError with one line per problem."""
    refuse(_problems(config) + run_problems(config, world_size, here))


def _problems(config: DistillationConfig) -> list[str]:
    distill = config.distill
    problems = Problems(config, divergence_problems(config, "distill"))
    try:
        config.further_teachers()
    except ValueError as error:
        problems.append(str(error))
    if distill.more_teachers and config.reference.refresh_every:
        advice = "a teacher that follows the student must be the only one; take 0, or no --distill.more-teachers"
        problems.add("reference.refresh_every", advice)
    problems += _align_problems(config) if distill.align != "off" else []
    if config.parallel.scoring_ranks and not distill.top_k:
        advice = "a teacher on separate ranks sends only its most likely tokens; set --distill.top-k, or take 0"
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
        "vLLM returns log-probabilities of given tokens only at temperature 1; take --rollout.temperature 1 instead of "
        f"{temperature:g}, or --rollout.engine hf"
    )
    wrong_if = {
        "an engine returns only the most likely tokens; set --distill.top-k": not distill.top_k,
        "with --parallel.placement split the engine samples ahead; take colocated": config.parallel.placement
        == "split",
        "the trainer's memory holds no teacher to move; leave --reference.offload out": config.reference.offload
        != "none",
        "the weights of a teacher in the engine never change; take --reference.refresh-every 0": refreshed,
        "the engine is built for the student's prompts; leave --distill.teacher-template out": distill.teacher_template,
        "the engine keeps the student's model without adapters; take --lora.push merged": adapters,
        f"--rollout.quantization {rollout.quantization} would round teachers, too; take none": rollout.quantization
        != "none",
        f"--rollout.dp {rollout.dp} gives each copy of the model different requests; take 1": rollout.dp > 1,
        "teachers are not supported in SGLang; take --rollout.engine vllm or hf": engine == "sglang",
        vllm: engine == "vllm" and temperature != 1,
    }
    return [f"--distill.on-engine: {advice}" for advice, wrong in wrong_if.items() if wrong]


def _align_problems(config: DistillationConfig) -> list[str]:
    distill, align = config.distill, f"--distill.align {config.distill.align}"
    beta, refreshed = f"--distill.beta {distill.beta:g}", config.reference.refresh_every
    apart = config.parallel.scoring_ranks
    wrong_if = {
        f"{align}: the teacher must be on the student's ranks; leave --distill.on-engine out": distill.on_engine,
        f"{beta}: is only read with --distill.align gold; leave it out": distill.align == "uld" and distill.beta != 1,
        f"{align}: sorts the probabilities of all tokens; take --distill.top-k 0": distill.top_k,
        f"{align}: supports only one teacher; leave --distill.more-teachers out": distill.more_teachers,
        f"{align}: a teacher that follows the student has the same tokens; take --reference.refresh-every 0": refreshed,
        f"{align}: the teacher must be on the student's ranks; take --parallel.scoring-ranks 0": apart,
    }
    return [line for line, wrong in wrong_if.items() if wrong]


def distillation_lines(config: DistillationConfig, world_size: int) -> list[str]:
    """Return the lines of the distillation plan, which are printed at startup and by `--dry-run`."""
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
        lines.append(f"teacher  takes {part} every {count(moves, 'step')}")
    if given := distill.given_per_step:
        sampled = count(config.rollout.prompts_per_step, "prompt")
        lines.append(f"given    {count(given, 'response')} of the data set a step, in addition to samples of {sampled}")
    return lines
