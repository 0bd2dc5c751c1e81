"""plan(dynamic=): one program for all sizes has the shapes and numbers of one device at each.

Random functions of 1 to 5 operations on values of up to 4 dimensions, of which 1 or 2 sizes are
open, forward and backward. Tracing takes most of the time: each function is traced once, and
planned with 8 random meshes, layouts and marks, which are 8 programs. Each program runs with sizes
below, at and above the planned one, 2 and 1 among them; padding is poisoned. A refusal is a
ShardingError with a fix, and is counted by its text. `make test` runs the 2,000 programs of 250
functions; `TORCHGSPMD_FUNCTIONS=250:2750 pytest -s tests/test_dynamic_programs.py` 20,000 others.
"""

from __future__ import annotations

import collections
import math
import os
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import fx

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError, ShardSpec
from torchgspmd.capture import Captured, trace
from torchgspmd.capture.assumed_sizes import AssumingShapeEnv
from torchgspmd.compiler.api import compile_plan
from torchgspmd.compiler.plan import Plan
from torchgspmd.layout.mark import mark_sharding_op

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, b=3)]
FIRST, LAST = map(int, os.environ.get("TORCHGSPMD_FUNCTIONS", "0:250").split(":"))
CHUNK, MANY = 10, 8  # functions a test, layouts of each
MARK = mark_sharding_op._opoverload
MOST_ELEMENTS = 3000  # of a value, with the sizes that programs are drawn with
DRAWN = (
    {"n": 7, "m": 5},
    {"n": 11, "m": 13},
    {"n": 2, "m": 3},
)  # what differs between these is open


def numbers(*shape: int) -> torch.Tensor:
    """Fixed numbers that differ in all places."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).cos().reshape(shape)


UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": lambda x: x.clamp(-2, 2).exp(),
    "gelu": F.gelu,
    "square": torch.square,
    "shifted": lambda x: 1 - x,
    "reciprocal": lambda x: 1 / (2 + x.square()),
    "relu": lambda x: (x - 0.3719).relu(),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(x > 0.3719, x, y),
    "maximum": torch.maximum,
    "div": lambda x, y: x / (2 + y.square()),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
}
REDUCE = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "var": lambda x, d, k: x.var([d], correction=0, keepdim=k),
    "var_1": lambda x, d, k: torch.var(x, [d], keepdim=k),
    "std": lambda x, d, k: (x + numbers(x.shape[-1]).to(x)).square().mean(d, k).add(1e-3).sqrt(),
    "norm": lambda x, d, k: torch.linalg.vector_norm(x, dim=d, keepdim=k),
    "max": lambda x, d, k: x.max(d, keepdim=k).values,
    "prod": lambda x, d, k: x.tanh().prod(d, keepdim=k),
    "all but": lambda x, d, k: x.mean([e for e in range(x.dim()) if e != d], keepdim=k),
}
ALONG = {
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "cumsum": lambda x, d: x.cumsum(d) * 0.2,
    "flip": lambda x, d: x.flip(d),
    "normalized": lambda x, d: F.normalize(x, dim=d, eps=1e-3),
    "centered": lambda x, d: x - x.mean(d, keepdim=True),
    "standardized": lambda x, d: (
        (x - x.mean(d, True)) * (x.var([d], correction=0, keepdim=True) + 0.1).rsqrt()
    ),
    "shares": lambda x, d: x.exp() / x.exp().sum(d, keepdim=True),
    "gather": lambda x, d: x.gather(d, x.detach().argmax(d, True)),
    "sorted": lambda x, d: x.sort(d).values,
    "first": lambda x, d: x.narrow(d, 0, 1),
    "last": lambda x, d: x.select(d, -1),
    "but the first": lambda x, d: x.narrow(d, 1, x.shape[d] - 1) if x.shape[d] > 1 else x,
    "doubled": lambda x, d: torch.cat([x, x.flip(d)], d),
    "longer": lambda x, d: torch.cat([x, x.narrow(d, 0, 1)], d),
    "stacked": lambda x, d: torch.stack([x, x * 2], d),
    "apart": lambda x, d: x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:]),
    "padded": lambda x, d: F.pad(x, [0, 0] * (x.dim() - 1 - d) + [1, 2]),
    "positions": lambda x, d: (
        x + torch.arange(x.shape[d]).to(x).view([-1] + [1] * (x.dim() - 1 - d)) * 0.1
    ),
    "rows in reverse": lambda x, d: x.index_select(
        d, x.shape[d] - 1 - torch.arange(x.shape[d], device=x.device)
    ),
    "summed": lambda x, d: x + x.sum(d, True) * 0.1,
    "by its size": lambda x, d: x / x.shape[d],
    "to front": lambda x, d: x.movedim(d, 0),
    "rolled": lambda x, d: x.roll(1, d),
    "diff": lambda x, d: x.diff(dim=d) if x.shape[d] > 1 else x,
    "masked": lambda x, d: x.masked_fill(
        (torch.arange(x.shape[d], device=x.device) % 2 == 0).view([-1] + [1] * (x.dim() - 1 - d)),
        0.5,
    ),
    "one hot": lambda x, d: x * F.one_hot(x.detach().argmax(-1), x.shape[-1]),
}

KNOWN = {  # of dimensions of a known size
    "unbound": lambda x, d: x.unbind(d)[0],
    "halves": lambda x, d: x.chunk(2, d)[0],
    "largest": lambda x, d: x.topk(min(2, x.shape[d]), d).values,
    "turned": lambda x, d: x.select(d, 0),
    "repeated": lambda x, d: x.repeat_interleave(2, d),
}


class Function:
    """Steps on a list of values; called with tensors, it runs them.

    Each is tried with all sizes of DRAWN on meta tensors.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.mesh = rng, rng.choice(MESHES)
        self.names = rng.choice([["n"], ["n"], ["n", "m"]])
        self.inputs = [self.shape(rng.randint(1, 4)) for _ in range(rng.randint(1, 2))]
        self.inputs[0][rng.randrange(len(self.inputs[0]))] = "n"
        if rng.random() < 0.4:  # tokens
            self.inputs.append(self.shape(rng.randint(1, 2)) + ["long"])
        self.steps: list[tuple[str, list[int], object]] = []  # text, operands, function
        self.values = [
            [self.input(shape, sizes).to("meta") for sizes in DRAWN] for shape in self.inputs
        ]
        for _ in range(rng.choice([1, 1, 2, 2, 3, 5])):
            self.step()

    def shape(self, rank: int) -> list:
        """A shape: numbers, and at most two names of sizes."""
        shape = [self.rng.choice([1, 2, 3, 4, 5, 6, 8]) for _ in range(rank)]
        for name in self.names:
            if self.rng.random() < 0.8:
                shape[self.rng.randrange(rank)] = name
        return shape

    def input(self, shape: list, sizes: dict[str, int]) -> torch.Tensor:
        """An input, with these sizes of names."""
        shape = [sizes.get(n, n) for n in shape]
        if shape[-1] == "long":
            return torch.randint(6, shape[:-1])
        return torch.randn(shape, dtype=torch.float64)

    def open(self, at: int) -> list[bool]:
        """Which dimensions of a value are open."""
        return [len(set(sizes)) > 1 for sizes in zip(*(v.shape for v in self.values[at]))]

    def add(self, text: str, operands: list[int], function) -> None:
        """Add a step, if it computes for all sizes, and is not too large."""
        try:
            results = [function(*(self.values[i][k] for i in operands)) for k in range(len(DRAWN))]
        except (RuntimeError, IndexError, ValueError):
            return
        if len({r.dim() for r in results}) == 1 and 0 < results[1].numel() < MOST_ELEMENTS:
            if results[0].dim() <= 4:
                self.values.append(results)
                self.steps.append((text, operands, function))

    def step(self) -> None:
        rng = self.rng
        at = rng.randint(max(0, len(self.values) - 3), len(self.values) - 1)
        x = self.values[at][0]
        if not x.is_floating_point():
            table = numbers(6, rng.choice([2, 3, 4, 8]))
            if rng.random() < 0.3:
                return self.add(f"one_hot(%{at})", [at], lambda t: F.one_hot(t, 6).double())
            return self.add(
                f"embedding({list(table.shape)}, %{at})",
                [at],
                lambda t: F.embedding(t, table.to(t.device)),
            )
        if not x.dim():
            return self.add(f"sin(%{at})", [at], torch.sin)
        dim = rng.randrange(x.dim())
        kind = rng.choice(sorted(KINDS))
        KINDS[kind](self, at, x, dim)

    # ----------------------------------------------------------------------------- kinds of steps

    def unary(self, at, x, dim):
        name = self.rng.choice(sorted(UNARY))
        self.add(f"{name}(%{at})", [at], UNARY[name])

    def binary(self, at, x, dim):
        name = self.rng.choice(sorted(BINARY))
        others = [
            i
            for i, v in enumerate(self.values)
            if [t.shape for t in v] == [t.shape for t in self.values[at]] and v[0].dtype == x.dtype
        ]
        other = self.rng.choice(others)
        self.add(f"{name}(%{at}, %{other})", [at, other], BINARY[name])

    def broadcast(self, at, x, dim):
        """Two values, the smaller one with the same last dimensions, or a reduced one."""
        name = self.rng.choice(sorted(BINARY))
        others = [i for i, v in enumerate(self.values) if v[0].dtype == x.dtype]
        other = self.rng.choice(others)
        rows = self.rng.random() < 0.5
        self.add(
            f"{name}(%{at}, mean of %{other}.T, {rows})",
            [at, other],
            lambda x, y: BINARY[name](x, y.mean(0, True) if rows else y.reshape(-1)[:1]),
        )

    def along(self, at, x, dim):
        table = ALONG if self.open(at)[dim] else ALONG | KNOWN
        name = self.rng.choice(sorted(table))
        self.add(f"{name}(%{at}, {dim})", [at], lambda x: table[name](x, dim))

    def reduce(self, at, x, dim):
        name, keep = self.rng.choice(sorted(REDUCE)), self.rng.random() < 0.5
        self.add(f"{name}(%{at}, {dim}, {keep})", [at], lambda x: REDUCE[name](x, dim, keep))

    def everything(self, at, x, dim):
        name = self.rng.choice(["sum", "mean", "amax", "std", "numel"])
        functions = {
            "sum": torch.sum,
            "mean": torch.mean,
            "amax": torch.amax,
            "std": lambda x: x.square().mean().sqrt(),
            "numel": lambda x: x.sum() / x.numel(),
        }
        self.add(f"x * {name}(%{at})", [at], lambda x: x * functions[name](x))

    def product(self, at, x, dim):
        """A product along a dimension of a known size."""
        if self.open(at)[dim]:
            return
        n = self.rng.choice([1, 2, 3, 4, 6, 8])
        weight, letters = numbers(x.shape[dim], n), "abcd"[: x.dim()]
        equation = f"{letters},{letters[dim]}z->{letters.replace(letters[dim], 'z')}"
        self.add(
            f"einsum({equation!r}, %{at}, {list(weight.shape)})",
            [at],
            lambda x: torch.einsum(equation, x, weight.to(x.device)) / len(weight),
        )

    def linear(self, at, x, dim):
        if self.open(at)[-1]:
            return
        weight, bias = numbers(self.rng.choice([2, 3, 4, 8]), x.shape[-1]), self.rng.random() < 0.5
        self.add(
            f"linear(%{at}, {list(weight.shape)}, {bias})",
            [at],
            lambda x: F.linear(
                x, weight.to(x.device), numbers(len(weight)).to(x.device) if bias else None
            ),
        )

    def contraction(self, at, x, dim):
        """A product of two values along a dimension that may be open, over others that may be."""
        others = [i for i, v in enumerate(self.values) if v[0].dtype == x.dtype and v[0].dim()]
        other = self.rng.choice(others)
        y = self.values[other]
        pairs = [
            (d, e)
            for d in range(x.dim())
            for e in range(y[0].dim())
            if [t.shape[d] for t in self.values[at]] == [t.shape[e] for t in y]
        ]
        if not pairs:
            return
        d, e = self.rng.choice(pairs)
        one, two = "abcd"[: x.dim()], list("efgh"[: y[0].dim()])
        two[e] = one[d]
        rest = one.replace(one[d], "") + "".join(c for c in two if c != one[d])
        equation = f"{one},{''.join(two)}->{rest}"
        if self.rng.random() < 0.3:
            equation += one[d]
        self.add(
            f"einsum({equation!r}, %{at}, %{other})",
            [at, other],
            lambda x, y: torch.einsum(equation, x, y) * 0.1,
        )

    def scores(self, at, x, dim):
        """Products of all rows with each other, perhaps causal."""
        if x.dim() < 2:
            return
        causal = self.rng.random() < 0.5

        def run(x):
            scores = x @ x.transpose(-1, -2)
            if causal:
                rows = scores.shape[-1]
                mask = torch.ones(rows, rows, device=x.device, dtype=torch.bool).tril()
                scores = scores.masked_fill(~mask, -math.inf)
            return scores.softmax(-1) @ x

        self.add(f"scores(%{at}, {causal})", [at], run)

    def attention(self, at, x, dim):
        if x.dim() < 3:
            return
        causal = self.rng.random() < 0.5
        self.add(
            f"attention(%{at}, {causal})",
            [at],
            lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=causal),
        )

    def norm(self, at, x, dim):
        if self.open(at)[-1]:
            return
        name = self.rng.choice(["layer_norm", "rms_norm"])
        if name == "rms_norm":
            return self.add(f"rms_norm(%{at})", [at], lambda x: F.rms_norm(x, x.shape[-1:]))
        self.add(
            f"layer_norm(%{at})",
            [at],
            lambda x: F.layer_norm(x, x.shape[-1:], numbers(x.shape[-1]).to(x), eps=0.1),
        )

    def batch_norm(self, at, x, dim):
        if x.dim() < 2 or self.open(at)[1]:
            return
        self.add(
            f"batch_norm(%{at})",
            [at],
            lambda x: F.batch_norm(x, None, None, training=True, eps=0.1),
        )

    def conv(self, at, x, dim):
        if x.dim() != 3 or self.open(at)[1]:
            return
        weight, padding = (
            numbers(3, x.shape[1], self.rng.choice([1, 2, 3])),
            self.rng.choice([0, 1]),
        )
        self.add(
            f"conv1d(%{at}, {list(weight.shape)}, {padding})",
            [at],
            lambda x: F.conv1d(x, weight.to(x.device), padding=padding),
        )

    def view(self, at, x, dim):
        kind = self.rng.choice(["flat", "first", "last", "split", "merge"])
        split = self.rng.choice([2, 3])
        functions = {
            "flat": lambda x: x.reshape(-1),
            "first": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
            "last": lambda x: x.flatten(-2) if x.dim() > 1 else x,
            "split": lambda x: x.unflatten(dim, (split, -1)),
            "merge": lambda x: x.reshape(x.shape[0], -1),
        }
        self.add(f"view(%{at}, {kind}, {dim}, {split})", [at], functions[kind])

    def heads(self, at, x, dim):
        """Through a view with two dimensions as one, and back."""
        if x.dim() < 2:
            return

        def run(x):
            flat = x.flatten(0, 1)
            return (flat.cos() @ numbers(*flat.shape[1:], *flat.shape[1:]).to(x.device)).view(
                x.shape
            )

        if not self.open(at)[-1] and x.dim() == 3:
            self.add(f"heads(%{at})", [at], run)

    def permute(self, at, x, dim):
        order = self.rng.sample(range(x.dim()), x.dim())
        self.add(f"permute(%{at}, {order})", [at], lambda x: x.permute(order))

    def cut(self, at, x, dim):
        start, end, step = self.rng.choice([0, 1, 2]), self.rng.choice([None, -1]), 1
        if self.rng.random() < 0.3 and not self.open(at)[dim]:
            step = 2
        where = (slice(None),) * dim + (slice(start, end, step),)
        self.add(f"%{at}[{dim}: {start}:{end}:{step}]", [at], lambda x: x[where])

    def cat(self, at, x, dim):
        others = [
            i for i, v in enumerate(self.values) if v[0].dim() == x.dim() and v[0].dtype == x.dtype
        ]
        other = self.rng.choice(others)
        self.add(f"cat(%{at}, %{other}, {dim})", [at, other], lambda x, y: torch.cat([x, y], dim))

    def loss(self, at, x, dim):
        """A cross entropy of the last dimension."""
        if self.open(at)[-1] or x.dim() < 2:
            return
        self.add(
            f"cross_entropy(%{at})",
            [at],
            lambda x: F.cross_entropy(x.flatten(0, -2), x.detach().argmin(-1).flatten()),
        )

    def mark(self, at, x, dim):
        text, mesh = self.spec(at), self.mesh
        self.add(f"mark(%{at}, '{text}')", [at], lambda x: gspmd.mark_sharding(x, mesh, text))

    def spec(self, at: int) -> str:
        """A layout that shards some dimensions, open ones too."""
        return drawn_spec(self.rng, self.mesh, len(self.open(at)))

    # ------------------------------------------------------------------------------- running them

    def __str__(self) -> str:
        lines = [f"%{i} = input{shape}" for i, shape in enumerate(self.inputs)]
        lines += [
            f"%{i} = {text}  # {[list(v.shape) for v in self.values[i][:2]]}"
            for i, (text, _, _) in enumerate(self.steps, len(self.inputs))
        ]
        return "\n".join([repr(self.mesh), *lines])

    def arguments(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        """Inputs with these sizes of names."""
        return [self.input(shape, sizes) for shape in self.inputs]

    def results(self, inputs) -> list[torch.Tensor]:
        values = list(inputs)
        for _, operands, function in self.steps:
            values.append(function(*(values[i] for i in operands)))
        return [values[-1], values[len(values) // 2]]

    def __call__(self, *inputs):
        outs = self.results(inputs)
        leaves = [x for x in inputs if x.requires_grad]
        terms = [(out * 0.3).sum() for out in outs if out.requires_grad]
        if not terms:
            return outs, []
        gradients = torch.autograd.grad(
            sum(terms), leaves, allow_unused=True, materialize_grads=True
        )
        return outs, list(gradients)

    def sizes(self) -> list[dict[str, int]]:
        """The sizes of the plan, then those of runs."""
        rng = self.rng
        planned = {name: rng.randint(3, 9) for name in self.names}
        while len({*planned.values()}) < len(planned):
            planned = {name: rng.randint(3, 9) for name in self.names}
        runs = [
            {name: rng.choice([2, n - 1]) for name, n in planned.items()},
            {name: n + rng.randint(1, 8) for name, n in planned.items()},
        ]
        if rng.random() < 0.2:
            runs.append({name: rng.choice([1, 1, n]) for name, n in planned.items()})
        return [planned, planned, *runs]


KINDS = {
    name: getattr(Function, name)
    for name in (
        "unary binary broadcast along reduce everything product linear contraction scores "
        "attention norm batch_norm conv view heads permute cut cat loss mark"
    ).split()
}
KINDS |= {"along 2": Function.along, "along 3": Function.along, "reduce 2": Function.reduce}
KINDS |= {"product 2": Function.product, "mark 2": Function.mark}


def differentiable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.requires_grad_(t.is_floating_point()) for t in tensors]


def drawn_spec(rng: random.Random, mesh: Mesh, rank: int) -> str:
    """A layout that shards some dimensions of a tensor."""
    axes, words = rng.sample(mesh.names, len(mesh.names)), []
    for _ in range(rank):
        kind = rng.choice(["_", "?", "axis", "axis", "axes"])
        count = min({"axis": 1, "axes": 2}.get(kind, 0), len(axes))
        words.append("+".join(axes[:count]) or ("?" if kind == "?" else "_"))
        axes = axes[count:]
    return " ".join(words)


def replanned(captured: Captured, mesh: Mesh, specs: Any, outs: Any, marks: list[str]) -> Plan:
    """Plan a captured function with other layouts. marks: for each mark of the forward."""
    graph, new = fx.Graph(), {}
    graph.output(graph.graph_copy(captured.graph, new))
    graph.output_node().meta = dict(captured.graph.output_node().meta)
    nodes = graph.find_nodes(op="call_function", target=MARK)
    forward = [node for node in nodes if not node.meta.get("backward")]
    texts = dict(zip(forward, marks)) if len(forward) == len(marks) else {}
    for node in nodes:
        open_spec = " ".join("?" * node.meta["val"].dim())
        spec = ShardSpec.parse(texts.get(node, open_spec))
        node.args = node.args[0], str(mesh), str(spec)
    parsed = [None if s is None else ShardSpec.parse(s) for s in specs]
    return compile_plan(replace(captured, graph=graph), mesh, parsed, out_specs=outs)


class Layouts:
    """A mesh, and layouts of a function's inputs, outputs and marks on it."""

    def __init__(self, program: Function, mesh: Mesh | None, rng: random.Random) -> None:
        program.mesh = self.mesh = mesh or rng.choice(MESHES)
        at = range(len(program.inputs))
        self.specs = tuple(rng.choice([None, program.spec(i), program.spec(i)]) for i in at)
        ends = len(program.values) - 1, len(program.values) // 2
        self.outs = [rng.choice([None, program.spec(i)]) for i in ends], None
        marked = (operands for text, operands, _ in program.steps if text.startswith("mark"))
        self.marks = [program.spec(i) for (i,) in marked]

    def __str__(self) -> str:
        return f"{self.mesh!r} in {self.specs} out {self.outs} marks {self.marks}"

    def plan(self, program: Function, sizes: dict[str, int]) -> Plan:
        """Plan a function as a user does."""
        dynamic = {
            f"arg{i}": {d: n for d, n in enumerate(shape) if n in ("n", "m")}
            for i, shape in enumerate(program.inputs)
        }
        return gspmd.plan(
            program,
            *differentiable(program.arguments(sizes)),
            mesh=self.mesh,
            in_specs=self.specs,
            out_specs=self.outs,
            dynamic=dynamic,
        )

    def plan_captured(self, captured: Captured) -> Plan:
        """Plan a captured function, with other marks."""
        return replanned(captured, self.mesh, self.specs, self.outs, self.marks)


def check(number: int, counts: collections.Counter) -> None:
    """Draw the function of a number, trace it once, plan it with several layouts, run them all."""
    program = Function(rng := random.Random(number))
    planned, *runs = program.sizes()
    torch.manual_seed(number)
    calls = []
    for sizes in runs:
        tensors = differentiable(program.arguments(sizes))
        with suppress(RuntimeError, IndexError, ValueError):  # as of a maximum of no rows
            calls.append((sizes, tensors, program(*tensors)))
    captured, what = None, f"function {number}, planned for {planned}\n{program}"
    counts["functions"] += 1
    for layouts in [Layouts(program, program.mesh if k == 0 else None, rng) for k in range(MANY)]:
        counts["programs"] += 1
        where = f"{what}\n{layouts}"
        try:
            if captured is None:
                plan = layouts.plan(program, planned)
                captured = plan.captured
            else:
                plan = layouts.plan_captured(captured)
        except ShardingError as error:
            assert "fix" in str(error), f"{where}: {error}"
            counts[f"refused: {str(error).partition(chr(10))[0]}"] += 1
            continue
        except Exception as error:
            raise AssertionError(where) from error
        for sizes, tensors, want in calls:
            if 1 in sizes.values() and plan.captured is not captured:
                continue  # a trace of its own, which plans of users make
            try:
                got = plan.simulate(*tensors, _poison=True)
            except ShardingError as error:
                assert "fix" in str(error), f"{where} run with {sizes}: {error}"
                counts[f"refused run: {str(error).partition(chr(10))[0][:60]}"] += 1
                continue
            except Exception as error:
                raise AssertionError(f"{where} run with {sizes}") from error
            assert_same(got, want, f"{where} run with {sizes}", terms=1 << 16)
            counts["runs"] += 1


TOTAL: collections.Counter = collections.Counter()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(FIRST, LAST, CHUNK))
def test_all_sizes_are_those_of_one_device(first, capsys, monkeypatch):
    # A function is traced once for all meshes: numbers in the places of sizes have to divide.
    devices = math.lcm(*(mesh.size for mesh in MESHES))
    monkeypatch.setattr(trace, "AssumingShapeEnv", lambda _: AssumingShapeEnv(devices))
    for number in range(first, min(first + CHUNK, LAST)):
        check(number, TOTAL)
    with capsys.disabled():
        print(f"\nup to now {dict(TOTAL.most_common())}", end=" ")
