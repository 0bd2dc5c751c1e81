"""Print how the package measures against the goals of its layout; exit with 1 if one is missed.

    python tools/house.py            all figures, each with its goal
    python tools/house.py --strict   the same, and the exit code

Source: the figures of docs/design.md ("The house"). Lines are those of wc; the core is layout,
capture, rules, compiler with fx_passes, comm, dtensor and runtime.
"""

from __future__ import annotations

import argparse
import ast
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).resolve().parents[1]
ROOT = TREE / "torchgspmd"
CORE = tuple("layout capture rules compiler fx_passes comm dtensor runtime compat".split())
FEATURES = {  # Words of a feature in the names that code uses.
    "attention": "attention|zigzag",
    "loops": r"loops?\b|loop_|_loop",
    "windows": "halo|window",
    "pipelines": "stage_|stages|pipelin",
    "unknown_sizes": "unknown_size|dynamic|open_size",
    "experts": "expert|grouped_|_grouped",
}


class Figure(NamedTuple):
    name: str
    value: float
    goal: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.goal


class Source(NamedTuple):
    """A file of the package: its path in it, its text, its tree."""

    path: Path
    text: str
    tree: ast.Module


def sources() -> list[Source]:
    paths = sorted(ROOT.rglob("*.py"))
    texts = [path.read_text() for path in paths]
    return [Source(p.relative_to(ROOT), t, ast.parse(t)) for p, t in zip(paths, texts)]


def lines_of(files: list[Source], folders: tuple[str, ...] | None = None) -> int:
    return sum(
        len(each.text.splitlines())
        for each in files
        if folders is None or each.path.parts[0].removesuffix(".py") in {*folders, "shard_spec"}
    )


def identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
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
    named = [f.path for f in files if any(map(pattern.search, identifiers(f.tree)))]
    return len(named), len({path.parent for path in named})


def repeated_names(files: list[Source]) -> int:
    names = Counter(
        f.path.name for f in files if f.path.name != "__init__.py" and f.path.parts[0] != "features"
    )
    return sum(count > 1 for count in names.values())


def repeated_classes(files: list[Source]) -> int:
    names = Counter(n.name for f in files for n in ast.walk(f.tree) if isinstance(n, ast.ClassDef))
    return sum(count > 1 for name, count in names.items() if not name.startswith("_"))


def any_per_thousand(files: list[Source]) -> float:
    code = sum(bool(line.strip()) for f in files for line in f.text.splitlines())
    uses = sum(isinstance(n, ast.Name) and n.id == "Any" for f in files for n in ast.walk(f.tree))
    return 1000 * uses / code


def long_calls(files: list[Source]) -> int:
    calls = (n for f in files for n in ast.walk(f.tree) if isinstance(n, ast.Call))
    return sum(
        len(call.args) >= 7 and not any(isinstance(a, ast.Starred) for a in call.args)
        for call in calls
    )


def arguments_of(module: str, function: str, files: list[Source]) -> int:
    tree = next(f.tree for f in files if str(f.path) == module)
    defined = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function
    )
    return len(defined.args.args) + len(defined.args.kwonlyargs)


def comment_share(files: list[Source]) -> float:
    lines = [line.strip() for f in files for line in f.text.splitlines()]
    return 100 * sum(line.startswith("#") or "  # " in line for line in lines) / len(lines)


def docstrings(files: list[Source]) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(n) for f in files for n in ast.walk(f.tree) if isinstance(n, kinds))
    return [text for text in found if text]


def what_per_thousand(texts: list[str]) -> float:
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())]
    return 1000 * words.count("what") / len(words)


def layers() -> int:
    text = (TREE / "tests" / "test_imports.py").read_text()
    table = text[text.index("LAYERS = (") :]
    return len(re.findall(r"^    \(", table[: table.index("\n)\n")], re.M))


TRACED = """
import sys
files, functions = set(), set()
def seen(frame, event, arg):
    name = frame.f_code.co_filename
    if "/torchgspmd/" in name:
        files.add(name); functions.add(frame.f_code)
import torch, torchgspmd as gspmd
from torch import nn
mesh = gspmd.Mesh(data=2, model=4)
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
gspmd.mark_sharding(model[0].weight, mesh, "model _")
gspmd.plan  # loads its files, whose imports are not counted
sys.setprofile(seen)
gspmd.plan(model, torch.randn(8, 64), mesh=mesh, in_specs="data _", out_specs="data _")
sys.setprofile(None)
print(len(files), len(functions))
"""


def planning() -> list[int]:
    """Count the files and functions of the package that plan the MLP of the README."""
    run = subprocess.run(
        [sys.executable, "-c", TRACED], cwd=TREE, capture_output=True, text=True, check=True
    )
    return [int(word) for word in run.stdout.split()]


def import_ratio(runs: int = 3) -> float:
    """Return the CPU time of `import torchgspmd` with torch over that of torch, compiled."""

    def seconds(statement: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-W", "ignore", "-c", statement], cwd=TREE, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    each = [(seconds("import torch"), seconds("import torch, torchgspmd")) for _ in range(runs)]
    return min(both for _, both in each) / min(alone for alone, _ in each)


def figures() -> Iterator[Figure]:
    files = sources()
    yield Figure("lines of the core", lines_of(files, CORE), 31_000)
    yield Figure("lines of the package", lines_of(files), 46_000)
    for feature in FEATURES:
        named, folders = places_of(feature, files)
        yield Figure(f"files that name {feature}", named, 16)
        yield Figure(f"folders that name {feature}", folders, 5)
    run, called = planning()
    yield Figure("files run to plan the README's MLP", run, 90)
    yield Figure("functions run to plan it", called, 700)
    yield Figure("import torchgspmd over import torch", import_ratio(), 1.15)
    yield Figure("rows of LAYERS", layers(), 14)
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


def main(measure: Callable[[], Iterator[Figure]] = figures) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    missed = 0
    for each in measure():
        missed += not each.is_met
        verdict = "ok    " if each.is_met else "missed"
        print(f"{verdict} {each.name:48} {each.value:10,.1f} of {each.goal:,}")
    print(f"{missed} goals missed")
    sys.exit(options.strict and missed > 0)


if __name__ == "__main__":
    main()
