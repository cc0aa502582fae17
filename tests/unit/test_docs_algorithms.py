"""README, docs and recipes agree with the code: names, papers, settings, files, commands; and their code runs."""

import ast
import contextlib
import json
import re
import runpy
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.algos.aggregate import AGGREGATIONS
from spmdrl.algos.correction import CORRECTIONS
from spmdrl.algos.estimators import ADVANTAGES
from spmdrl.algos.filters import FILTERS
from spmdrl.algos.kl import KL_KINDS
from spmdrl.algos.losses import LOSSES
from spmdrl.algos.resample import METHODS
from spmdrl.algos.rows import paper_of
from spmdrl.config.checks import check
from spmdrl.config.distillation import DistillationConfig, check_distillation
from spmdrl.config.fields import ConfigError, leaves
from spmdrl.config.load import from_command_line
from spmdrl.config.online_preference import OnlinePreferenceConfig, check_online_preference
from spmdrl.config.preference import PreferenceConfig, check_preference
from spmdrl.config.presets import PRESETS
from spmdrl.config.reward_model import RewardModelConfig, check_reward_model
from spmdrl.config.schema import Config
from spmdrl.config.sft import SFTConfig, check_sft
from spmdrl.config.use import check_use

ROOT = Path(__file__).resolve().parents[2]
DOCS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = (
    "agents",
    "conversations",
    "distill",
    "engines",
    "gpu",
    "growth",
    "megatron",
    "online_preference",
    "performance",
    "placement",
    "preference",
    "reliability",
    "programs",
    "reward_model",
    "rewards",
    "sandbox",
    "scale",
    "settings",
    "sft",
    "slurm",
    "vision",
)
"""Pages without settings of methods; test_docs_{engines,megatron,slurm,agents}.py and more check theirs."""
METHOD_PAGES = [name for name in DOCS if name not in (*ELSEWHERE, "learning", "usage")]
"""Pages of the algorithms."""
DOC = "\n".join(DOCS[name] for name in METHOD_PAGES)
GOLDEN = ROOT / "tests" / "golden" / "verl_0.9.1.json"
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/config.yaml")) + [ROOT / "recipes" / "entropy"]
OWN = sorted((ROOT / "recipes" / "own").glob("*.py"))
YAMLS = sorted([*(ROOT / "recipes").glob("**/*.yaml"), *(ROOT / "configs").glob("**/*.yaml")])
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "recipes").glob("*/README.md"),
    ]
)
PUBLIC = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
JOBS: dict[str, tuple[type, Callable]] = {
    "train": (Config, check),
    "sft": (SFTConfig, check_sft),
    "preference": (PreferenceConfig, check_preference),
    "reward_model": (RewardModelConfig, check_reward_model),
    "online_preference": (OnlinePreferenceConfig, check_online_preference),
    "distill": (DistillationConfig, check_distillation),
}
"""Entry point -> its settings and their rules."""
WORLDS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 512)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def parts(text: str, level: int) -> dict[str, str]:
    """Returns heading of that level, without backticks -> the text under it."""
    found = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return {heading.strip("`"): body for heading, body in zip(found[1::2], found[2::2], strict=True)}


def chapter(page: str, heading: str) -> str:
    """Returns the text under a heading of the second level on a page of docs/."""
    return parts(DOCS[page], 2)[heading]


def evidence(page: str) -> dict[str, str]:
    """Claim -> tests, of a page's table of evidence; a claim that is a name in backticks stands without them."""
    return {row[0].strip("`"): row[1] for row in table(chapter(page, "Evidence"))}


@cache
def load(*flags: str, job: str = "train") -> Any:
    """Loads the settings that flags ask for in the project's folder."""
    with contextlib.chdir(ROOT):
        return from_command_line(flags, schema=JOBS[job][0]).config


def job_of(path: Path) -> str:
    """Returns the entry point that a file of settings is for: of the last command in it."""
    return (re.findall(rf"-m spmdrl\.({'|'.join(JOBS)})\b", path.read_text(encoding="utf-8")) or ["train"])[-1]


def run_of(path: Path) -> Any:
    return load("--config", name_of(path), job=job_of(path))


def table(text: str) -> list[list[str]]:
    """Returns cells of every row of the first table, without its head and the line under it."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    # A bar inside a cell is written \|.
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def named(cell: str) -> str:
    """Returns the first name in backticks."""
    found = re.search(r"`([^`]+)`", cell)
    return found[1] if found else ""


def test_readers_find_what_they_look_for():
    assert {"algorithms", "advantages", "losses", "kl", "correction", "filters", "shaping"} <= set(METHOD_PAGES)
    assert "Presets" in parts(DOCS["algorithms"], 2) and "Aggregation" in parts(DOCS["losses"], 2)
    assert set(ELSEWHERE) <= DOCS.keys()
    assert table("x\n|a|b|\n|---|---|\n| `c` d | \\|e\\| |\n") == [["`c` d", "\\|e\\|"]]
    assert named("[`c`](#d) `e`") == "c"


# ── the page and the code ────────────────────────────────────────────────────


@pytest.mark.parametrize(("page", "rows"), [("advantages", ADVANTAGES), ("losses", LOSSES)])
def test_every_function_has_a_paper_and_a_proof(page, rows):
    sections, proofs = parts(DOCS[page].split("\n## Evidence")[0], 3), evidence(page)
    for name, row in rows.items():
        assert paper_of(row.function) in sections[name], name
        assert "::test_" in proofs[name] or "golden" in proofs[name], name


def test_advantages_say_what_becomes_of_one_sample_and_of_equal_rewards():
    for name, text in parts(DOCS["advantages"].split("\n## Evidence")[0], 3).items():
        text = " ".join(text.split())
        assert re.search(r"[Gg]roup of one|[Ii]gnores groups", text), name


def test_tables_hold_every_name():
    assert [named(row[0]) for row in table(chapter("losses", "Aggregation"))] != []
    assert {named(row[0]) for row in table(chapter("losses", "Aggregation"))} == set(AGGREGATIONS)
    assert [named(row[0]) for row in table(chapter("kl", "Estimators"))] == list(KL_KINDS)
    assert "http://joschu.net/blog/kl-approx.html" in DOCS["kl"]
    assert [named(row[0]) for row in table(chapter("filters", "Resampling and replay"))] == list(METHODS)


def test_corrections_and_filters_are_shown_with_their_sources():
    rows = {
        named(row[0]): row
        for page, heading in (("correction", "Kinds"), ("filters", "Filters and dynamic sampling"))
        for row in table(chapter(page, heading))
    }
    functions = {name: row.function for name, row in CORRECTIONS.items() if name != "none"} | FILTERS
    for name, function in functions.items():
        assert paper_of(function) and paper_of(function) in rows[name][3], name


def test_settings_of_learning_are_all_explained():
    """Every setting that shapes learning stands on the pages of the algorithms, by its flag or its name."""
    sections = ("algo", "correction", "shaping", "filter", "critic", "process_reward", "safety", "reference")
    words = {word.strip("-.") for word in re.findall(r"[\w.-]+", DOC)}
    for name in leaves(Config):
        section, _, leaf = name.partition(".")
        if section in sections:
            flag = name.replace("_", "-")
            assert flag in words or leaf in words or f"{section}.{leaf}" in words, f"--{flag} is on none of them"


def paper_of_run(path: Path) -> str:
    return PRESETS[run_of(path).algo.preset].paper


# ── recipes and their commands ───────────────────────────────────────────────


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_says_what_it_is(recipe):
    page = (recipe / "README.md").read_text(encoding="utf-8")
    runs = [path for path in YAMLS if path.parent == recipe and not path.name.startswith("demo")]
    assert runs and "We have not run anything of this size" in page
    for path in [path for path in YAMLS if path.parent == recipe]:
        assert name_of(path) in page, f"{path.name} is not in the README"
    for path in runs:
        settings = path.read_text(encoding="utf-8")
        others = re.findall(r"https://github\.com/\S+\w", settings)
        (address,) = others if job_of(path) != "train" else [paper_of_run(path)]
        assert address in page and address in settings, path


@pytest.mark.slow
@pytest.mark.parametrize("path", YAMLS, ids=name_of)
def test_config_loads_and_passes_the_checks(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = []
    for ranks in WORLDS:
        try:
            return JOBS[job_of(path)][1](run_of(path), ranks)
        except ConfigError as error:
            said.append(f"{ranks} ranks: {error}")
    pytest.fail("\n".join(said))


def commands(text: str) -> list[tuple[str, int, list[str]]]:
    """Returns entry point, ranks and flags of every `torchrun ... -m spmdrl.train` line, and of other jobs'."""
    found = []
    text = text.replace("\\\n", " ")
    for line, job in re.findall(rf"^#?\s*(torchrun .*-m spmdrl\.({'|'.join(JOBS)})\b.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        at = words.index(f"spmdrl.{job}")
        given = dict(zip(words[1:at:2], words[2:at:2], strict=False))
        found.append((job, int(given.get("--nnodes", 1)) * int(given["--nproc-per-node"]), words[at + 1 :]))
    return found


COMMANDS = [
    pytest.param(job, ranks, flags, id=f"{name_of(path)}:{index}")
    for path in [*YAMLS, *PAGES]
    if path.stem not in ELSEWHERE or path.stem in JOBS
    for index, (job, ranks, flags) in enumerate(commands(path.read_text(encoding="utf-8")))
    if not any(word.startswith("my") for word in flags)
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "ranks", "flags"), COMMANDS)
def test_command_passes_the_checks_on_its_number_of_ranks(job, ranks, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    JOBS[job][1](load(*flags, job=job), ranks)
    if job == "train":
        check_use(from_command_line(flags))


# ── code on the page ─────────────────────────────────────────────────────────

# The first block of notebook.md is given its tensors, see test_short_example_of_the_notebook_runs.
SHORT = re.findall(r"```python\n(.*?)```", chapter("notebook", "In short"), re.DOTALL)
BLOCKS = [
    (file, code)
    for file, code in re.findall(r"(?:<!-- file: (\S+) -->\n)?```python\n(.*?)```", README + DOC, re.DOTALL)
    if code not in SHORT
]


@pytest.mark.parametrize(("file", "code"), BLOCKS, ids=[file or f"block{i}" for i, (file, _) in enumerate(BLOCKS)])
def test_python_block_runs(file, code):
    names: dict = {"__name__": file or "page"}
    exec(compile(code, file or "page", "exec"), names)
    assert len(names) > 2


def test_blocks_of_own_functions_are_the_files():
    shown = {file: code for file, code in BLOCKS if file}
    assert shown == {name_of(path): path.read_text(encoding="utf-8") for path in OWN}


def test_short_example_of_the_notebook_runs():
    (code,) = SHORT
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    exec(code, {"mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "logp": logp, "old_logp": logp.detach()})
    assert logp.grad is not None and logp.grad[0, 0] < 0 < logp.grad[1, 0]  # more of the better answer


# ── the form of the pages ────────────────────────────────────────────────────

each_doc = pytest.mark.parametrize("name", DOCS)


def test_readme_persuades_on_its_first_screen():
    """The picture, the command and the loop come first, then the promises, each with its test."""
    first = README.splitlines()[:60]
    assert any("docs/learning_curve.svg" in line for line in first)
    assert any("launch/quickstart.sh" in line for line in first) and "def train(run) -> None:" in first
    promises = table(parts(README, 2)["Three promises"])
    assert len(promises) == 3 and all(re.fullmatch(r"`tests/e2e/\w+\.py::\w+`", row[2]) for row in promises)
    assert list(parts(README, 2))[-2:] == ["Limits", "More"] and len(README.splitlines()) <= 160


def test_figures_of_the_promises_are_those_of_reliability():
    """README's seconds are those of the fault matrix, and its kills those of the table of evidence."""
    matrix = {
        row[0]: [float(x) for x in re.findall(r" ([\d.]+)", row[2])]
        for row in table(chapter("reliability", "The fault matrix"))
    }
    quick = [x for fault in ("exception", "SIGKILL", "disk full", "out of memory") for x in matrix[fault]]
    _, fault, resume = (row[1] for row in table(parts(README, 2)["Three promises"]))
    cases = re.findall(r"of the (\d+) cases", DOCS["reliability"])
    assert f"[{cases[0]} cases](docs/reliability.md#the-fault-matrix): {min(quick)}-{max(quick)} s for" in fault
    assert resume == "[100 kills](docs/reliability.md#evidence) at any moment, 6 of 6 runs bit-equal"
    (kills,) = [
        row[3] for row in table(chapter("reliability", "Evidence")) if row[0].startswith("SIGKILL at any moment")
    ]
    assert kills.startswith("100 kills") and "6 of 6 results bit-equal" in kills


def test_learning_curve_is_drawn_from_the_numbers_of_docs():
    drawn = runpy.run_path(str(ROOT / "docs" / "results" / "curve.py"))
    runs = [drawn["read"](seed) for seed in range(3)]
    assert drawn["PICTURE"].read_text(encoding="utf-8") == drawn["draw"](runs), "run: python docs/results/curve.py"
    before, after = zip(*((points[0][1], points[-1][1]) for points in map(drawn["held_out"], runs)), strict=True)
    shown = re.findall(r"from ([\d.]+) to ([\d.]+)-([\d.]+) in (\d+) steps", README)
    assert shown and all(max(abs(float(low) - x) for x in before) < 0.05 for low, *_ in shown)
    assert {(float(worst), float(best)) for _, worst, best, _ in shown} == {
        (round(min(after), 2), round(max(after), 2))
    }
    assert {int(steps) for *_, steps in shown} == {len(runs[0])}


def test_status_of_every_feature_is_one_of_three():
    rows = table(parts(README, 2)["Features"])
    assert len(rows) >= 9
    assert {row[1] for row in rows} == {"measured", "tested on CPU", "unproven on GPU"}
    assert all("](docs/" in row[2] for row in rows)


def test_measured_figures_of_the_comparison_are_those_of_performance():
    """README's ranges against TRL are those of the tables of docs/performance.md."""
    rows = table(chapter("performance", "Against TRL 1.16"))
    ratios = {"": [float(row[3]) for row in rows]}
    for row in table(chapter("performance", "SFT and DPO against TRL 1.16")):
        ratios.setdefault(row[0].split()[0], []).append(float(row[3]))
    ranges = {kind: f"{min(found)}-{max(found)}" for kind, found in ratios.items()}
    assert f"[{ranges['']}](docs/performance.md#against-trl-116)" in README
    assert f"[{ranges['SFT']}, {ranges['DPO']}](docs/performance.md#sft-and-dpo-against-trl-116)" in README


@each_doc
def test_pages_are_short(name):
    lines = DOCS[name].splitlines()
    assert len(lines) <= 350 or name == "settings", "that page is a table"
    long = [line for line in lines if len(line) > 130]
    # A row of a table cannot be broken.
    wide = (
        "agents",
        "conversations",
        "distill",
        "growth",
        "online_preference",
        "preference",
        "reliability",
        "programs",
        "reward_model",
        "rewards",
        "sandbox",
        "scale",
        "settings",
        "sft",
        "slurm",
        "vision",
    )
    tables = name in wide or name in METHOD_PAGES
    assert [line for line in long if not tables or not line.startswith("| ")] == []


@each_doc
def test_tests_stand_in_one_table_at_the_end(name):
    """Prose cites no test: the last chapter is a table of claims and tests."""
    if "tests/" not in DOCS[name]:
        return
    chapters = parts(DOCS[name], 2)
    assert list(chapters)[-1] == "Evidence", "the page ends with its table of evidence"
    prose = DOCS[name].split("\n## Evidence\n")[0]
    assert re.findall(r"tests/[\w/]+\.py(?:::\w+)?", prose) == []
    rows = table(chapters["Evidence"])
    assert rows and all(len(row) >= 2 and all(row[:2]) for row in rows)


@pytest.mark.parametrize("page", PUBLIC, ids=name_of)
def test_flags_are_spelled_with_hyphens(page):
    wrong = re.findall(r"--[a-z_]+\.[a-z-]*_[a-z_-]*|--[a-z-]+_[a-z-]+(?![.\w])", page.read_text(encoding="utf-8"))
    assert wrong == []


@pytest.mark.parametrize("page", PUBLIC, ids=name_of)
def test_no_sentence_begins_with_a_question_word_unless_it_asks(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    begun = r"(?:(?<=[.:!?] )|(?<=[.:!?]\n)|(?<=\n\n)|(?<=\n- )|(?<=[.:] \*\*))((?:What|Where|Who|That)\b[^.?:]*[.?:])"
    assert [sentence for sentence in re.findall(begun, text) if not sentence.endswith("?")] == []
    assert re.findall(r"\b(?:[Nn]ow|[Pp]reviously)\b", text) == []


@pytest.mark.parametrize("name", METHOD_PAGES)
def test_the_overview_links_every_page_of_the_algorithms(name):
    assert name == "algorithms" or f"({name}.md)" in DOCS["algorithms"]


# ── what pages name exists ───────────────────────────────────────────────────


@pytest.mark.parametrize("page", sorted({*PAGES, *YAMLS}), ids=name_of)
def test_named_flags_exist(page):
    known = {name for schema, _ in JOBS.values() for name in leaves(schema)}
    for flag in re.findall(r"--([a-z_]+(?:-[a-z]+)*\.[a-z][a-z0-9_-]*[a-z0-9])", page.read_text(encoding="utf-8")):
        name = flag.replace("-", "_")
        assert name in known or re.sub(r"\.no_", ".", name) in known, f"--{flag}"


@cache
def anchors(page: Path) -> list[str]:
    """Returns anchors as GitHub makes them of headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


@each_page
def test_local_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://", target):
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@each_page
def test_named_files_and_tests_exist(page):
    text = page.read_text(encoding="utf-8")
    # "python -m tests.long.test_x" and "tests/long/test_x.py" alike; "test_{a,b}.py" is two files.
    text = re.sub(r"python -m (tests[\w.]+)", lambda m: m[1].replace(".", "/") + ".py", text)
    text = re.sub(r"(\S*)\{([\w,]+)\}(\S*)", lambda m: " ".join(m[1] + x + m[3] for x in m[2].split(",")), text)
    for path in re.findall(r"(?<![\w/.-])((?:spmdrl|tests|docs|configs|launch|recipes|benchmarks)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists() or "_*" in path, path
    for file, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert test in functions_of(ROOT / file), f"{file}::{test}"


def test_named_golden_entries_exist():
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"][0]
    known = {*case["advantages"], *case["rollout_correction"], *(name.split("/")[0] for name in case["losses"])}
    shown = set(re.findall(r"[Gg]olden\s+`([^`]+)`", DOC))
    assert shown <= known, shown - known
    assert known - shown <= {"value_clip0.2"}, "entries that no section names"
