"""The rooms of CONTRIBUTING.md and the parts of its laws that sources show: imports run downwards, and more."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import spmdrl
from spmdrl import train

ROOT = Path(spmdrl.__file__).parent

# Bottom first. A room may import from rooms of lower floors and from itself, never sideways or upwards.
FLOORS = [
    ["algos", "spmdrl_kernels", "spmdrl_sandbox"],
    ["config"],
    ["health", "tracking"],
    ["spmd", "workers"],
    ["data", "hub", "weights"],
    ["rewards", "policy", "engines", "env"],
    ["checkpoint"],
    ["session"],
    ["rl", "supervised"],
    ["plan", "tools"],
    ["train", "sft"],
]
# All other files beside `train.py`: the entry points that take their loops from those two, and commands.
FLOORS.append(sorted({path.stem for path in ROOT.glob("[!_]*.py")} - {"train", "sft"}))
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
BESIDE = {"spmdrl_kernels": ROOT.parent / "kernels", "spmdrl_sandbox": ROOT.parent / "sandbox"}
"""Packages beside this one, with the folders they stand in: they import nothing of ours."""


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "assets" not in p.parts)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> list[tuple[str, int]]:
    """Returns rooms that a file imports, late imports included, with their lines."""
    out = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports here are absolute"
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names if node.module == "spmdrl"]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "late":
            names = [ast.literal_eval(node.args[0]).partition(":")[0]]
        for name in names:
            parts = name.split(".")
            if parts[0] in BESIDE or (parts[0] == "spmdrl" and len(parts) > 1):
                out.append((parts[0] if parts[0] in BESIDE else parts[1], node.lineno))
    return out


def test_every_room_has_a_floor():
    rooms = {room_of(p) for p in files()} - {"__init__"}
    assert rooms - FLOOR.keys() == set(), "say in FLOORS where these stand"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path):
    room = room_of(path)
    if room == "__init__":
        assert imported_rooms(ast.parse(path.read_text())) == []
        return
    name = str(path.relative_to(ROOT))
    wrong = [
        f"{name}:{line} imports {other}, which stands above or beside it"
        for other, line in imported_rooms(ast.parse(path.read_text()))
        if other != room and FLOOR[other] >= FLOOR[room]
    ]
    assert wrong == []


READS_ALL_SETTINGS = {
    *(
        "session/device_table.py",
        "session/engine.py",
        "session/engine_check.py",
        "session/memory_advice.py",
        "policy/models.py",
    )
}
"""Files of the rooms below that know the sections of reinforcement learning: engine, reference, reward models."""


def test_rooms_of_every_job_read_the_settings_of_every_job():
    """The others see a `TrainingConfig`, whose sections pyright holds them to."""
    readers = {
        str(path.relative_to(ROOT))
        for room in ("session", "checkpoint", "policy", "weights", "hub")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^from spmdrl\.config\.schema import .*\bConfig\b", path.read_text(), re.MULTILINE)
    }
    assert readers == READS_ALL_SETTINGS


def test_the_science_knows_no_process_group_and_the_packages_beside_us_nothing_of_us():
    for path in (ROOT / "algos").glob("*.py"):
        text = path.read_text()
        assert "torch.distributed" not in text and "spmdrl.config" not in text, path
    for package, folder in BESIDE.items():
        for path in (folder / package).rglob("*.py"):
            assert {room for room, _ in imported_rooms(ast.parse(path.read_text()))} <= {package}, path


def test_train_is_one_screen():
    lines = inspect.getsource(train.train).splitlines()
    assert len(lines) <= 40
    assert len(Path(train.__file__).read_text().splitlines()) <= 60
    assert max(map(len, lines)) <= 120


def calls(tree: ast.AST) -> list[tuple[str, int]]:
    """Returns names of all calls: `f` of f(), x.f() and a.b.f()."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            f = node.func
            name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
            out.append((name, node.lineno))
    return out


COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_rows", "all_gather_text", "all_to_all_single"),
    *("reduce_scatter_tensor", "broadcast", "barrier", "new_group", "init_device_mesh", "batch_isend_irecv", "swap"),
    *(
        "exchange",
        "redistribute",
        "balance",
        "gather_rows",
        "everyone",
        "full_tensor",
        "gathered_buckets",
        "logprobs",
        "update",
    ),
    *(
        "push",
        "reduce",
        "all_gather_alike",
        "all_gather_distinct",
        "all_gather_shared",
        "broadcast_rows",
        "broadcast_text",
        "gather_names",
    ),
}


def test_lockstep_no_collective_stands_under_a_condition_on_the_rank():
    """Law 1 holds as far as it can be read: there is no `if rank == 0:` around anything that communicates."""
    wrong = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.If):
                continue
            words = {
                n.attr if isinstance(n, ast.Attribute) else n.id
                for n in ast.walk(node.test)
                if isinstance(n, ast.Attribute | ast.Name)
            }
            if words & {"is_first", "rank", "local_rank"}:
                inside = calls(ast.Module(node.body + node.orelse, []))
                wrong += [f"{path.relative_to(ROOT)}:{line} {name}" for name, line in inside if name in COLLECTIVES]
    assert wrong == []


def test_no_pickle_and_no_objects_between_ranks():
    """Laws 4 and 8: tensors travel, and no pickle is read."""
    for path in files():
        tree = ast.parse(path.read_text())
        modules = {n for node in ast.walk(tree) if isinstance(node, ast.Import) for n in [a.name for a in node.names]}
        modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        # These two unpickle torch's records of this process or check files before torch reads them, and refuse classes.
        if path not in (ROOT / "health" / "flight_record.py", ROOT / "policy" / "safe_pickle.py"):
            assert not modules & {"pickle", "dill", "cloudpickle", "joblib", "marshal"}, path
        for name, line in calls(tree):
            assert not name.endswith("_object") and not name.endswith("_object_list"), f"{path}:{line}"
    text = {p: p.read_text() for p in files()}
    unsafe = re.compile(r"torch\.load\((?![^\n]*weights_only=True)")
    assert [str(p) for p, t in text.items() if unsafe.search(t)] == []
