"""Names that a tree of Python sources defines, read without importing it."""

import ast
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

DEPTH = 12
"""Longest chain of re-exports."""


@dataclass(frozen=True)
class Parameters:
    """Parameters that a call of a function or class may name."""

    names: tuple[str, ...]
    """Names in order, without self or cls; keyword-only ones come last."""
    positional: int
    """Number of arguments that may be given without a name; -1: any number."""
    anything: bool
    """True if a call may have keywords that are not named here."""


@dataclass
class Found:
    """A definition: its module and its node; a module itself has no node."""

    tree: "Tree"
    module: str
    node: ast.AST | None
    path: Path | None = field(repr=False, default=None)
    """None for a definition in another package's sources."""


class Tree:
    """The packages beneath one folder."""

    def __init__(self, root: Path):
        self.root = root

    def file(self, module: str) -> Path | None:
        """File of a module or package; None where there is none."""
        path = self.root.joinpath(*module.split("."))
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.exists():
                return candidate
        return None

    @cached_property
    def _parsed(self) -> dict[Path, ast.Module]:
        return {}

    def parse(self, path: Path) -> ast.Module:
        """Parses a file, once."""
        if path not in self._parsed:
            self._parsed[path] = ast.parse(path.read_text(errors="replace"))
        return self._parsed[path]

    def find(self, dotted: str, depth: int = DEPTH) -> Found | None:
        """Definition of `package.module.Name` or `package.module.Class.attribute`; None where there is none."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            path = self.file(module)
            if path is None:
                continue
            found: Found | None = Found(self, module, None, path)
            for name in parts[cut:]:
                found = self._member(found, name, depth) if found else None
            return found
        return None

    def _member(self, found: Found, name: str, depth: int) -> Found | None:
        if isinstance(found.node, ast.ClassDef):
            node = members(found).get(name)
            return Found(self, found.module, node, found.path) if node is not None else None
        if found.path is None or isinstance(found.node, ast.Assign | ast.AnnAssign) or name.startswith("__"):
            # It is another package's, or a value whose type the source does not show, or an attribute of every object.
            return found
        if found.node is not None:
            return None
        for node in _names(self.parse(found.path)).get(name, []):
            if isinstance(node, ast.ImportFrom | ast.Import):
                target = imported(node, name, found.module, found.path.name == "__init__.py")
                there = self.find(target, depth - 1) if depth and target else None
                if there or (target and self.file(target.split(".")[0]) is None):
                    # Definitions of another package are that package's to keep.
                    return there or Found(self, target or "", None)
            return Found(self, found.module, node, found.path)
        for node in _names(self.parse(found.path)).get("*", []):
            assert isinstance(node, ast.ImportFrom)
            target = imported(node, "*", found.module, found.path.name == "__init__.py")
            there = self.find(f"{(target or '').removesuffix('.*')}.{name}", depth - 1) if depth else None
            if there:
                return there
        submodule = self.file(f"{found.module}.{name}")
        return Found(self, f"{found.module}.{name}", None, submodule) if submodule else None


def imported(node: ast.ImportFrom | ast.Import, name: str, module: str, package: bool) -> str | None:
    """Dotted name of what an import binds as `name`."""
    for alias in node.names:
        if (alias.asname or alias.name.split(".")[0]) != name:
            continue
        if isinstance(node, ast.Import):
            return alias.name if alias.asname else alias.name.split(".")[0]
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + package]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        return f"{base}.{alias.name}"
    return None


def _names(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Names that a module binds at its top, also under `if` and `try`."""
    found: dict[str, list[ast.AST]] = {}

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name.split(".")[0], []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            found.setdefault(part.id, []).append(node)
            for inner in ("body", "orelse", "finalbody"):
                if isinstance(node, ast.If | ast.Try | ast.With):
                    walk(getattr(node, inner, []))
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    walk(handler.body)

    walk(tree.body)
    return found


def _bases(found: Found) -> list[Found]:
    assert isinstance(found.node, ast.ClassDef)
    named = [ast.unparse(b.value if isinstance(b, ast.Subscript) else b) for b in found.node.bases]
    bases = (found.tree.find(f"{found.module}.{name}") for name in named)
    return [base for base in bases if base and isinstance(base.node, ast.ClassDef)]


def members(found: Found) -> dict[str, ast.AST]:
    """Names that a class or one of its bases defines: methods, attributes, and those that methods set on `self`."""
    assert isinstance(found.node, ast.ClassDef)
    all_of: dict[str, ast.AST] = {}
    for base in reversed(_bases(found)):
        all_of |= members(base)
    for node in found.node.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            all_of[node.name] = node
            all_of |= {name: where for name, where in _set_on_self(node).items() if name not in all_of}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    all_of[target.id] = node
    return all_of


def _set_on_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        found.setdefault(part.attr, node)
    return found


def parameters(found: Found) -> Parameters | None:
    """Parameters that a call of a function or a class may name; None where the source does not show them."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        own = members(found)
        maker = own.get("__init__")
        if maker is not None:
            return parameters(Found(found.tree, found.module, maker, found.path))
        fields = tuple(name for name, at in own.items() if isinstance(at, ast.AnnAssign))
        return Parameters(fields, len(fields), False) if fields else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    placed = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    return Parameters(
        (*placed, *(a.arg for a in arguments.kwonlyargs)),
        -1 if arguments.vararg else len(placed),
        arguments.kwarg is not None,
    )


@cache
def literals(root: Path, package: str) -> frozenset[str]:
    """Every string in capitals in a package's sources: names of environment variables are among them."""
    found: set[str] = set()
    for path in (root / package).rglob("*.py"):
        text = path.read_text(errors="replace")
        for part in text.replace("'", '"').split('"'):
            if part.isupper() and part.replace("_", "").isalnum():
                found.add(part)
    return frozenset(found)
