"""Inline PyTorch's Python functions, so that a mode sees the calls in them.

F.gumbel_softmax, for example, passes itself to an active TorchFunctionMode as one call. The mode is
off while it handles the call, and would miss products and attention inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType

from ...rules.rewrites import rewrite_of
from . import embedding_bag  # noqa: F401 (it registers bodies)
from .foreach import tensor_by_tensor


def bodies(function: Callable) -> tuple[Callable, ...]:
    """Return functions that compute the same by calls that a mode sees, the better first.

    One that declines is followed by the next.
    """
    row = rewrite_of("body", function)
    return _copies(function) if row is None else (row, *_copies(function))


@cache
def _copies(function: Callable) -> tuple[Callable, ...]:
    copies = tensor_by_tensor(function), _copy_without_dispatch(function)
    return tuple(copy for copy in copies if copy is not None)


def _copy_without_dispatch(function: Callable) -> Callable | None:
    """Return a copy of torch's Python function that runs instead of dispatching to a mode.

    Return None for other functions.
    """
    if not isinstance(function, FunctionType) or not str(function.__module__).startswith("torch."):
        return None
    overrides = {
        name: _no_torch_function
        for name in function.__code__.co_names
        if name.startswith("has_torch_function") and name in function.__globals__
    }
    # A copy of a method with super() would not be the method that super() looks up.
    if not overrides or "__class__" in function.__code__.co_freevars:
        return None
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **overrides},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_torch_function(*tensors: object) -> bool:
    """Return False; stands for torch.overrides.has_torch_function."""
    return False
