"""Measure the package; fail if a figure is worse than the one committed in tools/house.json.

    python tools/house.py            each figure, with the committed one and the goal
    python tools/house.py --update   write tools/house.json; the commit says why a figure got worse

Source: the figures of docs/design.md ("The house"). Lines are those of wc; the core is layout,
capture, rules, compiler with fx_passes, comm, dtensor and runtime.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

TREE = Path(__file__).resolve().parents[1]
IMPORTS = SimpleNamespace(**runpy.run_path(str(TREE / "tools" / "import_graph.py")))
COMMITTED = TREE / "tools" / "house.json"
ROOT = IMPORTS.ROOT
CORE = tuple("layout capture rules compiler fx_passes comm dtensor runtime compat".split())
FEATURES = {  # Words of a feature in the names that code uses.
    "attention": "attention|zigzag",
    "loops": r"loops?\b|loop_|_loop",
    "windows": "halo|window",
    "pipelines": "stage_|stages|pipelin",
    "unknown_sizes": "unknown_size|dynamic|open_size",
    "experts": "expert|grouped_|_grouped",
}


BUDGETS = {  # Lines of each folder if all give up the same share for 60,000; "" is the root.
    "": 580,
    "capture": 8_300,
    "comm": 4_840,
    "compat": 650,
    "compiler": 2_980,
    "dtensor": 1_470,
    "features": 8_100,
    "fx_passes": 10_800,
    "integrations": 570,
    "layout": 1_580,
    "model_api": 2_210,
    "rules": 5_120,
    "runtime": 4_400,
    "tools": 7_540,
    "xla_backend": 810,
}


class Figure(NamedTuple):
    """A figure. is_floor: more is better. is_timed: a time, which no run repeats exactly."""

    name: str
    value: float
    goal: float
    is_floor: bool = False
    is_timed: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal if self.is_floor else self.value <= self.goal

    def is_worse(self, committed: float) -> bool:
        return self.value < committed if self.is_floor else self.value > committed


class Source(NamedTuple):
    """A file of the package: its path in it, its text, all nodes of its syntax tree."""

    path: Path
    text: str
    nodes: tuple[ast.AST, ...]
    names: frozenset[str]

    @property
    def length(self) -> int:
        return len(self.text.splitlines())

    @property
    def is_face(self) -> bool:
        return self.path.name in ("__init__.py", "shard_spec.py")


def sources() -> list[Source]:
    return [
        Source(p.relative_to(ROOT), p.read_text(), nodes, frozenset(identifiers(nodes)))
        for p in IMPORTS.FILES
        if (nodes := IMPORTS.nodes_of(p))
    ]


def lines_of(files: list[Source], folders: tuple[str, ...] | None = None) -> int:
    return sum(
        each.length
        for each in files
        if folders is None or each.path.parts[0].removesuffix(".py") in {*folders, "shard_spec"}
    )


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.name


def places_of(feature: str, files: list[Source]) -> tuple[int, int]:
    """Count the files whose code names a feature, and their folders."""
    pattern = re.compile(FEATURES[feature], re.I)
    named = [f.path for f in files if any(map(pattern.search, f.names))]
    return len(named), len({path.parent for path in named})


def repeated_names(files: list[Source]) -> int:
    names = Counter(
        f.path.name for f in files if f.path.name != "__init__.py" and f.path.parts[0] != "features"
    )
    return sum(count > 1 for count in names.values())


def repeated_classes(files: list[Source]) -> int:
    names = Counter(n.name for f in files for n in f.nodes if isinstance(n, ast.ClassDef))
    return sum(count > 1 for name, count in names.items() if not name.startswith("_"))


def any_per_thousand(files: list[Source]) -> float:
    code = sum(bool(line.strip()) for f in files for line in f.text.splitlines())
    uses = sum(isinstance(n, ast.Name) and n.id == "Any" for f in files for n in f.nodes)
    return 1000 * uses / code


def long_calls(files: list[Source]) -> int:
    calls = (n for f in files for n in f.nodes if isinstance(n, ast.Call))
    return sum(
        len(call.args) >= 7 and not any(isinstance(a, ast.Starred) for a in call.args)
        for call in calls
    )


def arguments_of(module: str, function: str, files: list[Source]) -> int:
    nodes = next(f.nodes for f in files if str(f.path) == module)
    defined = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == function)
    return len(defined.args.args) + len(defined.args.kwonlyargs)


def comment_share(files: list[Source]) -> float:
    lines = [line.strip() for f in files for line in f.text.splitlines()]
    return 100 * sum(line.startswith("#") or "  # " in line for line in lines) / len(lines)


def docstrings(files: list[Source]) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(n) for f in files for n in f.nodes if isinstance(n, kinds))
    return [text for text in found if text]


def what_per_thousand(texts: list[str]) -> float:
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())]
    return 1000 * words.count("what") / len(words)


def public_options(files: list[Source]) -> int:
    """Count the fields of Options, all of which docs/parallelize.md documents."""
    nodes = next(f.nodes for f in files if str(f.path) == "compiler/options.py")
    table = next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == "Options")
    return sum(isinstance(n, ast.AnnAssign) for n in table.body)


def over_budget(files: list[Source]) -> Iterator[Figure]:
    lines = Counter[str]()
    for each in files:
        lines[each.path.parts[0] if len(each.path.parts) > 1 else ""] += each.length
    for folder in sorted({*lines, *BUDGETS}):
        over = max(0, lines[folder] - BUDGETS.get(folder, 0))
        yield Figure(f"lines over budget in {folder or 'the root'}", over, 0)


TRACED = """
import os, sys
PACKAGE = os.path.join(os.getcwd(), "torchgspmd", "")  # a clone's folder may have that name, too
files, functions, walks = set(), set(), 0
def seen(frame, event, arg):
    name = frame.f_code.co_filename
    if name.startswith(PACKAGE):
        files.add(name); functions.add(frame.f_code)
import torch, torchgspmd as gspmd
from torch import nn
nodes = type(torch.fx.Graph().nodes)
iterate = nodes.__iter__
def counted(self):
    global walks
    walks += sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
    return iterate(self)
mesh = gspmd.Mesh(data=2, model=4)
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
gspmd.mark_sharding(model[0].weight, mesh, "model _")
gspmd.plan  # loads its files, whose imports are not counted
nodes.__iter__ = counted
sys.setprofile(seen)
gspmd.plan(model, torch.randn(8, 64), mesh=mesh, in_specs="data _", out_specs="data _")
sys.setprofile(None)
print(len(files), len(functions), walks, sum(f.startswith(PACKAGE + "features/") for f in files))
"""


def planning() -> list[int]:
    """Count what plans the MLP of the README: files, functions, walks of a graph, features' files.

    A walk is a loop in the package over all nodes of a graph.
    """
    # Sets of strings have the same order in each run, and no file of plans is read.
    environment = {"PYTHONHASHSEED": "0", "TORCHGSPMD_CACHE": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRACED],
        cwd=TREE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in run.stdout.split()]


def import_ratio() -> float:
    """Return the CPU time of `import torchgspmd` with torch over that of torch, compiled.

    Measured once: no committed figure depends on it, and each import takes seconds of `make lint`.
    """

    def seconds(statement: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-W", "ignore", "-c", statement], cwd=TREE, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return seconds("import torch, torchgspmd") / seconds("import torch")


def figures() -> Iterator[Figure]:
    files = sources()
    own = sorted(each.length for each in files if not each.is_face)
    yield Figure("lines of the package", lines_of(files), 60_000)
    yield Figure("lines of the core", lines_of(files, CORE), 40_000)
    yield Figure("files", len(files), 330)
    yield Figure("lines of the median file", median(own), 170, is_floor=True)
    yield Figure("files under 60 lines", sum(length < 60 for length in own), 20)
    yield from over_budget(files)
    yield Figure("circles of imports", len(IMPORTS.circles()), 0)
    yield Figure("arrows that climb the layers", len(IMPORTS.climbing_arrows()), 0)
    yield Figure("rows of LAYERS", len(IMPORTS.LAYERS), 14)
    for feature in FEATURES:
        named, folders = places_of(feature, files)
        yield Figure(f"files that name {feature}", named, 16)
        yield Figure(f"folders that name {feature}", folders, 5)
    run, called, walks, features = planning()
    yield Figure("files run to plan the README's MLP", run, 80)
    yield Figure("functions run to plan it", called, 700)
    yield Figure("walks of its graph", walks, 40)
    yield Figure("files of features run to plan it", features, 0)
    yield Figure("import torchgspmd over import torch", import_ratio(), 1.15, is_timed=True)
    yield Figure("public options", public_options(files), 14)
    yield Figure("files in the root", sum(len(f.path.parts) == 1 for f in files), 6)
    yield Figure("Any per 1,000 lines of code", any_per_thousand(files), 12)
    yield Figure("calls with 7 positional arguments or more", long_calls(files), 10)
    yield Figure(
        "arguments of parallelize", arguments_of("runtime/parallelize.py", "parallelize", files), 6
    )
    yield Figure("basenames that occur twice", repeated_names(files), 0)
    yield Figure("public classes that share a name", repeated_classes(files), 0)
    yield Figure("percent of comments below 3", max(0.0, 3 - comment_share(files)), 0)
    texts = docstrings(files)
    yield Figure("'what' per 1,000 words of docstrings", what_per_thousand(texts), 1)
    begins = re.compile(r"(Return|Yield) what|Let |What ")
    yield Figure(
        "docstrings that begin Return what, Let, What", sum(map(bool, map(begins.match, texts))), 0
    )


def worse(measured: Iterable[Figure], committed: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each figure that is worse than the committed one, or has none."""
    names = set()
    for each in measured:
        names.add(each.name)
        before = committed.get(each.name)
        if each.is_timed:
            continue
        if before is None:
            yield f"{each.name}: {each.value:,} is not in {COMMITTED.name}"
        elif each.is_worse(before):
            yield f"{each.name}: {before:,} -> {each.value:,}"
    yield from (f"{name}: no longer measured" for name in committed if name not in names)


def main(
    arguments: list[str] | None = None,
    measure: Callable[[], Iterator[Figure]] = figures,
    path: Path = COMMITTED,
) -> int:
    """Print the figures, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {path.name}")
    is_update = parser.parse_args(arguments).update
    committed = json.loads(path.read_text()) if path.exists() else {}
    measured = [each._replace(value=round(each.value, 2)) for each in measure()]
    for each in measured:
        verdict = "ok    " if each.is_met else "missed"
        before = committed.get(each.name, each.value)
        moved = "" if before == each.value else f", was {before:,.1f}"
        print(f"{verdict} {each.name:46} {each.value:10,.1f} of {each.goal:,}{moved}")
    print(f"{sum(not each.is_met for each in measured)} goals missed")
    faults = [*worse(measured, committed)]
    if is_update:
        values = {each.name: each.value for each in measured if not each.is_timed}
        path.write_text(json.dumps(values, indent=2) + "\n")
        return 0
    if faults:
        print(f"\nworse than {path.name}:", *faults, sep="\n  ")
        print(
            "Take as much away elsewhere; or run `python tools/house.py --update`, and say in the "
            "commit why the figure moves."
        )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
