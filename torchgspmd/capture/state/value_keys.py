"""Keys for values that are no tensors in the program: equal values have equal keys.

    3.0                         '3.0'
    np.ones(4096)               (ndarray, (4096,), 'float64', a checksum of its bytes)
    Options(dropout=0.1)        (Options, ..., ('dropout', '0.1'))
    lambda x: x * scale         (the function, its defaults, its closure's contents)

A key is a snapshot: changing the value in place changes its key. A wrapped model's program cache is
looked up by argument keys, and a plan compares them when it is run.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Hashable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from .source import ABSENT, Attribute, attributes, slots_of

_BY_NAME = (type, ModuleType)
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_OF_PYTHON = 1 << 9  # flag on classes that a class statement defines: Py_TPFLAGS_HEAPTYPE
_DEEP = 24  # deepest nesting
_FEW = 8  # an array's numbers in a message
_SHOWN = 60  # a key's characters in a message


def value_key(value: object) -> object:
    """Return a key that equal values share.

    A function, module or tensor is its own key, with its contents, since its address may be reused.
    Attributes that parallelize sets on a module (its forward) lead to whole programs: these library
    objects are their own keys too.
    """
    return _Keys().key_of(value)


class _Keys:
    """Keys for everything that one value reaches; one an object, so that the walk is linear."""

    def __init__(self) -> None:
        self.depth = 0
        self.known: dict[int, tuple[Any, Any]] = {}  # The value too: its id is not used again.

    def key_of(self, value: object) -> Any:
        if isinstance(value, _BY_NAME) or _is_own(value):
            return value
        if type(value) in _PLAIN:
            return repr(value)
        if id(value) in self.known:
            return self.known[id(value)][1]
        if self.depth > _DEEP:
            return "itself"
        # A value that contains itself meets this key.
        self.known[id(value)] = value, "itself"
        self.depth += 1
        key = self._key(value)
        self.depth -= 1
        self.known[id(value)] = value, key
        return key

    def _key(self, value: object) -> object:
        if isinstance(value, Tensor):
            kind = tuple(value.shape), str(value.dtype), value.requires_grad
            return f"a tensor at 0x{id(value):x}", *kind
        if isinstance(value, np.ndarray):
            return self._array_key(value)
        if callable(value) or isinstance(value, CellType):
            return self._callable_key(value)
        if isinstance(value, Mapping):
            return type(value), *((repr(name), self.key_of(v)) for name, v in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), *(self.key_of(v) for v in value)
        if isinstance(value, (set, frozenset)):
            return type(value), *sorted(map(repr, value))  # The order differs between processes.
        table = _attributes(value)
        if not table:
            return repr(value)
        bases = type(value).__mro__[1:-1]
        is_of_python = all(base.__flags__ & _OF_PYTHON for base in bases)
        own = "" if is_of_python else as_text(repr(value))  # what a number or text has besides
        return type(value), own, self.key_of(table)

    def _array_key(self, value: np.ndarray) -> object:
        if value.dtype.hasobject:
            return np.ndarray, value.shape, self.key_of(value.tolist())
        checksum = hashlib.sha256(value.tobytes()).hexdigest()
        shown = str(value.tolist()) if value.size <= _FEW else f"other numbers ({checksum[:8]})"
        return np.ndarray, value.shape, str(value.dtype), shown, checksum

    def _callable_key(self, value: object) -> object:
        """Return a function's or module's key: itself, and its contents."""
        if isinstance(value, CellType):
            return "<empty>" if value == CellType() else self.key_of(value.cell_contents)
        if isinstance(value, MethodType):
            return MethodType, self.key_of(value.__func__), self.key_of(value.__self__)
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            return functools.partial, *(self.key_of(part) for part in parts)
        identity = value if isinstance(value, Hashable) else repr(value)
        held: dict[str, Any] = dict(getattr(value, "__dict__", None) or {})
        if isinstance(value, FunctionType):
            names = zip(value.__code__.co_freevars, value.__closure__ or ())
            held |= {f"closure {name}": cell for name, cell in names}
            defaults = {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}
            held |= {name: each for name, each in defaults.items() if each}
            identity = value if not held else (value, value.__code__)
        return identity if not held else (identity, self.key_of(held))


def _is_own(value: object) -> bool:
    """Return whether a value is a mesh, a wrapped model or the like, but no layer of ours."""
    package, _, folder = type(value).__module__.partition(".")
    is_own = package == __name__.partition(".")[0] and not folder.startswith("model_api")
    return is_own and isinstance(value, Hashable)


def _attributes(value: object) -> dict[str, object]:
    if not hasattr(value, "__dict__") and not slots_of(type(value)):
        return {}
    return {
        step.name: item
        for step, item in attributes(value).items()
        if isinstance(step, Attribute) and item is not ABSENT
    }


def as_text(key: object) -> str:
    """Return a key's text without addresses, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(key))


def difference(now: object, then: object, path: str = "") -> tuple[str, str, str]:
    """Return the first place at which two keys differ, and both as short texts."""
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        if now[:1] == (np.ndarray,) and now[:3] == then[:3]:
            return path, _shown(now[3]), _shown(then[3])
        for i, (one, other) in enumerate(zip(now, then)):
            if one != other:
                is_named = i == 1 and len(now) == 2 and isinstance(now[0], str)
                is_item = i > 0 and now[0] in (list, tuple)
                step = f"[{now[0]}]" if is_named else f"[{i - 1}]" if is_item else ""
                return difference(one, other, path + step)
    return path, _shown(now), _shown(then)


def _shown(key: object) -> str:
    if isinstance(key, tuple) and key[:1] == (np.ndarray,):
        key = f"{key[2]}{list(key[1])}"
    text = as_text(getattr(key, "__qualname__", key))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
