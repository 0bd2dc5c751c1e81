"""A proven lower bound of the bytes that a device sends, beside those of the plan.

    python benchmarks/bounds.py [--only 18 --only sort] [--cases FOLDER] [--json bounds.json]

The programs are those of benchmarks/programs/along.py, and the cases of the communication suite if
its folder is there. The bound follows from the program of one device and the layouts of arguments
and results alone, whatever is sent in between:

* What device d receives has to determine its results, given the arguments that it has. A result
  whose elements are elements of arguments (it is moved) needs each that d has not, once. Else the
  results of d change in as many independent directions as the Jacobian of d's results in the
  elements of an argument that d has not has ranks; a message has at least so many numbers.
* The same holds for what d sends: elements that d alone has, and results of other devices.
* What is received in all is sent. So some device sends the mean of what devices receive, and at
  least what any one must send.

The Jacobian is that at random arguments, by differences in float64, from at most COLUMNS elements
of each independent row of an argument: fewer columns have no higher rank, so the bound stays one.
It may be low: sums of weights' gradients have more directions than COLUMNS; what several arguments
need is not added up; and an all_reduce moves twice its operand where each cut only needs it once.
Results of integers that are no elements of arguments, as places, count nothing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

TREE = Path(__file__).resolve().parent.parent
COLUMNS, ELEMENTS = 64, 2**22  # of a Jacobian: so many columns at least, so many elements
STEP = 1e-4  # of a difference
SMALLEST = 1e-10  # square of a singular value that is not rounding, over those of its matrix
REACHED = 1.001


@dataclass(frozen=True)
class Bounded:
    """A program: the bytes that a device sends, and the bound."""

    name: str
    ours: float
    bound: float

    @property
    def is_reached(self) -> bool:
        return self.ours <= self.bound * REACHED + 1


def holders(shape: Sequence[int], spec: gspmd.ShardSpec, mesh: gspmd.Mesh) -> Tensor:
    """Return for each device which elements it has: [devices, *shape]."""
    masks = []
    for place in itertools.product(*map(range, mesh.shape)):
        at, mask = dict(zip(mesh.names, place)), torch.ones(list(shape), dtype=torch.bool)
        for d, axes in enumerate(spec.dims):
            block = 0
            for axis in axes:
                block = block * mesh.count((axis,)) + at[axis]
            rows = -(-shape[d] // mesh.count(axes))
            own = torch.arange(shape[d]) // rows == block
            mask &= own.reshape([-1] + [1] * (len(shape) - 1 - d))
        masks.append(mask)
    return torch.stack(masks)


class Cut:
    """The numbers that the devices of a program have to exchange."""

    def __init__(self, function: Callable, inputs: Sequence[Tensor], have: list, need: list):
        """have, need: holders of arguments and of results; None where there is no tensor."""
        self.function, self.inputs, self.have, self.need = function, list(inputs), have, need
        generator = torch.Generator().manual_seed(0)
        self.inputs = [
            torch.randn(t.shape, generator=generator, dtype=torch.float64)
            if t.is_floating_point()
            else t
            for t in self.inputs
        ]
        devices = len(next(h for h in have if h is not None))
        self.received, self.sent = torch.zeros(devices), torch.zeros(devices)

    def numbers(self) -> float:
        """Return how many numbers some device sends at least."""
        if self._moved():
            return self._most()
        lacking = {
            k: (~self.have[k]).sum().item() / len(self.have[k])
            for k, x in enumerate(self.inputs)
            if x.is_floating_point()
        }
        for k in sorted(lacking, key=lambda k: -lacking[k]):
            if lacking[k] > self._most():  # no rank is larger than that
                for ranks in self._jacobians(k):
                    self._add(*ranks)
        return self._most()

    def _most(self) -> float:
        return max(self.received.mean().item(), self.sent.max().item())

    def _add(self, received: Tensor, sent: Tensor) -> None:
        self.received = torch.maximum(self.received, received)
        self.sent = torch.maximum(self.sent, sent)

    def _results(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach() for t in pytree.tree_leaves(self.function(*inputs))]

    def _moved(self) -> bool:
        """Count elements of results that are elements of arguments, by two numberings of these.

        Return whether all are.
        """
        total = sum(x.numel() for x in self.inputs if x.is_floating_point())
        sources: list[list[Tensor]] = []
        for seed in range(2):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
            tags = (order.double() + 1) / total
            parts = iter(tags.split([x.numel() for x in self.inputs if x.is_floating_point()]))
            tagged = [
                next(parts).reshape(x.shape) if x.is_floating_point() else x for x in self.inputs
            ]
            values, places = torch.cat([torch.zeros(1).double(), tags]).sort()
            found = []
            for y in self._results(tagged):
                at = torch.searchsorted(values, y.double().contiguous()).clamp_max(total)
                found.append(torch.where(values[at] == y, places[at] - 1, -2))  # -1: a constant 0
            sources.append(found)
        have = torch.cat(
            [h.flatten(1) for x, h in zip(self.inputs, self.have) if x.is_floating_point()], 1
        )
        wanted, all_moved = torch.zeros_like(have), True
        for one, other, need in zip(*sources, self.need):
            moved = torch.equal(one, other) and bool((one >= -1).all())
            all_moved &= moved
            if moved:
                for d, mask in enumerate(need):
                    found = one[mask]
                    wanted[d, found[found >= 0]] = True
        alone = have & (have.sum(0) == 1)
        others = (wanted & ~have).any(0)
        self._add((wanted & ~have).sum(1).float(), (alone & others).sum(1).float())
        return all_moved

    def _change(self, k: int, direction: Tensor) -> list[Tensor]:
        """Return the derivatives of the results in a direction of argument k."""
        ends = [
            self._results([*self.inputs[:k], self.inputs[k] + s * direction, *self.inputs[k + 1 :]])
            for s in (STEP, -STEP)
        ]
        return [
            (a - b) / (2 * STEP) if a.is_floating_point() else torch.zeros(a.shape).double()
            for a, b in zip(*ends)
        ]

    def _rows(self, k: int) -> list[dict[int, int]]:
        """Return for each result the dimensions of x whose rows only change the same row of it."""
        x, results = self.inputs[k], self._results(self.inputs)
        rows = [
            {(b, a) for b, n in enumerate(x.shape) for a, m in enumerate(y.shape) if n == m > 1}
            for y in results
        ]
        for b, n in enumerate(x.shape):
            for i in range(n if any(b == pair[0] for pairs in rows for pair in pairs) else 0):
                direction = torch.zeros_like(x)
                direction.select(b, i).normal_(generator=torch.Generator().manual_seed(i))
                inputs = [*self.inputs[:k], x + direction, *self.inputs[k + 1 :]]
                for pairs, y, other in zip(rows, results, self._results(inputs)):
                    change = (other != y) | (other.isnan() != y.isnan())
                    for pair in [p for p in pairs if p[0] == b]:
                        rest = change.transpose(0, pair[1])[torch.arange(n) != i]
                        if rest.count_nonzero():
                            pairs.discard(pair)
        return [
            {
                b: a
                for i, (b, a) in enumerate(sorted(pairs))
                if a not in [p[1] for p in sorted(pairs)[:i]]
            }
            for pairs in rows
        ]

    def _jacobians(self, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ranks for each device, of argument k and results with the same rows."""
        x, rows = self.inputs[k], self._rows(k)
        for dims in {tuple(sorted(r)) for r in rows}:
            inner = [d for d in range(x.dim()) if d not in dims]
            count = math.prod(x.shape[d] for d in inner)
            size = sum(need[0].numel() for need in self.need)
            most = min(count, 1024, max(COLUMNS, ELEMENTS // size))
            columns = torch.linspace(0, count - 1, most).round().long()
            changes = []
            for column in columns:
                direction = torch.zeros_like(x)
                flat = direction.permute(*dims, *inner).reshape(-1, count)
                flat[:, column] = 1.0
                shape = [x.shape[d] for d in (*dims, *inner)]
                direction = flat.reshape(shape).permute(
                    [(*dims, *inner).index(d) for d in range(x.dim())]
                )
                changes.append(self._change(k, direction))
            group = [i for i, r in enumerate(rows) if tuple(sorted(r)) == dims]
            matrix = torch.cat(
                [
                    self._by_rows(
                        torch.stack([c[i] for c in changes], -1), [rows[i][b] for b in dims]
                    )
                    for i in group
                ],
                1,
            )  # [rows, elements of results, columns]
            need = torch.cat(
                [
                    self._by_rows(self.need[i].movedim(0, -1), [rows[i][b] for b in dims])
                    for i in group
                ],
                1,
            )
            have = self.have[k].permute(0, *(d + 1 for d in (*dims, *inner)))
            have = have.reshape(len(have), -1, count)[:, :, columns]
            yield self._ranks(matrix, need, have)

    @staticmethod
    def _by_rows(t: Tensor, dims: list[int]) -> Tensor:
        """Return [rows, elements, last], from a result with one more dimension at its end."""
        inner = [d for d in range(t.dim() - 1) if d not in dims]
        count = math.prod(t.shape[d] for d in dims)
        return t.permute(*dims, *inner, t.dim() - 1).reshape(count, -1, t.shape[-1])

    @staticmethod
    def _ranks(matrix: Tensor, need: Tensor, have: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each device the rank of its received numbers, and that of its sent ones."""
        received, sent = [], []
        alone = have & (have.sum(0) == 1)
        for d in range(len(have)):
            received.append(_rank(matrix * need[..., d, None] * ~have[d][:, None]))
            others = need.sum(-1) - need[..., d].long() > 0
            sent.append(_rank(matrix * others[..., None] * alone[d][:, None]))
        return torch.tensor(received).float(), torch.tensor(sent).float()


def _rank(matrix: Tensor) -> int:
    """Return the sum of the ranks of matrices, by the eigenvalues of their squares."""
    nonzero = matrix != 0
    matrix = matrix[nonzero.any(2).any(1)]
    if not len(matrix):
        return 0
    matrix = matrix[:, nonzero.any(2).any(0)][:, :, nonzero.any(1).any(0)]
    matrix = matrix / matrix.norm(dim=(1, 2), keepdim=True)
    square = matrix.mT @ matrix if matrix.shape[1] > matrix.shape[2] else matrix @ matrix.mT
    return int((torch.linalg.eigvalsh(square) > SMALLEST).sum())


def measure(
    name: str, mesh: gspmd.Mesh, function: Callable, inputs: tuple, ins: Any, outs: Any
) -> Bounded:
    """Plan a program, and compute its bound."""
    plan = gspmd.plan(function, *inputs, mesh=mesh, in_specs=ins, out_specs=outs)
    complex_inputs = [t.is_complex() for t in inputs]

    def of_real(*tensors: Tensor) -> list[Tensor]:
        given = [torch.view_as_complex(t) if c else t for t, c in zip(tensors, complex_inputs)]
        results = pytree.tree_leaves(function(*given))
        return [torch.view_as_real(y) if y.is_complex() else y for y in results]

    real = [torch.view_as_real(t) if t.is_complex() else t for t in inputs]

    def masks(tensors: Sequence[Tensor], specs: Sequence[Any]) -> list[Tensor]:
        found = [holders(t.shape[: len(s.dims)], s, mesh) for t, s in zip(tensors, specs)]
        return [
            m.unsqueeze(-1).expand(-1, *t.shape) if m.dim() == t.dim() else m
            for m, t in zip(found, tensors)
        ]

    results = [t.detach() for t in of_real(*real)]
    cut = Cut(of_real, real, masks(real, plan.in_specs), masks(results, plan.out_specs))
    size = min(t.itemsize for t in real if t.is_floating_point())
    return Bounded(name, float(plan.sent_bytes), size * cut.numbers())


def subjects(folder: Path) -> Iterator[tuple]:
    """Yield the arguments of `measure` for every program."""
    sys.path += [str(TREE / "tools"), str(TREE / "benchmarks")]
    tools = importlib.import_module("plan_subjects")
    for p in importlib.import_module("programs.along").ALONG.values():
        yield p.name, p.mesh, p.function, p.inputs, p.in_specs, p.out_specs
    if not folder.exists():
        print(f"no communication suite in {folder}")
        return
    for name, case in tools.suite(folder).items():
        inputs = tuple(tools.importable(folder, "harness").random_inputs(case))
        yield name, case.mesh, case.program, inputs, case.in_specs, case.out_specs


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="beginnings of names")
    parser.add_argument("--cases", type=Path, default=TREE.parent / "shared" / "communication")
    parser.add_argument("--json", type=Path, help="write the rows to a file")
    options = parser.parse_args()
    rows = []
    print(f"{'program':50} {'ours':>10} {'bound':>10} ours/bound")
    for subject in subjects(options.cases):
        if options.only and not subject[0].startswith(tuple(options.only)):
            continue
        rows.append(row := measure(*subject))
        ratio = f"{row.ours / row.bound:.2f}" if row.bound else "-" if row.ours else "1.00"
        print(f"{row.name:50} {row.ours:10.0f} {row.bound:10.0f} {ratio:>10}", flush=True)
    below = [row.name for row in rows if row.ours < row.bound / REACHED - 1]
    print(f"{len(rows)} programs, {sum(row.is_reached for row in rows)} reach the bound", end="")
    print(f", {sum(row.ours <= 2 * row.bound for row in rows)} are within twice of it")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if below:
        sys.exit(f"below the proven bound: {', '.join(below)}")


if __name__ == "__main__":
    main()
