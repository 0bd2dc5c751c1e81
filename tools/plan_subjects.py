"""What compare_plans plans: cases of the communication suite, and random programs.

Only public names of torchgspmd are used, here and in benchmarks/programs.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchgspmd as gspmd

TREE = Path(__file__).resolve().parent.parent

# How often a family is drawn. Transformers and pipelines take 20 times as long as the others.
FAMILIES = {
    "transformer": 2,
    "pipeline": 1,
    "step": 2,
    "moe": 2,
    "convolutions": 8,
    "losses": 6,
    "cache": 5,
    "indexing": 6,
    "pointwise_chain": 8,
    "shape_chain": 10,
    "product_chain": 10,
    "reshard_chain": 6,
}
DEVICES = (8, 8, 8, 4, 4, 2, 3, 6, 6)

# Ways to plan a program, and how often each is taken.
WAYS = {
    "module": 0.25,  # A forward program as a module with parameters, planned with grad=True.
    "meta": 0.4,  # Inputs are meta tensors: the program is one for GPUs.
    "open": 0.2,  # Half of the layouts of inputs are left to propagation.
    "strict": 0.05,  # strict=True.
    "regather": 0.05,  # regather="always".
    "broken": 0.02,  # The layout of an input is not legal.
}

Key = tuple[str, str]  # ("cases", name) or ("programs", seed)


@dataclass(frozen=True)
class Subject:
    """Something to plan; name says how it was drawn."""

    name: str
    plan: Callable[[], gspmd.Plan]


def subject_of(key: Key, cases: Path) -> Subject:
    """Return the case or the random program of a key."""
    return case_named(key[1], cases) if key[0] == "cases" else program_of(int(key[1]))


def case_named(name: str, folder: Path) -> Subject:
    """Return a case of the communication suite."""
    case = suite(folder)[name]
    inputs = tuple(importable(folder, "harness").random_inputs(case))

    def plan() -> gspmd.Plan:
        specs = {"in_specs": case.in_specs, "out_specs": case.out_specs}
        return gspmd.plan(case.program, *inputs, mesh=case.mesh, **specs)

    return Subject(name, plan)


def suite(folder: Path) -> dict[str, Any]:
    """Return all cases of the communication suite by name."""
    return importable(folder, "cases").load()


def importable(folder: Path, module: str) -> Any:
    """Import a module of a folder, which comes last: it may have names of the standard library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return __import__(module)


def program_of(seed: int) -> Subject:
    """Return the random program of a seed, planned in a random way."""
    rng = random.Random(f"compare_plans {seed}")
    devices = rng.choice(DEVICES)
    family = rng.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    ways = [way for way, chance in WAYS.items() if rng.random() < chance]
    torch.manual_seed(seed)
    programs = importable(TREE / "benchmarks", "programs")
    program = programs.make(seed, devices, [family], train="module" not in ways)
    program.function(*program.inputs)  # The first call draws which values are marked.
    specs = changed(program.in_specs, ways, rng)
    inputs = [t.to("meta") if "meta" in ways else t for t in program.inputs]

    def plan() -> gspmd.Plan:
        options = {
            "mesh": program.mesh,
            "out_specs": program.out_specs,
            "strict": "strict" in ways,
            "advanced": {"regather": "always" if "regather" in ways else "auto"},
        }
        if "module" not in ways:
            return gspmd.plan(program.function, *inputs, in_specs=tuple(specs), **options)
        module, rest = with_parameters(program.function, inputs, specs, program.mesh)
        in_specs = tuple(specs[i] for i in rest)
        args = [inputs[i] for i in rest]
        return gspmd.plan(module, *args, in_specs=in_specs, grad=True, **options)

    return Subject(", ".join([f"{program.name} on {program.mesh}", *ways]), plan)


def changed(specs: Sequence[str], ways: Sequence[str], rng: random.Random) -> list[str | None]:
    """Return the layouts of inputs for these ways to plan."""
    layouts: list[str | None] = list(specs)
    if "open" in ways:
        layouts = [None if rng.random() < 0.5 else spec for spec in layouts]
    if "broken" in ways:
        at = rng.randrange(len(layouts))
        spec = specs[at]
        layouts[at] = rng.choice([f"{spec} x", f"{spec} _", spec.replace("x", "w"), "x x"])
    return layouts


def with_parameters(
    function: Callable, inputs: Sequence[Tensor], specs: Sequence[str | None], mesh: gspmd.Mesh
) -> tuple[nn.Module, list[int]]:
    """Return a module whose parameters are the floating inputs but the first, and the other inputs.

    Where there is one floating input, it is a parameter too: without any there are no gradients.
    """
    floats = [i for i, t in enumerate(inputs) if t.is_floating_point()]
    places = floats[1:] or floats
    rest = [i for i in range(len(inputs)) if i not in places]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(inputs[i]) for i in places)
            for i, weight in zip(places, self.weights):
                if (spec := specs[i]) is not None:
                    gspmd.mark_sharding(weight, mesh, spec)

        def forward(self, *args: Any) -> Any:
            tensors = dict(zip(rest, args)) | dict(zip(places, self.weights))
            return function(*(tensors[i] for i in range(len(inputs))))

    return Module(), rest


def generator() -> str:
    """Return a hash of what draws the programs: of this file and of benchmarks/programs."""
    files = [Path(__file__), *sorted((TREE / "benchmarks" / "programs").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
