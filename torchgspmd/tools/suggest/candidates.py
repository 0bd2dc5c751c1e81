"""The candidates of a search: meshes, the marks from which it starts, and their changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ...layout.mesh import Mesh
from .judge import Judge
from .proposal import DATA, EXPERT, MODEL, STAGE, Marks, batch_axes

MIN_SHARE = 0.005  # a group with less of the parameters' bytes is not searched by itself
FEWER = 4  # times fewer devices along EXPERT than experts or devices allow


def meshes(devices: int, stacks: Iterable[int] = ()) -> Iterator[Mesh]:
    """Yield the meshes with so many devices: those with a small MODEL axis first.

    stacks: lengths of expert stacks. The largest axes that divide them are tried too.
    """
    for model in range(1, devices + 1):
        rest = devices // model
        if devices % model:
            continue
        yield Mesh(data=rest, model=model)
        most = math.gcd(rest, *stacks) if stacks else 1
        for count in (most // n for n in range(1, FEWER + 1) if most % n == 0):
            if count > 1:
                yield Mesh(data=rest // count, expert=count, model=model)


def staged(mesh: Mesh, layers: int) -> Iterator[Mesh]:
    """Yield meshes of as many devices with stages, few first: DATA and then MODEL are divided."""
    for stages in range(2, min(layers, mesh.size) + 1):
        sizes = dict(mesh.axes)
        rest = stages
        for axis in (DATA, MODEL):
            part = math.gcd(sizes[axis], rest)
            sizes[axis], rest = sizes[axis] // part, rest // part
        if rest == 1:
            yield Mesh(stage=stages, **sizes)


def of_stages(mesh: Mesh, rows: int) -> list[int]:
    """Return the numbers of microbatches for a mesh with stages: about 4, 2 and 8 a stage."""
    counts, stages = [1, *divisions(rows)], mesh.count((STAGE,))
    wanted = (times * stages for times in (4, 2, 8))
    nearest = [max((n for n in counts if n <= most), default=1) for most in wanted]
    return [n for n in dict.fromkeys(nearest) if n >= stages]


def starts(judge: Judge, mesh: Mesh) -> list[Marks]:
    """Return the marks from which a search starts on a mesh, if layers are alike.

    First no marks, then weights of like layers along MODEL, then also these layers' outputs. Of a
    weight, the first dimension is divided that has not the width of a layer output, such as heads.
    Propagation finds the layout of square weights. Experts are divided along EXPERT.
    """
    groups = judge.output_groups()
    has_experts = EXPERT in mesh.names
    plain = marks = Marks(stacked=frozenset(judge.stacks if has_experts else ()))
    if not groups:
        return [plain]
    (*_, width), outputs = groups[-1]
    for group in judge.groups:
        first = int(has_experts and group.pattern in judge.stacks)
        dims = [d for d, n in enumerate(group.shape) if d >= first and n != width]
        if len(group.shape) > 1 and 0 < len(dims) < len(group.shape):
            marks = marks.with_dims([group.pattern], dims[0])
    return list(dict.fromkeys([plain, marks, marks.with_outputs(outputs, 1)]))


def divisions(rows: int) -> list[int]:
    """Return the numbers of microbatches that divide a batch, the fewest first."""
    return [count for count in range(2, rows + 1) if rows % count == 0]


def changes(judge: Judge, mesh: Mesh) -> Iterator[Callable[[Marks], Marks]]:
    """Yield functions that change marks."""
    model, data = mesh.count((MODEL,)), mesh.count(batch_axes(mesh))
    smallest = MIN_SHARE * sum(group.bytes for group in judge.groups)
    matrices = [g for g in judge.groups if len(g.shape) > 1 and g.bytes >= smallest]
    alike: dict[tuple[int, ...], list[str]] = {}
    for group in matrices if model > 1 else ():
        alike.setdefault(group.shape, []).append(group.pattern)
    for shape, names in alike.items():
        for dim in _divisible(shape, model):
            yield lambda marks, names=names, dim=dim: marks.with_dims(names, dim)
    for shape, numbers in judge.like_arguments().items() if model > 1 else ():
        for dim in _divisible(shape, model):
            yield lambda marks, numbers=numbers, dim=dim: marks.with_arguments(numbers, dim)
    for shape, globs in judge.output_groups() if model > 1 else ():
        for dim in _divisible(shape, model):
            if dim != 0:  # the batch, which the arguments' layouts divide
                yield lambda marks, globs=globs, dim=dim: marks.with_outputs(globs, dim)
    for group in matrices if data > 1 else ():
        if len(group.shape) > 2 and group.shape[0] % mesh.count(batch_axes(mesh)[-1:]) == 0:
            this = frozenset([group.pattern])
            yield lambda marks, this=this: replace(marks, stacked=marks.stacked ^ this)
    if data > 1:
        yield lambda marks: replace(marks, zero=not marks.zero, by_cost=False)
        yield lambda marks: replace(marks, by_cost=marks.zero and not marks.by_cost)
    for shape, names in alike.items():
        for name, dim in itertools.product(names, _divisible(shape, model)):
            if len(names) > 1:
                yield lambda marks, name=name, dim=dim: marks.with_dims([name], dim)


def _divisible(shape: tuple[int, ...], count: int) -> list[int | None]:
    """Return the dimensions that so many devices divide evenly; and None, for no mark."""
    return [*(dim for dim, size in enumerate(shape) if size % count == 0), None]
