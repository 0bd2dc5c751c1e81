"""Any legal annotation of any program gives the numbers of one device.

Programs of 3 to 10 random operations, forward and backward, with random and contradicting marks on
inputs and values, on random meshes; what lies in padding is poisoned. 50 programs a seed:
TORCHGSPMD_SEEDS=50:1050 tries 20,000 others.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

import torchgspmd as gspmd
from torchgspmd import Mesh

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, b=3)]
SIZES = [1, 2, 3, 4, 5, 6, 8]
SEEDS = range(*map(int, os.environ.get("TORCHGSPMD_SEEDS", "0:50").split(":")))

UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": lambda x: (x.clamp(-2, 2)).exp(),
    "square": torch.square,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "scaled": lambda x: x * 0.5,
    "shifted": lambda x: 1 - x,
}
EDGE = 0.3719  # not 0: sums of normalized rows are 0 up to rounding, on either side of it
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(x > EDGE, x, y),
    "max": torch.maximum,
    "div": lambda x, y: x / (2 + y.square()),
}
REDUCE = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "logsumexp": torch.logsumexp}


@st.composite
def spec(draw, mesh: Mesh, rank: int) -> str:
    """A legal spec; open in some dimensions."""
    axes = list(draw(st.permutations(mesh.names)))
    words = []
    for _ in range(rank):
        kind = draw(st.sampled_from(["_", "?", "axis", "axis", "axes"]))
        count = min({"axis": 1, "axes": 2}.get(kind, 0), len(axes))
        words.append("+".join(axes[:count]) or ("?" if kind == "?" else "_"))
        axes = axes[count:]
    return " ".join(words)


class Program:
    """Steps on a stack of values, drawn while their shapes are followed; called with tensors, it
    runs them.
    """

    def __init__(self, draw, mesh: Mesh):
        self.draw, self.mesh = draw, mesh
        self.steps: list[tuple[str, list[int], object]] = []  # text, operands, function
        rank = draw(st.integers(1, 3))
        self.inputs = [
            tuple(draw(st.sampled_from(SIZES[2:])) for _ in range(rank))
            for _ in range(draw(st.integers(1, 2)))
        ]
        self.values = [torch.empty(shape, device="meta") for shape in self.inputs]
        for _ in range(draw(st.integers(3, 10))):
            self.step()

    def add(self, text: str, operands: list[int], function) -> None:
        self.values.append(function(*(self.values[i] for i in operands)))
        self.steps.append((text, operands, function))

    def step(self) -> None:
        draw = self.draw
        at = draw(st.integers(max(0, len(self.values) - 3), len(self.values) - 1))
        x = self.values[at]
        shape, rank = tuple(x.shape), x.dim()
        kind = draw(
            st.sampled_from(
                [
                    "unary",
                    "binary",
                    "broadcast",
                    "product",
                    "product",
                    "reduce",
                    "softmax",
                    "norm",
                    "view",
                    "permute",
                    "cat",
                    "slice",
                    "embedding",
                    "gather",
                    "mark",
                    "mark",
                    "flip",
                    "cumsum",
                    "pad",
                    "stack",
                ]
            )
        )
        dim = draw(st.integers(0, rank - 1)) if rank else 0
        if kind == "unary" or not rank:
            name = draw(st.sampled_from(sorted(UNARY)))
            self.add(f"{name}(%{at})", [at], UNARY[name])
        elif kind in ("binary", "cat", "stack"):
            others = [i for i, v in enumerate(self.values) if tuple(v.shape) == shape]
            other = draw(st.sampled_from(others))
            if kind == "binary":
                name = draw(st.sampled_from(sorted(BINARY)))
                self.add(f"{name}(%{at}, %{other})", [at, other], BINARY[name])
            elif kind == "stack" and rank < 3:
                self.add(
                    f"stack(%{at}, %{other}, {dim})",
                    [at, other],
                    lambda x, y: torch.stack([x, y], dim),
                )
            elif shape[dim] <= 8:
                self.add(
                    f"cat(%{at}, %{other}, {dim})", [at, other], lambda x, y: torch.cat([x, y], dim)
                )
        elif kind == "broadcast":
            self.add(
                f"add(%{at}, sum(%{at}, {dim}, True))", [at], lambda x: x + x.sum(dim, True) * 0.1
            )
        elif kind == "product":
            n = draw(st.sampled_from(SIZES))
            letters = "abc"[:rank]
            equation = f"{letters},{letters[dim]}z->{letters.replace(letters[dim], 'z')}"
            weight = torch.linspace(-1, 1, shape[dim] * n).reshape(shape[dim], n)
            self.add(
                f"einsum({equation!r}, %{at}, [{shape[dim]}, {n}])",
                [at],
                lambda x: torch.einsum(equation, x, weight.to(x).sin()) / shape[dim],
            )
        elif kind == "reduce":
            name, keep = draw(st.sampled_from(sorted(REDUCE))), draw(st.booleans())
            self.add(f"{name}(%{at}, {dim}, {keep})", [at], lambda x: REDUCE[name](x, dim, keep))
        elif kind == "softmax":
            log = draw(st.booleans())
            self.add(
                f"{'log_' * log}softmax(%{at}, {dim})",
                [at],
                lambda x: x.log_softmax(dim) if log else x.softmax(dim),
            )
        elif kind == "norm":
            self.add(f"layer_norm(%{at})", [at], lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1))
        elif kind == "view":
            options = [
                (x.numel(),),
                *([(-1, *shape[2:])] if rank > 1 else []),
                *([(*shape[:-2], -1)] if rank > 1 else []),
                *(
                    [(*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])]
                    if shape[dim] % 2 == 0 and rank < 3
                    else []
                ),
            ]
            to = draw(st.sampled_from(options))
            self.add(f"reshape(%{at}, {list(to)})", [at], lambda x: x.reshape(to))
        elif kind == "permute":
            order = draw(st.permutations(range(rank)))
            self.add(f"permute(%{at}, {list(order)})", [at], lambda x: x.permute(order))
        elif kind == "slice":
            start = draw(st.integers(0, shape[dim] - 1))
            end = draw(st.integers(start + 1, shape[dim]))
            self.add(
                f"narrow(%{at}, {dim}, {start}, {end - start})",
                [at],
                lambda x: x.narrow(dim, start, end - start),
            )
        elif kind == "embedding":
            if rank == 2:
                count = draw(st.sampled_from(SIZES))
                self.add(
                    f"embedding(arange({count}) % {shape[0]}, %{at})",
                    [at],
                    lambda x: F.embedding(torch.arange(count, device=x.device) % shape[0], x),
                )
        elif kind == "gather":
            self.add(
                f"gather(%{at}, {dim}, argmax(%{at}, {dim}))",
                [at],
                lambda x: x.gather(dim, x.detach().argmax(dim, True)),
            )
        elif kind == "mark":
            text = draw(spec(self.mesh, rank))
            mesh = self.mesh
            self.add(f"mark(%{at}, '{text}')", [at], lambda x: gspmd.mark_sharding(x, mesh, text))
        elif kind == "flip":
            self.add(f"flip(%{at}, {dim})", [at], lambda x: x.flip(dim))
        elif kind == "cumsum":
            self.add(f"cumsum(%{at}, {dim})", [at], lambda x: x.cumsum(dim) * 0.2)
        elif kind == "pad" and shape[dim] < 8:
            self.add(
                f"pad(%{at}, {dim})",
                [at],
                lambda x: F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [1, 2]),
            )

    def __str__(self) -> str:
        lines = [f"%{i} = input{list(shape)}" for i, shape in enumerate(self.inputs)]
        lines += [
            f"%{i} = {text}  # {list(self.values[i].shape)}"
            for i, (text, _, _) in enumerate(self.steps, len(self.inputs))
        ]
        return "\n".join([repr(self.mesh), *lines])

    def __call__(self, *inputs):
        values = list(inputs)
        for _, operands, function in self.steps:
            values.append(function(*(values[i] for i in operands)))
        return values[-1], values[len(values) // 2]


def with_gradients(program: Program):
    def run(*inputs):
        outs = program(*inputs)
        total = sum((out * 0.3).sum() for out in outs if out.requires_grad)
        return outs, torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

    return run


def drawn(data) -> tuple[str, Callable, list[torch.Tensor], dict]:
    """Draw a program; return its text, the function, inputs and the options of `plan`."""
    mesh = data.draw(st.sampled_from(MESHES))
    program = Program(data.draw, mesh)
    specs = tuple(data.draw(st.none() | spec(mesh, len(shape))) for shape in program.inputs)
    outs = tuple(
        data.draw(st.none() | spec(mesh, out.dim()))
        for out in program(*program.values[: len(program.inputs)])
    )
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in program.inputs
    ]
    options = {"mesh": mesh, "in_specs": specs, "out_specs": (outs, None)}
    text = f"{program}\nin_specs={specs} out_specs={outs}"
    return text, with_gradients(program), inputs, options


def for_each(number: int, count: int, run: Callable) -> None:
    """Call `run` with the data of so many draws, which the number determines."""
    options = settings(
        deadline=None,
        max_examples=count,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        database=None,
    )

    def one(data):
        run(data)

    options(seed(number)(given(st.data())(one)))()


def numbers_are_those_of_one_device(data):
    text, run, inputs, options = drawn(data)
    note(text)
    want = run(*inputs)
    plan = gspmd.plan(run, *inputs, **options)
    assert_same(plan.simulate(*inputs, _poison=True), want, terms=1 << 16)


@pytest.mark.parametrize("number", SEEDS)
def test_numbers_are_those_of_one_device(number):
    for_each(number, 20, numbers_are_those_of_one_device)
