"""Numbers of Python that differ by iteration, as a tensor with one for each.

for t, x in enumerate(xs, 1):        %m = div(%x, 1.0);  %m_1 = div(%x_1, 2.0);  ...
    mean = mean + (x - mean) / t     %m = div(%x, %number)      rows of %number: 1.0, 2.0, ...
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ...fx_passes.ir import Op, operands_of, signature

Number = int | float
_KINDS = ("Tensor", "number", "Optional[number]")  # types of a number's place in a schema


def loose_key(op: Op) -> Hashable:
    """Return a key that is equal for the same operation with other numbers."""
    if not (places := number_places(op)):
        return op.key
    node, args = op.node, op.node.args
    rest = [arg for i, arg in enumerate(args) if i not in places and not isinstance(arg, fx.Node)]
    shown, kwargs = repr(rest), repr(node.kwargs)
    return (node.target, places, shown, kwargs, *signature(node)[2:])


def number_places(op: Op) -> tuple[int, ...]:
    """Return the places of numbers that may be tensors. The result is as exact with them."""
    node, val = op.node, op.node.meta["val"]
    if not isinstance(node.target, OpOverload) or not isinstance(val, Tensor):
        return ()
    kinds = [str(a.type) for a in node.target._schema.arguments]
    places = tuple(
        i
        for i, (arg, kind) in enumerate(zip(node.args, kinds))
        if type(arg) in (int, float) and kind in _KINDS
    )
    # Numbers beside tensors of half precision are computed with in single precision.
    if not places or not op.operands or _dtype(op).itemsize < 4:
        return ()
    return places if _tensor_overload(node.target, places) else ()


def numbers_of(op: Op) -> tuple[Number, ...]:
    """Return the numbers in these places."""
    return tuple(cast(Number, op.node.args[i]) for i in number_places(op))


def with_tensors(op: Op, numbers: Sequence[fx.Node]) -> tuple[Any, tuple]:
    """Return the overload and arguments with tensors in the numbers' places."""
    places, operands = number_places(op), dict(zip(operands_of(op.node), op.operands))
    args = fx.map_arg(op.node.args, lambda v: operands.get(v, v))
    new = dict(zip(places, numbers))
    if op.node.target is aten.rsub.Scalar and len(args) == 2:
        return aten.sub.Tensor, (numbers[0], args[0])
    return _tensor_overload(op.node.target, places), tuple(
        new.get(i, arg) for i, arg in enumerate(cast(tuple, args))
    )


def row_of(op: Op, numbers: Sequence[Number], x: Tensor) -> Tensor:
    """Return a tensor of one number for each iteration. x: has its device."""
    return torch.stack([torch.full((), n, dtype=_dtype(op), device=x.device) for n in numbers])


def _dtype(op: Op) -> torch.dtype:
    """Return the dtype that an operation computes in."""
    dtype = op.node.meta["val"].dtype
    if dtype is not torch.bool:
        return dtype
    number = next(arg for arg in op.node.args if type(arg) in (int, float))
    return torch.result_type(op.operands[0].meta["val"], cast(Number, number))


@cache
def _tensor_overload(target: Any, places: tuple[int, ...]) -> Any:
    """Return the overload that takes tensors in numbers' places, or None."""
    own = [(a.name, str(a.type)) for a in target._schema.arguments]
    wanted = [
        (name, kind.replace("number", "Tensor") if i in places else kind)
        for i, (name, kind) in enumerate(own)
    ]
    packet = target.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    return next(
        (op for op in others if [(a.name, str(a.type)) for a in op._schema.arguments] == wanted),
        None,
    )
