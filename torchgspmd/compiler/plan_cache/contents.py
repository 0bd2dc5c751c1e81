"""Values that a program has read, as text that is equal in processes with equal values.

Guards compare objects and functions by identity (capture/state/guards.py), which another process
does not have. There the content decides: an object's attributes, a function's name and closure, and
the printed form for a class from torch or the standard library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...capture.state.bytecode_names import is_own
from ...capture.state.source import ABSENT, Marker, attributes
from .values import Unshareable

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEP = 12  # limit of nesting


class _Bare:
    """A class whose objects have nothing but attributes."""


def content(value: object, modules: Mapping[int, str], depth: int = 0) -> str:
    """Return a value's content as text.

    modules: the names of the model's modules, and of parameters that may be named, by id.

    Raises:
        Unshareable: It cannot be compared, such as a tensor.
    """

    def of(item: object) -> str:
        return content(item, modules, depth + 1)

    # An Enum may derive from int or str: it is written below, with its class.
    if isinstance(value, (*_PLAIN, *_OF_TORCH)) and not isinstance(value, Enum):
        return repr(value)
    if isinstance(value, Marker):
        return f"<{value}>"
    # Objects that refer to each other in a circle end here, too.
    if depth > _DEEP:
        raise Unshareable("it reads deeply nested values")
    if isinstance(value, (Tensor, np.ndarray)):
        if id(value) in modules:
            return f"parameter {modules[id(value)]}"
        raise Unshareable("it reads a tensor that is neither a parameter nor a buffer")
    if isinstance(value, nn.Module):
        return f"module {modules.get(id(value)) or _other(value)}"
    if isinstance(value, (type, BuiltinFunctionType, ModuleType)):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        )
    if isinstance(value, MethodType):
        return f"{of(value.__func__)} of {of(value.__self__)}"
    if isinstance(value, functools.partial):
        return f"partial({of(value.func)}, {of(value.args)}, {of(value.keywords)})"
    if isinstance(value, FunctionType):
        return _of_function(value, of)
    if isinstance(value, CellType):
        return "<empty>" if value == CellType() else of(value.cell_contents)
    if isinstance(value, dict):
        entries = ", ".join(f"{of(k)}: {of(v)}" for k, v in value.items())
        return f"{type(value).__qualname__}({entries})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__}({', '.join(map(of, value))})"
    if isinstance(value, (set, frozenset)):
        # The order of a set differs between processes, as hashes of strings do.
        return f"{type(value).__qualname__}({', '.join(sorted(map(of, value)))})"
    if isinstance(value, Enum) or not is_own(type(value).__module__):
        return f"{type(value).__qualname__} {without_addresses(repr(value))}"
    return f"{type(value).__module__}.{type(value).__qualname__}({of(_plain_attributes(value))})"


def without_addresses(text: str) -> str:
    """Remove object addresses from a text."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _plain_attributes(value: object) -> dict[str, object]:
    table = {step.name: item for step, item in attributes(value).items() if item is not ABSENT}
    # An extension's object may have content besides its attributes; a Python class adds no bytes.
    if not table and type(value).__basicsize__ != _Bare.__basicsize__:
        raise Unshareable(f"it reads a {type(value).__qualname__}, whose content is unknown")
    return table


def _of_function(function: FunctionType, of: Any) -> str:
    code = function.__code__
    # The first line tells apart functions with one name, as lambdas have.
    name = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
    rest = (function.__closure__, function.__defaults__, function.__kwdefaults__)
    return name if not any(rest) else f"{name}{of(tuple(each or () for each in rest))}"


def _other(value: object) -> str:
    raise Unshareable(f"it reads a {type(value).__qualname__} that is no module of the model")
