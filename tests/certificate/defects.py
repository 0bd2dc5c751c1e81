"""Defects that were wrong numbers, each with a change of today's code that puts it back.

A row replaces a part of one function's text, and has a small program that shows the defect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from expert_layer import ChosenExperts, by_bmm
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchgspmd as gspmd
from torchgspmd import Mesh, Plan, ShardingError
from torchgspmd.capture import Captured, draws
from torchgspmd.comm import local_ops
from torchgspmd.compat.operators import aten
from torchgspmd.features.attention import kernels
from torchgspmd.features.unknown_sizes import operands
from torchgspmd.features.windows import adaptive_max_pool, convolution
from torchgspmd.fx_passes import pipeline
from torchgspmd.fx_passes.expand import batched_op, split_products
from torchgspmd.fx_passes.lower import reuse_buffers
from torchgspmd.fx_passes.propagate import factors
from torchgspmd.layout.halo_window import Window
from torchgspmd.rules import algebra_rows, decompositions
from torchgspmd.rules.ops import pointwise, reduction
from torchgspmd.rules.registry import RULES
from torchgspmd.rules.rewrites import REWRITES

from .edits import PutBack, both, edited

Program = Callable[[], Plan]


@dataclass(frozen=True)
class Defect:
    """A defect that `commit` has mended. put_back: changes today's code. program: shows it."""

    commit: str
    text: str
    put_back: PutBack
    program: Program
    # Why no certificate sees it, and whether the numbers of a plan are right.
    unseen: str = ""
    is_right: Callable[[Plan], bool] | None = None


# ------------------------------------------------------------------------------- changes of code


def _dim_of_kthvalue(patch: MonkeyPatch) -> None:
    rule = RULES[aten.median.dim]  # reads argument 1, as the rule of kthvalue did
    patch.setitem(RULES, aten.kthvalue.default, rule)


def _counted_embedding(patch: MonkeyPatch) -> None:
    rule = RULES[aten.embedding_dense_backward.default]
    patch.setitem(
        RULES,
        aten.embedding_dense_backward.default,
        lambda call: replace(rule(call), replicated=frozenset()),
    )


def _local_squeeze(patch: MonkeyPatch) -> None:
    for op in (aten.squeeze.default, aten.squeeze.dim):
        patch.setitem(RULES, op, RULES[aten.squeeze.dims])
        patch.delitem(REWRITES, ("decompose", op))
    patch.delitem(REWRITES, ("decompose", aten.squeeze.dims))


def _plain_product(patch: MonkeyPatch) -> None:
    patch.setattr(Tensor, "conj_physical", lambda x: x)


# ----------------------------------------------------------------------------------- programs


def planned(function: Callable[..., Any], *args: Any, specs: Any, **options: Any) -> Program:
    """Return a program on two devices along `a`."""
    mesh = options.pop("mesh", {"a": 2})
    return lambda: gspmd.plan(function, *args, mesh=Mesh(**mesh), in_specs=specs, **options)


def ramp(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def _addends(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(x, y, y), torch.addcmul(y, x, y)


def _parts_of_square(x: Tensor, b: Tensor) -> list[Tensor]:
    y = torch.einsum("mk,nk->mn", x, x) + b
    return [t.sin() for t in gspmd.mark_sharding(y, Mesh(a=2), "a _").split([4, 4])]


def _looked_up_in_itself(x: Tensor, v: Tensor) -> Tensor:
    y = x + 1
    return y.index_put((y,), v)


class _Between(ChosenExperts):
    """Between products of groups, operations that name dimensions."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        h = by_bmm(x, self.up, chosen)[:, : self.down.shape[2]].softmax(1).cumsum(1).flip(1)
        return by_bmm(h, self.down, chosen)


def _groups() -> Plan:
    model, mesh = _Between(4, 4, 3), Mesh(expert=2)
    gspmd.annotate(model, mesh, {"up": "expert _ _", "down": "expert _ _"})
    x, chosen = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 3])
    often = replace(pipeline.PIPELINE[0], cost=lambda program: -len(program.changed))
    token = pipeline._current.set((often, *pipeline.PIPELINE[1:]))
    try:
        return gspmd.plan(model, x, chosen, mesh=mesh)
    finally:
        pipeline._current.reset(token)


def _dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    y = checkpoint(lambda x: F.dropout(x, 0.5).sin(), x, use_reentrant=False)
    return y, torch.autograd.grad(y.sum(), x)[0]


def _with_steps(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 7, x.shape[0], dtype=torch.int64)[:, None]


def _slope(x: Tensor, w: Tensor) -> Tensor:
    return torch.autograd.grad((x @ w).abs().sum(), x)[0]


# ------------------------------------------------------------------------------- what is right


def _has_one_mask(plan: Plan) -> bool:
    y, grad = plan.simulate(torch.ones(64, requires_grad=True))
    return torch.equal(y == 0, grad == 0)


def _is_mean_of_halves(plan: Plan) -> bool:
    return bool((plan.simulate(HALVES) == 30).all())


def _is_slope(plan: Plan) -> bool:
    return torch.allclose(plan.simulate(*COMPLEX), _slope(*COMPLEX), atol=1e-5)


def _has_even_steps(plan: Plan) -> bool:
    x = torch.zeros(6, 2)
    return torch.equal(plan.simulate(x), _with_steps(x))


def _is_of_new_number(plan: Plan) -> bool:
    try:
        return torch.equal(plan.simulate(torch.ones(4), 3.0), torch.full((4,), 3.0))
    except ShardingError:
        return True


HALVES = torch.full((8192, 2), 30, dtype=torch.float16)
COMPLEX = (
    torch.complex(ramp(4, 3), ramp(4, 3).cos()).requires_grad_(),
    torch.complex(ramp(3, 2).sin(), ramp(3, 2)),
)
QKV = [ramp(2, 2, 8, 16).add(n).sin() for n in range(3)]
DEFECTS = (
    Defect(
        "758b953",
        "the rule of kthvalue takes k for the dimension",
        _dim_of_kthvalue,
        planned(lambda x: x.kthvalue(2, 1).values, ramp(4, 6), specs="_ a"),
    ),
    Defect(
        "758b953",
        "a sum stays pending through a cast to integers, which rounds its terms",
        edited(pointwise.is_linear_cast, "before == after\n", "True or before == after\n"),
        planned(
            lambda x, w: (x @ w * 9).to(torch.int8), ramp(64, 6), ramp(6, 64), specs=("_ a", "a _")
        ),
    ),
    Defect(
        "758b953",
        "the gradient of counted embeddings counts the indices of a shard",
        _counted_embedding,
        planned(
            lambda grad, at: aten.embedding_dense_backward(grad, at, 3, -1, True),
            *(ramp(64, 3), torch.arange(64) % 3),
            specs=("a _", "a"),
        ),
    ),
    Defect(
        "758b953",
        "the minor factor of a reshape is sharded unevenly",
        both(
            edited(
                factors.assemble,
                "if sizes[factor] % count:",
                "if factor != factors[-1] and sizes[factor] % count:",
            ),
            edited(
                factors.project,
                "while rest and left",
                "while rest and factor == factors[-1] or rest and left",
            ),
        ),
        planned(lambda x: x.reshape(-1).sin(), ramp(2, 3), specs=("b a",), mesh={"b": 2, "a": 2}),
    ),
    Defect(
        "d7e881b",
        "a decomposition traced with one tensor twice is taken for two tensors",
        edited(decompositions._Recorder.add_input, "if id(tensor) in self.entries:", "if False:"),
        planned(_addends, ramp(4, 3), ramp(4, 3).cos(), specs=("a _", "a _")),
    ),
    Defect(
        "76a9e5b",
        "squeeze removes a dimension of which a device has one row",
        _local_squeeze,
        planned(lambda x: x.squeeze() * 2, ramp(2, 1, 4), specs="a _ _"),
    ),
    Defect(
        "61ed9f2",
        "a window that leaves rows out is taken for a shard",
        edited(
            Window.is_block, "and self.begin <= 0\n            and self.end >= size", "and True"
        ),
        planned(lambda x: F.pad(x[1:], (0, 0, 1, 0)), ramp(6, 2), specs="a _", out_specs="a _"),
    ),
    Defect(
        "f9894f8",
        "a slice of nothing but padding is joined with the pad",
        edited(algebra_rows._pad_and_slice, "if 0 in val.shape or any(", "if 0 and any("),
        planned(lambda x: F.pad(x, (0, 0, 1, 2), value=3.0)[7:], ramp(5, 4), specs="a _"),
    ),
    Defect(
        "70b2348",
        "indices of adaptive pooling to the size that is there have another shape",
        edited(
            adaptive_max_pool._maximum,
            "local.call(aten.expand.default, index, list(local.results[0].shape))",
            "index",
        ),
        planned(
            lambda x: F.adaptive_max_pool2d(x, (8, 6), return_indices=True)[1],
            ramp(1, 2, 8, 6),
            specs="_ _ a _",
        ),
    ),
    Defect(
        "caf01e5",
        "a convolution whose padding is wider than its window is not cropped",
        edited(
            convolution._transposed_as_plain,
            "x = local.call(aten.constant_pad_nd.default, x, left_out)",
            "pass",
        ),
        planned(
            lambda x, w: F.conv_transpose2d(x, w, padding=(1, 2)),
            *(ramp(1, 2, 8, 9), ramp(2, 2, 3, 2)),
            specs=("_ _ a _", "_ _ _ _"),
        ),
    ),
    Defect(
        "19be6e6",
        "both operands of x @ x.T + b are sliced for a slice of it",
        edited(split_products._passes_parts, "return is_one and", "return"),
        planned(_parts_of_square, ramp(8, 6), ramp(8), specs=("a _", "_")),
    ),
    Defect(
        "f69200f",
        "blocks of groups are given operations that name dimensions",
        edited(
            batched_op._is_elementwise,
            ' and torch.Tag.pointwise in getattr(op.node.target, "tags", ())',
            "",
        ),
        _groups,
    ),
    Defect(
        "074782a",
        "masked padding makes integers of bools",
        edited(local_ops.as_dtype, "return fill > 0", "return int(fill > 0)"),
        planned(lambda x: x.amax(0), torch.ones(5, 3, dtype=torch.bool), specs="a _"),
    ),
    Defect(
        "e0e3b26",
        "attention reads rows that are not in one piece",
        edited(kernels._contiguous_rows, "t if t.stride(-1) == 1 else t.contiguous()", "t"),
        planned(
            lambda q, k, v: F.scaled_dot_product_attention(q.mT, k.mT, v.mT),
            *QKV,
            specs=("a _ _ _",) * 3,
        ),
    ),
    Defect(
        "a0b699f",
        "a result is written over an operand that a list of operands has, too",
        edited(
            reuse_buffers._Memory.is_free,
            "fx.map_arg(others, read.append)",
            "read += [n for n in others if isinstance(n, fx.Node)]",
        ),
        planned(
            _looked_up_in_itself,
            *(torch.tensor([1, 0, 0, 2]), torch.tensor([0, 0, 1, 2])),
            specs=("_", "_"),
        ),
    ),
    Defect(
        "177c313",
        "a checkpoint draws another mask when it computes again",
        edited(
            draws.number_draws, "(seed, node.target, position), len", "(seed, call, position), len"
        ),
        planned(_dropped, torch.ones(64, requires_grad=True), specs=("a",)),
        "the captured program draws twice, too",
        _has_one_mask,
    ),
    Defect(
        "8ab4ea3",
        "gradients of complex products take no conjugate",
        _plain_product,
        planned(_slope, *COMPLEX, specs=("a _", "_ _")),
        "the captured program has this gradient",
        _is_slope,
    ),
    Defect(
        "1d83423",
        "means of float16 are summed in float16",
        edited(reduction.accumulation_dtype, "return torch.float32 if", "return dtype if"),
        planned(lambda x: x.mean(0), HALVES, specs=("a _",)),
        "its trials compute in 64 bits, where no sum overflows",
        _is_mean_of_halves,
    ),
    Defect(
        "4a790fe",
        "linspace of whole numbers rounds its steps, not its values",
        edited(
            operands._linspace,
            "(end - start) / torch.sym_max(steps - 1, 1)",
            "(end - start) // torch.sym_max(steps - 1, 1)",
        ),
        planned(_with_steps, torch.zeros(8, 2), specs=("a _",), dynamic={"x": {0}}),
        "the captured program computes so",
        _has_even_steps,
    ),
    Defect(
        "08b43ce",
        "simulate gives the result of the number of the plan, whatever is passed",
        lambda patch: patch.setattr(Captured, "check_unchanged", lambda self, leaves: None),
        planned(lambda x, n: x * n, torch.ones(4), 2.0, specs=("a", None)),
        "the program is right for its number",
        _is_of_new_number,
    ),
)
