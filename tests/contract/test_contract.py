"""The CUDA wheels that the locks pin define what our GPU paths use; read from their sources, nothing is run.

The sources are downloaded once (about 600 MB of wheels, of which 50 MB of Python stay in the user's cache folder).
Without a package index the tests are skipped and say so.
"""

import ast
import re

import pytest

from benchmarks.pack_vllm import VLLM as PACKED
from tests.contract import touched
from tests.contract.lookup import Tree, literals, members, parameters
from tests.contract.ours import Use, uses
from tests.contract.sources import ROOT, UnreachableError, locked, sources

pytestmark = pytest.mark.timeout(600)
ON_CPU = {"spmdrl/engines/vllm/cpu.py"}
"""Files that are used with a CPU build alone."""
LOCKS = {
    "vllm": ("vllm", "gpu.txt"),
    "megatron": ("megatron-core", "gpu.txt"),
    "sglang": ("sglang", "sglang.txt"),
    "flash_attn": ("flash-attn", "gpu-extra.txt"),
}
"""Importable name -> name of the package and the lock that pins it."""
ADAPTER = "megatron/core/extensions/transformer_engine.py"


def tree_of(package: str, version: str) -> Tree:
    try:
        return Tree(sources(package, version))
    except UnreachableError as error:
        pytest.skip(str(error))


def our_uses(name: str) -> list[Use]:
    files = [p for folder in ("spmdrl", "kernels/spmdrl_kernels") for p in sorted((ROOT / folder).rglob("*.py"))]
    return list(uses([p for p in files if str(p.relative_to(ROOT)) not in ON_CPU], ROOT, (name,)))


def misfits(tree: Tree, found: list[Use]) -> list[str]:
    """Names that our code uses and a package does not define, or arguments that it does not take."""
    wrong = []
    for use in found:
        there = tree.find(use.name)
        if there is None:
            wrong.append(f"{use.where}: {use.name} is not there")
            continue
        takes = parameters(there) if use.called and there.node is not None else None
        if takes is None:
            continue
        strange = [] if takes.anything else [k for k in use.keywords if k not in takes.names]
        wrong += [f"{use.where}: {use.name}() takes no {k}" for k in strange]
        if 0 <= takes.positional < use.placed:
            wrong.append(f"{use.where}: {use.name}() takes {takes.positional} arguments by place, not {use.placed}")
    return wrong


def missing(tree: Tree, classes: dict[str, str]) -> list[str]:
    """Attributes of the table that the classes of a package lack."""
    wrong = []
    for name, attributes in classes.items():
        found = tree.find(name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            wrong.append(f"{name} is not there")
            continue
        has = members(found)
        wrong += [f"{name}.{attribute}" for attribute in attributes.split() if attribute not in has]
    return wrong


@pytest.mark.parametrize("name", LOCKS)
def test_wheels_define_what_is_imported_and_take_what_is_given(name):
    package, lock = LOCKS[name]
    found = our_uses(name)
    assert len(found) >= (1 if name == "flash_attn" else 10)
    assert not misfits(tree_of(package, locked(lock)[package]), found)


TABLES = {"vllm": touched.VLLM, "sglang": touched.SGLANG, "megatron": touched.MEGATRON}


@pytest.mark.parametrize("name", TABLES)
def test_objects_have_the_attributes_of_the_table(name):
    package, lock = LOCKS[name]
    assert not missing(tree_of(package, locked(lock)[package]), TABLES[name])


def test_tables_have_what_is_read_off_foreign_objects():
    strange, seen = [], set()
    for file, roots in touched.ROOTS.items():
        package = next((name for name in ("vllm", "sglang") if f"engines/{name}" in file), "megatron")
        known = {*" ".join([*TABLES[package].values(), touched.TORCHS]).split()}
        for node in ast.walk(ast.parse((ROOT / "spmdrl" / file).read_text())):
            if not isinstance(node, ast.Attribute) or (root := ast.unparse(node.value)) not in roots.split():
                continue
            seen.add((file, root))
            if f"{root}.{node.attr}" not in roots.split() and node.attr not in known:
                strange.append(f"{file}:{node.lineno}: {root}.{node.attr}")
    assert not strange
    assert seen == {(file, root) for file, roots in touched.ROOTS.items() for root in roots.split()}


def test_vllm_calls_take_the_keywords_of_the_table():
    tree = tree_of("vllm", locked("gpu.txt")["vllm"])
    for name, keywords in touched.CALLS.items():
        found = tree.find(name)
        takes = found and parameters(found)
        assert takes, name
        assert takes.anything or set(keywords.split()) <= set(takes.names), (name, keywords, takes)


def test_the_vllm_that_is_packed_lacks_one_name_alone():
    """Version 0.25.1 has no `get_rename_mapper`, for which `engines/vllm/lora.py` has a stand-in."""
    tree = tree_of("vllm", PACKED)
    assert missing(tree, touched.VLLM) == ["vllm.model_executor.models.utils.WeightsMapper.get_rename_mapper"]
    assert tree.find("vllm.model_executor.models.utils.WeightsMapper.get_unstacked_mapper")
    assert not misfits(tree, our_uses("vllm"))


OTHER_VERSIONS = {
    "attention._SplitAlongDim",
    "attention._SplitAlongDim.apply",
    "attention.apply_rotary_pos_emb",
    # Without it Megatron has no `te_general_gemm`, which our repairs of routers stand in for (`megatron/repairs.py`).
    "module.base.get_workspace",
    "cpp_extensions.general_gemm",
}
"""Names that Megatron's adapter takes from TransformerEngine inside a `try` or for a version that is not pinned."""


def test_transformer_engine_defines_what_megatrons_adapter_takes():
    megatron = tree_of("megatron-core", locked("gpu.txt")["megatron-core"])
    engine = tree_of("transformer-engine", locked("gpu-extra.txt")["transformer-engine"])
    found = list(uses([megatron.root / ADAPTER], megatron.root, ("transformer_engine",)))
    known = [use for use in found if use.name.removeprefix("transformer_engine.pytorch.") not in OTHER_VERSIONS]
    assert len(known) > 50 and not misfits(engine, known)


@pytest.mark.parametrize(
    ("package", "version"),
    [("vllm", locked("gpu.txt")["vllm"]), ("vllm", PACKED), ("sglang", locked("sglang.txt")["sglang"])],
)
def test_environment_variables_that_we_set_are_read(package, version):
    tree = tree_of(package, version)
    text = "".join(path.read_text() for path in (ROOT / "spmdrl").rglob("*.py"))
    ours = set(re.findall(rf'"({package.upper()}_[A-Z0-9_]+)"', text))
    known = literals(tree.root, package)
    assert ours and ours <= known, sorted(ours - known)
