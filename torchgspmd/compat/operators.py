"""torch's operators by name; one that this release lacks costs its own rule, and nothing else.

aten.mm.default             the operator, as torch.ops.aten.mm.default
aten.cholesky.default       an AbsentOperator on torch 2.15, which has no such operator. Tables may
                            have it as a key; no graph's node has it as a target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..errors import ShardingError

# An operator raises one of these for operands that it does not take. torch 2.13 asserts, too.
OPERATOR_ERRORS = (
    NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError,
)  # fmt: skip

ABSENT: dict[str, AbsentOperator] = {}  # operators looked up in vain, by name


class AbsentOperator:
    """An operator name that this torch does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Return the name as an OpOverload does: `aten::cholesky`."""
        return self._name

    @property
    def __name__(self) -> NoReturn:
        """Raise as a call does: a graph asks for it to name a node."""
        raise self._error()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise self._error()

    def _error(self) -> ShardingError:
        return ShardingError.here(
            f"torch {torch.__version__} has no operator {self._name}",
            fix="run `python -m torchgspmd doctor`, which lists what is missing in this version "
            "of torch",
        )

    def __repr__(self) -> str:
        return f"<{self._name}, which torch {torch.__version__} lacks>"


class Packet:
    """One operator name's overloads, as attributes."""

    def __init__(self, namespace: str, name: str, packet: Any) -> None:
        self._prefix, self._packet = f"{namespace}::{name}", packet

    def overloads(self) -> list[str]:
        """Return the overloads' names."""
        return [] if self._packet is None else self._packet.overloads()

    def __getattr__(self, overload: str) -> Any:
        op = getattr(self._packet, overload, None)
        if op is None:
            name = self._prefix if overload == "default" else f"{self._prefix}.{overload}"
            # One object per name, so that tables find it as the same key.
            op = ABSENT.setdefault(name, AbsentOperator(name))
        setattr(self, overload, op)  # the next lookup finds the attribute
        return op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.default if self._packet is None else self._packet)(*args, **kwargs)


class Namespace:
    """One namespace's operators, as attributes. Looking up a missing one raises nothing."""

    def __init__(self, name: str) -> None:
        self._name, self._ops = name, getattr(torch.ops, name)

    def __getattr__(self, name: str) -> Packet:
        try:
            packet = getattr(self._ops, name)
        except AttributeError:
            packet = None
        result = Packet(self._name, name, packet)
        setattr(self, name, result)
        return result


def find(namespace: str, name: str, overload: str = "default") -> Any:
    """Return an operator, or None if this torch lacks it."""
    return getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)


def draws(target: object) -> bool:
    """Return whether an operator takes numbers from PyTorch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def custom_op(name: str, **options: Any):  # torch names the type in a private module
    """Return a decorator that registers a function as the operator torchgspmd::name.

    It changes no argument. options: see torch.library.custom_op. That looks for the module of its
    caller among all loaded ones, once for each file: this is the one file.
    """

    def register(function: Callable[..., object]):
        return torch.library.custom_op(f"torchgspmd::{name}", mutates_args=(), **options)(function)

    return register


aten = Namespace("aten")
prims = Namespace("prims")
c10d = Namespace("_c10d_functional")
