"""Stacks of matrices, one for each expert, among a program's parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...capture import PARAMETER, Captured, Input
from ...compat.operators import aten
from ...fx_passes.schedule.arithmetic import is_view
from ...rules.custom_ops.nd import split_equation

ours = torch.ops.torchgspmd
GROUPED = (ours.grouped_mm.default, ours.block_mm.default)
EINSUM = ours.einsum.default
COPIES = (
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
)


def expert_stacks(captured: Captured) -> list[Input]:
    """Return the parameters [experts, k, n] whose matrices are multiplied each by its own rows.

    A product may also add up the experts' results. So what stands beside a stack in a module, and
    is as long, is one too.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    pairs = [
        (node, inp)
        for node, inp in zip(placeholders, captured.inputs)
        if inp.kind == PARAMETER and len(inp.shape) == 3
    ]
    places = {_place(inp) for node, inp in pairs if _is_stack(node)}
    return [inp for _, inp in pairs if _place(inp) in places]


def _place(inp: Input) -> tuple[str, int]:
    """Return a parameter's module and its length."""
    return inp.name.rpartition(".")[0], inp.shape[0]


def _is_stack(value: fx.Node) -> bool:
    """Return whether a product has a matrix for each group of rows in a value."""
    return any(
        _is_grouped(user, value) or (user.target in COPIES or is_view(user)) and _is_stack(user)
        for user in value.users
        if user.op == "call_function"
    )


def _is_grouped(product: fx.Node, matrix: fx.Node) -> bool:
    """Return whether a product is one for each matrix in a stack."""
    if product.target is not EINSUM:
        return product.target in GROUPED and product.args[1] is matrix
    equation, first, second = product.args[:3]
    left, right, out = split_equation(str(equation))
    letters: Any = {first: left, second: right}
    own, other = letters[matrix], right if matrix is first else left
    return own[0] in other and own[0] in out
