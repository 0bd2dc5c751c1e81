"""The layers of the package: what imports what, how large it is, and that importing it starts
nothing.
"""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import torchgspmd

ROOT = Path(torchgspmd.__file__).parent
GRAPH = runpy.run_path(str(ROOT.parent / "tools" / "import_graph.py"))
FILES, module_of = GRAPH["FILES"], GRAPH["module_of"]


def test_imports_go_down_the_layers():
    assert [*GRAPH["climbing"]()] == []


def test_no_import_cycle():
    assert GRAPH["circles"]() == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_of_the_package_are_at_the_top(path):
    assert [
        each
        for each in GRAPH["imports"](path)
        if not each.is_top and not each.module.startswith("xla_backend")
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
