"""NumPy and SciPy in forward: arrays of traced tensors, and functions that only the host has.

    y = np.floor(x.detach().numpy())            torch computes it, by torch's own NumPy
    torch.from_numpy(y)                         its tensor
    rows, columns = linear_sum_assignment(c)    SciPy itself, in the run (rules/custom_ops/host.py)

Dynamo traces NumPy in the same way. NumPy's functions ask an array for its own ones, and some that
ask nobody are patched for a trace.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from ...compat import private_apis
from ...compat.patches import Patch
from ...compat.private_apis import FunctionalTensor
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError, innermost_frame_of
from ...rules.custom_ops import host
from ...rules.rewrites import DECLINED, Declined, rewrite
from ..branching_modules import modules_in

_WHY = "NumPy would ask a tensor of the trace for values"


@functools.cache
def _numpy() -> Any:
    """Return torch's NumPy, to whose arrays NumPy's functions hand their calls."""
    module = private_apis._numpy  # imported for the first program that needs it
    module.ndarray.__array_function__ = _call_function
    module.ndarray.__array_ufunc__ = _call_ufunc
    dtypes, scalars = module._dtypes, module._dtypes_impl
    dtypes.dtype = functools.partial(_dtype_of, dtypes.dtype)
    scalars.is_scalar_or_symbolic = functools.partial(_is_weak, scalars.is_scalar_or_symbolic)
    return module


def _dtype_of(before: Callable, dtype: Any) -> Any:
    """Return torch's word for a dtype, which may be NumPy's."""
    is_type = isinstance(dtype, type) and issubclass(dtype, numpy.generic)
    return before(numpy.dtype(dtype).name if is_type or isinstance(dtype, numpy.dtype) else dtype)


def _is_weak(before: Callable, value: object) -> bool:
    """Return whether a number takes an array's dtype: np.float64, a float, does not."""
    return not isinstance(value, numpy.generic) and before(value)


def is_array(value: object) -> bool:
    """Return whether a value is an array of a traced tensor."""
    return type(value).__module__.startswith("torch._numpy.") and hasattr(value, "tensor")


def check_left(value: object, what: str) -> None:
    """Raise ShardingError for an array of a traced tensor. what: where the program leaves it."""
    if is_array(value):
        raise ShardingError.here(
            f"the program {what} a NumPy array of values that only a run knows",
            fix="keep or return torch.from_numpy(array), and call numpy() on it outside",
        )


def package_with_array(error: Exception) -> str | None:
    """Return the package whose function failed, if an array of a traced tensor was passed to it."""
    if (innermost := innermost_frame_of(error)) is None:
        return None
    package = _package_of(innermost.tb_frame)
    models = {type(each).__module__.partition(".")[0] for each in modules_in(error.__traceback__)}
    if package is None or package in models:
        return None
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    values = [[*frame.f_locals.values()] for frame in frames if _package_of(frame) == package]
    return package if any(map(is_array, pytree.tree_leaves(values))) else None


def _package_of(frame: FrameType) -> str | None:
    """Return the installed package that a frame runs."""
    if "-packages" not in frame.f_code.co_filename:
        return None
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@rewrite("value", Tensor.numpy)
def array_of(self: Tensor, *, force: bool = False) -> Any:
    if not isinstance(self, FunctionalTensor):
        return DECLINED
    if self.requires_grad and torch.is_grad_enabled() and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return _numpy().ndarray(self.detach())


def tensor_of(value: Any, dtype: Any = None, device: Any = None) -> Tensor | Declined:
    """Return torch.as_tensor of an array, or of a list with arrays; DECLINED for other values."""
    if not any(map(is_array, pytree.tree_leaves(value))):
        return DECLINED
    return _numpy().array(value).tensor.to(device=device, dtype=dtype)


def _call_function(self: Any, func: Any, types: object, args: tuple, kwargs: dict) -> Any:
    """Run a function of NumPy on arrays, by torch's of the same name."""
    path = func.__module__.split(".")[1:] if func.__module__ else []
    owner = _numpy()
    for part in path:
        owner = getattr(owner, part, owner)
    return _called(getattr(owner, func.__name__, None), func, args, kwargs)


def _call_ufunc(self: Any, func: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    call = getattr(_numpy(), func.__name__, None) if method == "__call__" else None
    if len(out := kwargs.get("out", ())) == 1:  # the protocol has a tuple of them
        kwargs["out"] = out[0]
    return _called(call, func, args, kwargs)


def _called(call: Callable | None, func: Any, args: tuple, kwargs: dict) -> Any:
    if call is None:
        raise ShardingError.here(
            f"forward calls NumPy's {func.__name__} on values that only a run knows",
            why="torch, which computes it in the program, has no such function",
            fix="compute it with torch, or outside and pass it as an argument",
        )
    return call(*map(_converted, args), **{k: _converted(v) for k, v in kwargs.items()})


def _converted(value: Any) -> Any:
    """Return an argument with constants as arrays of torch's NumPy."""

    def leaf(x: Any) -> Any:
        if isinstance(x, numpy.ndarray | numpy.generic):
            return _numpy().ndarray(torch.as_tensor(x))
        return _numpy().ndarray(x.detach()) if isinstance(x, Tensor) else x

    return pytree.tree_map(leaf, value)


def _to_array(before: Callable) -> Callable:
    """Wrap numpy.asarray and the like, which ask no argument for a function of its own."""

    @functools.wraps(before)
    def convert(a: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, FunctionalTensor) or is_array(x) for x in pytree.tree_leaves(a)):
            return before(a, dtype, *args, **kwargs)
        is_copy = before.__name__ == "array" and kwargs.get("copy", True)
        made = (_numpy().array if is_copy else _numpy().asarray)(_converted(a))
        return made if dtype is None else made.astype(dtype)

    return convert


def _from_numpy(before: Callable) -> Callable:
    return lambda array: array.tensor if is_array(array) else before(array)


def _assignment(before: Callable) -> Callable:
    @functools.wraps(before)
    def assign(cost_matrix: Any, maximize: bool = False) -> Any:
        cost = cost_matrix.tensor if is_array(cost_matrix) else cost_matrix
        if not isinstance(cost, FunctionalTensor):
            return before(cost_matrix, maximize)
        pairs = host.linear_sum_assignment(cost.detach(), bool(maximize))
        return tuple(map(_numpy().ndarray, pairs))

    return assign


PATCHES = [
    Patch(torch, "from_numpy", _from_numpy, _WHY),
    *(Patch(numpy, name, _to_array, _WHY) for name in ("array", "asarray", "ascontiguousarray")),
]


def patches() -> Iterator[Patch]:
    """Yield the rows for a trace: also one for each module that names a function of SciPy."""
    yield from PATCHES
    if (package := sys.modules.get("scipy.optimize")) is None:
        return
    function = package.linear_sum_assignment
    for module in _modules_that_name(function, len(sys.modules)):
        yield Patch(module, function.__name__, _assignment, _WHY)


@functools.lru_cache(maxsize=1)
def _modules_that_name(function: Callable, count: int) -> list[ModuleType]:
    """Return the modules that name a function. count: of modules, as more may be imported."""
    name, modules = function.__name__, [*sys.modules.values()]
    return [m for m in modules if getattr(m, "__dict__", {}).get(name) is function]
