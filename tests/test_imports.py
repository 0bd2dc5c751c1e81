"""The layers of the package: what imports what, how large it is, and that importing it starts
nothing.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import torchgspmd

ROOT = Path(torchgspmd.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LAYERS = (  # a file imports only from the lines below its own
    ("__main__", "__init__", "nn"),
    ("integrations", "tools"),
    ("model_api",),
    ("runtime",),
    ("xla_backend", "compiler"),
    ("fx_passes.pipeline",),  # the page that names passes of the core and of features
    ("features",),
    ("fx_passes",),
    ("capture", "dtensor"),
    ("comm",),
    ("rules",),
    ("layout", "shard_spec"),  # shard_spec.py is the face of the folder
    ("compat",),
    ("errors",),
)


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def layer(module: str) -> int | None:
    """The layer of a module: that of its longest listed prefix."""
    place = {name: i for i, names in enumerate(LAYERS) for name in names}
    while module and module not in place:
        module = module.rpartition(".")[0]
    return place.get(module)


def folder(module: str) -> str:
    """The folder at the top that a module belongs to."""
    first = module.split(".")[0]
    return {"shard_spec": "layout", "__main__": "__init__", "nn": "__init__"}.get(first, first)


@cache
def imports(path: Path) -> list[tuple[str, ast.stmt, bool]]:
    """(module of this package, statement, whether at the top level) for every import of this
    package in a file, also those for type checkers alone.
    """
    tree = ast.parse(path.read_text())
    hidden = {
        n
        for f in ast.walk(tree)
        if isinstance(f, (ast.FunctionDef, ast.Lambda))
        for n in ast.walk(f)
    }
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            parts = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                deeper = [*parts, alias.name]
                is_module = (ROOT.joinpath(*deeper).with_suffix(".py")).exists() or ROOT.joinpath(
                    *deeper
                ).is_dir()
                found.append((".".join(deeper if is_module else parts), node, node not in hidden))
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down_the_layers(path):
    module = module_of(path)
    mine = layer(module)
    if mine is None:
        pytest.fail(f"{module} has no layer; add it to LAYERS")
    for other, node, _ in imports(path):
        same_folder = folder(module) == folder(other)
        assert same_folder or layer(other) is not None and layer(other) > mine, (
            f"{module}:{node.lineno} imports {other}, which is not below it"
        )


def test_no_import_cycle():
    edges = {
        module_of(path): {other for other, _, _ in imports(path)} - {module_of(path)}
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, f"imports in a circle: {' -> '.join((*chain, module))}"
        if module not in done:
            for other in edges.get(module, ()):
                visit(other, (*chain, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_of_the_package_are_at_the_top(path):
    assert [
        (other, node.lineno)
        for other, node, top in imports(path)
        if not top and not other.startswith("xla_backend")
    ] == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_over_500_lines(path):
    assert len(path.read_text().splitlines()) <= 500


def test_dir_shows_at_most_30_public_names():
    assert len(torchgspmd.__all__) <= 30
    assert len(set(torchgspmd.__all__)) == len(torchgspmd.__all__)
    assert all(hasattr(torchgspmd, name) for name in torchgspmd.NAMES)


def test_private_apis_of_torch_are_imported_in_one_file():
    private = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom) and not node.level
                else ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            )
            for name in names:
                parts = (name or "").split(".")
                if parts[0] == "torch" and any(p.startswith("_") for p in parts[1:]):
                    private.add((module_of(path), name))
    assert {module for module, _ in private} <= {"compat.private_apis"}, private


def test_import_starts_nothing():
    code = (
        "import sys, torch, torchgspmd\n"
        "assert not [m for m in sys.modules if m.startswith('torchgspmd.rules')]\n"
        "[getattr(torchgspmd, name) for name in torchgspmd.NAMES]\n"
        "assert 'torch_xla' not in sys.modules\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert torch._C._get_default_device() == 'cpu'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent, timeout=120)
