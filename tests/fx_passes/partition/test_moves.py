"""The table of moves: for each row a program whose better plan no other move finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import GShardLayer
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan
from torchgspmd.fx_passes.partition.partition_graph import MOVES, Solver


@dataclass(frozen=True)
class Example:
    """A program with its layouts. grad: of how many arguments gradients are taken."""

    function: Callable
    shapes: tuple[tuple[int, ...], ...]
    mesh: Mesh
    in_specs: tuple[str | None, ...]
    out_specs: object = None
    grad: int = 0

    def plan(self) -> Plan:
        inputs = [torch.empty(shape, device="meta") for shape in self.shapes]
        return gspmd.plan(
            self.run, *inputs, mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs
        )

    def run(self, *inputs: Tensor) -> object:
        if not self.grad:
            return self.function(*inputs)
        *inputs, cotangent = inputs
        leaves = [x.detach().requires_grad_() for x in inputs[: self.grad]]
        result = self.function(*leaves, *inputs[self.grad :])
        return torch.autograd.grad(result, leaves, cotangent)


class Experts(Example):
    """GShard's layer with its backward; only the weights of its experts are marked."""

    def plan(self) -> Plan:
        with torch.device("meta"):
            layer, x = GShardLayer(8, 32, 64, 16), torch.empty(*self.shapes[0], requires_grad=True)
        gspmd.annotate(layer, self.mesh, {"up": "expert _ _", "down": "expert _ _"})
        return gspmd.plan(layer, x, mesh=self.mesh, in_specs=self.in_specs, grad=True)


def product_and_sum(x: Tensor, y: Tensor) -> Tensor:
    return x.softmax(1) @ y + y.T


def grouped_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Eight heads of queries on two of keys, whose weights are on every device."""
    queries = torch.einsum("bsm,mnd->bsnd", x, q)
    keys, values = (torch.einsum("bsm,mkd->bskd", x, w).repeat_interleave(4, 2) for w in (k, v))
    weights = torch.einsum("bsnd,btnd->bnst", queries, keys).softmax(-1)
    return torch.einsum("bsnd,ndm->bsm", torch.einsum("bnst,btnd->bsnd", weights, values), out)


def turned_keys(h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    queries = (h @ q).unflatten(-1, (8, 8)).transpose(1, 2)
    keys = (h @ k).unflatten(-1, (1, 8)).transpose(1, 2)
    turned = torch.cat([keys[..., 4:].sin(), keys[..., :4]], -1).squeeze(1)
    return torch.einsum("bnsd,btd->bnst", queries, turned)


def update(x: Tensor, up: Tensor, down: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """A step of momentum with clipped gradients."""
    leaves = [w.detach().requires_grad_() for w in (up, down)]
    loss = F.gelu(x @ leaves[0]).matmul(leaves[1]).square().mean()
    grads = torch.autograd.grad(loss, leaves)
    total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    first = [0.9 * m + g * (1 / total).clamp(max=1) for m, g in zip(states, grads)]
    return *(w - 0.1 * m / (m.abs().sqrt() + 1) for w, m in zip((up, down), first)), *first


UPDATED = ((32, 64), (64, 128), (128, 64), (64, 128), (128, 64))


def tall_layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    normal = x - x.mean(1, keepdim=True)
    hidden = torch.einsum("bth,hm->btm", torch.einsum("btm,mh->bth", normal, up).relu(), down)
    return hidden.sin()


def uses_of_a_sum(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return y * 2, y.mT + 0, y[:8] * 3


def convnext(image: Tensor, stem: Tensor, *weights: Tensor) -> Tensor:
    x = F.conv2d(image, stem, stride=4)
    for kernel, bias, up, down in zip(*[iter(weights)] * 4):
        y = F.conv2d(x, kernel, bias, padding=3, groups=16).permute(0, 2, 3, 1)
        x = x + (F.gelu(F.layer_norm(y, (16,)) @ up) @ down).permute(0, 3, 1, 2)
    return x


CONVNEXT = ((16, 1, 7, 7), (16,), (16, 64), (64, 16))
HEADS = ("data _ _", "_ model _", "_ _ _", "_ _ _", "model _ _")
EXAMPLES = {
    "operation": Example(product_and_sum, ((32, 32),) * 2, Mesh(x=4), ("_ x", "_ _")),
    "sum": Example(
        grouped_attention,
        ((8, 32, 64), (64, 8, 8), (64, 2, 8), (64, 2, 8), (8, 8, 64), (8, 32, 64)),
        Mesh(data=2, model=4),
        (*HEADS, HEADS[0]),
        HEADS,
        grad=5,
    ),
    "chain": Example(
        turned_keys,
        ((16, 32, 64), (64, 64), (64, 8)),
        Mesh(x=2, y=2),
        ("x _ y", "x y", "x y"),
        "x y _ _",
    ),
    "input": Example(update, UPDATED, Mesh(data=4), (None, "data _", "data _", None, None)),
    "body": Example(update, UPDATED, Mesh(data=4), ("data _", "_ _", "_ _", None, None)),
    "thread": Example(
        tall_layer,
        ((16, 16, 32), (32, 256), (256, 32), (16, 16, 32)),
        Mesh(data=4, s=2),
        ("data s _", "_ _", "_ _", "data s _"),
        ("data s _", "_ _", "_ _"),
        grad=3,
    ),
    "early_sum": Example(
        uses_of_a_sum, ((16, 64), (64, 16)), Mesh(x=4), ("_ x", "x _"), ("_ _", "_ _", "_ _")
    ),
    "course": Experts(GShardLayer, ((8, 32, 32),), Mesh(expert=4), (None,)),
    "message": Example(
        convnext,
        ((4, 3, 64, 64), (16, 3, 4, 4), *CONVNEXT, *CONVNEXT),
        Mesh(s=4),
        ("_ _ s _", "_ _ _ _", *("_ _ _ _", "_", "_ _", "_ _") * 2),
    ),
}


PAGE = (Path(__file__).parents[3] / "docs/architecture.md").read_text()


def price(plan: Plan, name: str) -> float:
    """Return what a move saves: messages, or bytes."""
    return sum(c.count for c in plan.collectives) if name == "message" else plan.sent_bytes


@pytest.mark.parametrize("name", [row.move.name for row in MOVES])
def test_no_other_move_finds_the_better_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = price(EXAMPLES[name].plan(), name)
    others = tuple(row for row in MOVES if row.move.name != name)
    monkeypatch.setattr(sys.modules[Solver.__module__], "MOVES", others)
    assert found < price(EXAMPLES[name].plan(), name)


def test_the_table_stands_in_docs() -> None:
    assert len({row.move for row in MOVES}) == len(MOVES) == len(EXAMPLES)
    for row in MOVES:
        assert f"| {row.move.name} | {row.stage} | {row.proposes} | {row.why} |" in PAGE, row
