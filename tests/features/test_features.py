"""Features add rows to the tables of the core, which knows none of their operators by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.capture.trace_context import PATCHES
from torchgspmd.comm.kinds import KINDS
from torchgspmd.features.tables import FEATURES, without_feature
from torchgspmd.fx_passes import pipeline
from torchgspmd.rules import rewrites
from torchgspmd.rules.registry import RULES
from torchgspmd.rules.rewrites import REWRITES, feature_of

ROOT = Path(gspmd.__file__).parent
CORE = ("layout", "rules", "comm", "capture", "fx_passes", "compiler", "dtensor", "runtime")
MESH = Mesh(data=2, model=2)


def operators_of(feature: str) -> set[tuple[str, str]]:
    """The operators with a rule of a feature: ("aten", "convolution"), ("torchgspmd", ...)."""
    rows = [op for op, function in RULES.items() if feature_of(function) == feature]
    names = [op if isinstance(op, str) else op.name() for op in rows]
    return {tuple(name.partition(".")[0].split("::")) for name in names}


@cache
def named_in_core() -> frozenset[tuple[str, str, str]]:
    """Return (file, namespace, name) of each operator that a file of the core names."""
    files = [path for folder in CORE for path in (ROOT / folder).rglob("*.py")]
    return frozenset((str(p.relative_to(ROOT)), *n) for p in files for n in named_operators(p))


def named_operators(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the operators that a file names: ours.attention, aten.relu, "torchgspmd::attention"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            space = ast.unparse(node.value).lower().removeprefix("torch.ops.").lstrip("_")
            yield "torchgspmd" if space == "ours" else space, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "custom_op":
            yield "torchgspmd", ast.literal_eval(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(torchgspmd|aten)(?:::|\.)(\w+)", node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").endswith("custom_ops.loops"):
            yield from (("torchgspmd", f"loop_{a.name.lower()}") for a in node.names)
            yield from (("torchgspmd", a.name) for a in node.names)


# What files of the core name all the same. The list may only get shorter.
NAMED = {
    # DTensor's own dispatch of an operator, for a model outside of a plan
    "windows": {("dtensor/op_handlers.py", "aten", "convolution_backward")},
    "loops": {
        (path, "torchgspmd", f"loop_{name}")
        for path, names in {
            "capture/loop_form.py": "carry const next row stack total",
            "capture/rewrites/loop_trace.py": "carry const next row stack total",
            "fx_passes/expand/decompose_ops.py": "row",
            "fx_passes/ir.py": "carry next",
            "fx_passes/partition/assignment.py": "carry",
            "fx_passes/partition/insert_collectives.py": "carry next",
            "fx_passes/schedule/saved_values.py": "carry row stack",
            "rules/custom_ops/loops.py": "carry const next row stack total",  # defines them
        }.items()
        for name in names.split()
    },
}


def test_rewrites_are_asked_in_one_order_whatever_was_imported_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def modules() -> dict[object, list[str]]:
        rows = REWRITES.items()
        return {key: [getattr(e.apply, "__module__", "") for e in row] for key, row in rows}

    monkeypatch.setattr(rewrites, "_ENDED", [])
    before = modules()
    assert any(len({*names}) > 1 for names in before.values())
    try:
        for entries in REWRITES.values():
            # The rows of a module stay in the order of its file.
            entries.sort(key=lambda row: getattr(row.apply, "__module__", ""), reverse=True)
        assert modules() != before
    finally:
        rewrites.end_tables("a test")
    assert modules() == before


@pytest.mark.parametrize("feature", FEATURES)
def test_no_file_of_the_core_names_an_operator_of_a_feature(feature: str) -> None:
    operators = operators_of(feature)
    assert {each for each in named_in_core() if each[1:] in operators} == NAMED.get(feature, set())


def test_every_feature_has_a_readme_of_one_screen() -> None:
    assert sorted(path.parent.name for path in (ROOT / "features").glob("*/__init__.py")) == [
        *FEATURES
    ]
    for feature in FEATURES:
        text = (ROOT / "features" / feature / "README.md").read_text()
        assert len(text.splitlines()) <= 50
        rows = [each.name for each in pipeline.passes() if each.feature == feature]
        assert [name for name in rows if f"`{name}`" not in text] == []


# ---------------------------------------------------------------- programs without a feature's rows


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(4, 8, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def layers(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x @ torch.ones(8, 16)) @ torch.ones(16, 8), [8])


def experts(x: torch.Tensor) -> torch.Tensor:
    rows, ends = x.reshape(32, 8), torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    return F.grouped_mm(rows.bfloat16(), torch.ones(4, 8, 16).bfloat16(), offs=ends)


def windows(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool1d(F.conv1d(x, torch.ones(8, 8, 3), padding=1), 2)


def unknown_sizes(x: torch.Tensor) -> torch.Tensor:
    return x[x.sum(-1) > 0] * 2


PROGRAMS: dict[str, Callable] = {
    "core": layers,
    "attention": attention,
    "experts": experts,
    "loops": gspmd.stack([nn.Linear(8, 8) for _ in range(3)]),
    "windows": windows,
    "unknown_sizes": unknown_sizes,
}


def text_of(program: Callable) -> str:
    x = torch.ones(4, 8, 8)
    torch.manual_seed(0)
    return str(gspmd.plan(program, x, mesh=MESH, in_specs="data model _", out_specs="same"))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: text_of(program) for name, program in PROGRAMS.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_all_else_is_planned_as_with_it(
    feature: str, texts: dict[str, str]
) -> None:
    sizes = [len(table) for table in (RULES, REWRITES, KINDS, PATCHES)]
    with without_feature(feature):
        assert feature not in {each.feature for each in pipeline.passes()}
        assert feature not in {kind.feature for kind in KINDS.values()}
        assert feature not in set(map(feature_of, RULES.values()))
        assert feature not in {feature_of(e.apply) for rows in REWRITES.values() for e in rows}
        for name in PROGRAMS.keys() - {feature}:
            assert text_of(PROGRAMS[name]) == texts[name]
    assert sizes == [len(table) for table in (RULES, REWRITES, KINDS, PATCHES)]
    if feature in PROGRAMS:
        assert text_of(PROGRAMS[feature]) == texts[feature]


# A process that has imported torch forks itself for each module.
ALONE = """
import os, sys, torch
from importlib import import_module

def run(x):
    return x.unflatten(0, (2, 2)).repeat_interleave(2, 1)

for module in sys.argv[1:]:
    if not os.fork():
        import_module("torchgspmd." + module)
        from torchgspmd import Mesh
        from torchgspmd.capture.trace import capture
        try:
            nodes = len(capture(run, (torch.ones(4),), {}, Mesh(a=2)).graph.nodes)
            print(module, nodes, flush=True)
        except Exception as error:
            print(module, type(error).__name__, error, end="\\0", flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_table_is_whole_or_an_error() -> None:
    modules = ["capture.trace", "rules", "fx_passes.ir", "compiler.api"]
    run = [sys.executable, "-c", ALONE, *modules]
    *errors, whole = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )
    for module, text in zip(modules[:-1], errors, strict=True):
        assert text.startswith(module) and "lack the rows of features" in text
        assert "import torchgspmd.compiler.api" in text
    assert int(whole.removeprefix("compiler.api")) > 2
