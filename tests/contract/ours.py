"""Names that the project's own sources take from a package: imports, names inside these, and calls of those."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.contract.lookup import imported


@dataclass(frozen=True)
class Use:
    """One place where a name of another package is used."""

    name: str
    """Dotted name, such as `vllm.LLM`."""
    where: str
    """File and line."""
    keywords: tuple[str, ...] = ()
    placed: int = 0
    """Number of arguments without a name, for a call."""
    called: bool = False


def uses(files: list[Path], root: Path, packages: tuple[str, ...]) -> Iterator[Use]:
    """Yields every use of names from `packages` in some files. root: folder to which places are relative."""
    for file in files:
        tree = ast.parse(file.read_text())
        bound = dict(_imports(tree, packages))
        for name, (dotted, line) in bound.items():
            yield Use(dotted, f"{file.relative_to(root)}:{line}")
            assert name
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute | ast.Name) or id(node) in inner:
                continue
            dotted = _dotted(node, {name: target for name, (target, _) in bound.items()})
            if dotted is None:
                continue
            where = f"{file.relative_to(root)}:{node.lineno}"
            call = calls.get(id(node))
            if call is None:
                yield Use(dotted, where)
                continue
            spread = any(isinstance(a, ast.Starred) for a in call.args)
            keywords = tuple(k.arg for k in call.keywords if k.arg)
            yield Use(dotted, where, keywords, 0 if spread else len(call.args), True)


def _imports(tree: ast.Module, packages: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, int]]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            target = imported(node, name, "", False)
            if target and target.split(".")[0] in packages:
                yield name, (target, node.lineno)


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])
