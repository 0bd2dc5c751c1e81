"""A torch that lacks something: operators, private APIs, or the version that was checked."""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.capture.state.bytecode_names import dotted_names, function_in
from torchgspmd.capture.trace_context import PATCHES
from torchgspmd.compat import patches, private_apis
from torchgspmd.compat.operators import AbsentOperator, Namespace, aten
from torchgspmd.rules import registry, rewrites

ROOT = Path(gspmd.__file__).parent
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.parent.name not in ("compat", "integrations") or path.name == "fx_nodes.py"
]  # integrations use other libraries' names


def test_a_rule_for_an_operator_that_does_not_exist():
    known, decomposed = dict(registry.RULES), dict(rewrites.REWRITES)
    op = aten.gone_in_this_release.default
    registry.rule(op, "a -> a")
    registry.rule(aten.add.GoneOverload, "a -> a")
    rewrites.rewrite("decompose", op)(lambda x: x)
    assert registry.RULES == known and rewrites.REWRITES == decomposed
    assert op is aten.gone_in_this_release.default and isinstance(op, AbsentOperator)
    assert {"aten::gone_in_this_release", "aten::add.GoneOverload"} <= set(gspmd.doctor().operators)
    assert "aten::gone_in_this_release" in str(gspmd.doctor())
    with pytest.raises(
        gspmd.ShardingError,
        match=r"has no operator aten::gone_in_this_release\n  where .*test_compat",
    ):
        op(torch.ones(2))
    with pytest.raises(gspmd.ShardingError, match="has no operator aten::gone_in_this_release"):
        torch.fx.Graph().call_function(op)
    rewrites.SKIPPED.remove("aten::gone_in_this_release")
    rewrites.SKIPPED.remove("aten::gone_in_this_release")
    rewrites.SKIPPED.remove("aten::add.GoneOverload")


def test_operators_by_name_are_torch_s_own():
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert aten.add(torch.ones(2), 1).tolist() == [2, 2]
    assert (
        Namespace("prims").as_strided_scatter.default is torch.ops.prims.as_strided_scatter.default
    )


def names_defined(trees: list[ast.Module]) -> set[str]:
    """What the package itself calls by a private name."""
    found = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isidentifier()
        ):
            found.add(node.value)  # of __slots__ and __dict__
        if isinstance(node, ast.keyword):
            found.add(node.arg)
    return found


def private_names(tree: ast.Module) -> set[str]:
    """Private names that a file imports from torch or the table, and attributes with such."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("private_apis"):
            found |= {alias.name for alias in node.names}
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").startswith("torch")
        ):
            is_private = any(
                part.startswith("_") or part == "experimental" for part in node.module.split(".")
            )
            found |= {
                alias.name for alias in node.names if is_private or alias.name.startswith("_")
            }
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            if ast.unparse(node.value).partition(".")[0] not in (
                "aten",
                "c10d",
                "prims",
            ):  # operators
                found.add(node.attr)
    return found


def test_the_table_has_every_private_name_in_the_sources_and_no_other():
    trees = [ast.parse(path.read_text()) for path in FILES]
    rows = {api.name for api in private_apis.TABLE}
    own = names_defined(trees) - rows
    used = set().union(*map(private_names, trees)) - own
    helpers = {
        "has",
        "check_torch",
        "is_missing",
        "is_newer",
        "require",
        "CHECKED",
        "TABLE",
        "PrivateApi",
        "is_there",
        "PARALLELIZE",
        "PLAN",
        "release",
    }
    python = {
        "_current_frames",
        "_exit",
        "_getframe",
        "_XLAC",
        "_SymbolicNumber__of",
    }
    assert used - rows - helpers - python == set(), "used, without a row in compat/private_apis.py"
    text = "\n".join(path.read_text() for path in FILES)
    assert {name for name in rows if name not in text} == set(), "rows that nothing uses"


def test_every_row_is_there_on_the_versions_it_names():
    release = patches._nearest(torch.__version__)
    lacking = [
        api.path
        for api in private_apis.TABLE
        if not api.is_of_xla
        and release in map(private_apis.release, api.versions)
        and not private_apis.is_there(api)
    ]
    assert lacking == []


def functions_of(module):
    """A module's functions, and the methods of its classes."""
    for value in list(vars(module).values()):
        is_class = isinstance(value, type) and value.__module__ == module.__name__
        for each in vars(value).values() if is_class else (value,):
            function = inspect.unwrap(function_in(each)) if callable(function_in(each)) else None
            if isinstance(function, FunctionType):
                yield function


@pytest.mark.parametrize(
    "patch",
    [p for p in PATCHES if isinstance(p.owner, ModuleType) and p.owner not in (builtins, math)],
    ids=str,
)
def test_a_module_reads_what_a_patch_replaces_in_it(patch):
    """torch 2.14 kept a function of checkpoints, but called another one."""
    readers = [
        function
        for function in functions_of(patch.owner)
        if function.__name__ != patch.name
        and any(patch.name in names for names in dotted_names(function.__code__))
    ]
    assert bool(readers) == patch.is_needed()


def test_a_missing_api_says_so_when_it_is_used(monkeypatch):
    gone = private_apis.PrivateApi("torch._gone_in_this_release", private_apis.PLAN)
    monkeypatch.setattr(private_apis, "TABLE", (*private_apis.TABLE, gone))
    monkeypatch.setitem(private_apis._BY_NAME, gone.name, gone)
    stand_in = private_apis._gone_in_this_release
    assert private_apis.is_missing(stand_in) and not isinstance(1, stand_in)
    for use in (lambda: stand_in(1), lambda: stand_in.method, type("Sub", (stand_in,), {})):
        with pytest.raises(gspmd.ShardingError, match="lacks torch._gone_in_this_release"):
            use()
    private_apis.missing.cache_clear()
    private_apis.check_torch.cache_clear()
    try:
        with pytest.raises(
            gspmd.ShardingError, match=r"lacks torch._gone_in_this_release\n(.|\n)*needed for plan"
        ):
            gspmd.plan(torch.relu, torch.ones(4), mesh=gspmd.Mesh(m=2))
    finally:
        private_apis.missing.cache_clear()
        private_apis.check_torch.cache_clear()
        del private_apis._gone_in_this_release


WITHOUT = """
import sys, types, torch
package = sys.modules["torchgspmd"] = types.ModuleType("torchgspmd")
package.__path__ = [sys.argv[1]]                # the table alone, before the package that uses it
import torchgspmd.compat.private_apis as table

def lookup(api):
    raise AttributeError(api.name)

table.lookup = lookup
del sys.modules["torchgspmd"]
import torchgspmd
try:
    torchgspmd.plan(torch.relu, torch.ones(4), mesh=torchgspmd.Mesh(m=2))
except torchgspmd.ShardingError as error:
    print(str(error).splitlines()[0])
from torchgspmd.tools.doctor import _is_expected
rows = [api for api in table.TABLE if not api.is_of_xla and not _is_expected(api)]
print(len(torchgspmd.doctor().missing), len(rows))
"""


def test_a_torch_without_any_of_its_private_apis_can_be_imported():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT.parent,
    )
    assert run.returncode == 0, run.stderr
    error, counts = run.stdout.splitlines()
    assert error.startswith(f"torch {torch.__version__} lacks torch._ops.OpOverload, ")
    missing, rows = map(int, counts.split())
    assert missing == rows


def test_a_newer_torch_is_one_line_once(monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "99.1.0+cpu")
    private_apis.check_torch.cache_clear()
    private_apis._warn_if_newer.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "torchgspmd"):
            for _ in range(2):
                gspmd.plan(torch.relu, torch.ones(4), mesh=gspmd.Mesh(m=2))
        assert [r.message for r in caplog.records] == [
            "torch 99.1 is newer than what torchgspmd was checked on"
        ]
    finally:
        private_apis.check_torch.cache_clear()
        private_apis._warn_if_newer.cache_clear()


def test_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "torchgspmd", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT.parent,
        env=os.environ,
    )
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines() if not line.startswith(" ")] == [
        "torch",
        "private",
        "operators",
        "backend",
        "backend",
        "backend",
    ]
    assert f"torch      {torch.__version__}: " in run.stdout
