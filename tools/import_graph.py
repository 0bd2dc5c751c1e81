"""The imports of the package: its layers, the arrows that climb them, and circles of files.

A module that code names as a string, as for `import_module`, counts as an import: it would hide an
arrow. The root loads its public names late, by strings; it is the top layer, so its arrows go down.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1] / "torchgspmd"
FILES = tuple(sorted(ROOT.rglob("*.py")))
LAYERS = (  # a file imports only from the lines below its own
    ("__main__", "__init__", "nn"),
    ("integrations", "tools"),
    ("model_api",),
    ("runtime",),
    ("xla_backend", "compiler"),
    ("features",),
    ("fx_passes",),
    ("capture", "dtensor"),
    ("comm",),
    ("rules",),
    ("shard_spec",),  # the face of layout
    ("layout",),
    ("compat",),
    ("errors",),
)
TOP = {"__main__": "__init__", "nn": "__init__", "": "__init__"}


class Import(NamedTuple):
    """A module of the package that a file imports. is_top: at the top level of the file."""

    module: str
    line: int
    is_top: bool


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def folder_of(module: str) -> str:
    """Return the folder at the top that a module belongs to."""
    first = module.split(".")[0]
    return TOP.get(first, first)


def layer_of(module: str) -> int | None:
    """Return the layer of a module's folder: 0 is the top."""
    folder = folder_of(module)
    return next((i for i, names in enumerate(LAYERS) if folder in names), None)


def is_module(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return the modules of the package that a file imports, those for type checkers too."""
    functions = [n for n in nodes_of(path) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    hidden = {n for function in functions for n in ast.walk(function)}
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package[: len(package) - node.level + 1]
            parts += node.module.split(".") if node.module else []
            for alias in node.names:
                deeper = [*parts, alias.name]
                module = ".".join(deeper if is_module(deeper) else parts)
                found.append(Import(module, node.lineno, node not in hidden))
        elif isinstance(node, ast.Constant) and package:
            if (module := _named(node.value, package)) is not None:
                found.append(Import(module, node.lineno, True))
    return tuple(found)


def _named(text: object, package: list[str]) -> str | None:
    """Return the module that a string names, as "..tools.report" or in full; else None."""
    if not isinstance(text, str) or not text.replace(".", "").isidentifier():
        return None
    name = text.lstrip(".")
    if text.startswith("torchgspmd."):
        parts = name.split(".")[1:]
    elif 0 < len(text) - len(name) <= len(package) + 1:
        parts = package[: len(package) - (len(text) - len(name)) + 1] + name.split(".")
    else:
        return None
    return ".".join(parts) if all(parts) and is_module(parts) else None


def climbing() -> Iterator[str]:
    """Yield each import of a folder that is not below the file's own."""
    for path in FILES:
        module = module_of(path)
        for other, line, _ in imports(path):
            mine, its = layer_of(module), layer_of(other)
            is_inside = folder_of(module) == folder_of(other)
            if not is_inside and (mine is None or its is None or its <= mine):
                yield f"{module}:{line} imports {other}, which is not below it"


def climbing_arrows() -> set[tuple[str, str]]:
    """Return the pairs of folders of which the first imports the second, against the layers."""
    words = (text.split() for text in climbing())
    return {(folder_of(w[0].partition(":")[0]), folder_of(w[2].rstrip(","))) for w in words}


def circles() -> list[list[str]]:
    """Return the circles of imports, each a list of all files that reach each other (Tarjan)."""
    edges = {module_of(path): {each.module for each in imports(path)} for path in FILES}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(edges[module] & edges.keys() - {module}):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            circle, stack[at:] = stack[at:], []
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return found
