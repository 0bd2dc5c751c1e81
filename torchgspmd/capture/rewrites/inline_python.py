"""The bodies of PyTorch's Python functions, run so that the calls in them are seen one by one.

A function such as F.gumbel_softmax gives itself to an active TorchFunctionMode as one call, and the
mode is off while it handles it: products and attention inside would be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from .embedding_bag import embedding_bag
from .foreach import tensor_by_tensor
from .multihead_attention import multi_head_attention
from .rnn import RECURRENT

REWRITTEN_BODIES: dict[Callable, Callable] = {
    **RECURRENT,
    F.embedding_bag: embedding_bag,
    F.multi_head_attention_forward: multi_head_attention,
}


@cache
def bodies(function: Callable) -> tuple[Callable, ...]:
    """What computes the same by calls that a mode sees, the better first; NotImplemented from one:
    take the next.
    """
    return tuple(
        body
        for body in (
            REWRITTEN_BODIES.get(function),
            tensor_by_tensor(function),
            _copy_without_dispatch(function),
        )
        if body is not None
    )


def _copy_without_dispatch(function: Callable) -> Callable | None:
    """A copy of a function of torch that does not give itself away but runs; None for what is not
    written so in Python.
    """
    if not isinstance(function, FunctionType) or not str(function.__module__).startswith("torch."):
        return None
    asks = {
        name: _no_torch_function
        for name in function.__code__.co_names
        if name.startswith("has_torch_function") and name in function.__globals__
    }
    if (
        not asks or "__class__" in function.__code__.co_freevars
    ):  # super() gives the method that is called as this one
        return None
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **asks},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_torch_function(*tensors: Any) -> bool:
    """In the place of torch.overrides.has_torch_function."""
    return False
