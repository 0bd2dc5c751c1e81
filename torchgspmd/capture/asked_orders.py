"""Questions of a program about the order of a tensor in memory.

    x.stride(), x.is_contiguous(), x.as_strided(...)

A trace has contiguous inputs, whatever the caller's are: no value depends on their order unless the
program asks. If it does, it is traced again with the caller's orders, and a call with other ones
gets a program of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError, user_line
from .state.state_inputs import Retrace, State

_AS_STRIDED = {torch.as_strided: 3, Tensor.as_strided: 3, Tensor.as_strided_: 3}
_ORDER = {
    *_AS_STRIDED,
    *(Tensor.stride, Tensor.is_contiguous, Tensor.dim_order),
    *(Tensor.resize_, Tensor.resize_as_),
}
_PLACE = {Tensor.storage_offset}


# torch's modes, and ours, read strides and offsets of every value that they wrap.
_MODES = ("torch._subclasses", "torch._functorch", "torch._higher_order_ops", "torch.fx")


def _caller() -> str:
    return sys._getframe(3).f_globals.get("__name__", "")


class AskedOrders:
    """The questions of one trace, each with the line that asks first."""

    def __init__(self) -> None:
        self.order = self.place = ""

    def record(self, func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func not in _ORDER and func not in _PLACE:
            return
        # Tracing itself asks, too. No function of torch computes with a place.
        caller = _caller()
        if caller.startswith((*_MODES, "torchgspmd")) or func in _PLACE and caller[:6] == "torch.":
            return
        line = user_line() or "the program"
        self.order = self.order or line
        has_offset = "storage_offset" in kwargs or len(args) > _AS_STRIDED.get(func, len(args))
        if func in _PLACE or has_offset:
            self.place = self.place or line

    def check(self, names: Sequence[str], inputs: Sequence[Tensor], state: State) -> None:
        """Raise Retrace if a trace asked for orders that it did not have.

        Raises:
            ShardingError: It asked for the place of an input in its memory.
        """
        for name, x in zip(names, inputs):
            if self.place and x.device.type != "meta" and x.storage_offset():
                raise ShardingError(
                    f"the program asks for a place in memory, and '{name}' is a part of a tensor",
                    where=self.place,
                    why=f"its first element is number {x.storage_offset()} in memory; a program "
                    "has inputs of their own",
                    fix=f"pass '{name}' as a clone(), or leave storage_offset out",
                )
        if not self.order or state.asks_order:
            return

        if all(x.is_contiguous() for x in inputs):
            state.ask_order(self.order)
        else:
            why = f"it asks for an order in memory at {self.order}"
            raise Retrace(why, partial(state.ask_order, self.order))
