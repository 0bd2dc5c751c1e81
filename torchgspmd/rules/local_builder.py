"""The builder with which a LocalForm's `emit` writes one device's program."""

# pyright: reportReturnType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..layout.halo_window import Window
from .notation import FactorRule


@dataclass
class LocalTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class LocalBuilder(Protocol):
    """Builds one operation's local nodes: fx_passes.localize.Emitter."""

    target: Any  # the operation
    operands: Sequence[Tensor]  # global, without numbers
    rule: FactorRule
    assignment: Mapping[str, tuple[str, ...]]  # factor -> mesh axes that shard it
    results: Sequence[LocalTensor]
    places: Sequence[int] | None  # of these in a tuple, where others may be None

    def size(self, factor: str) -> int:
        """Return the length of a factor's shard."""
        ...

    def known_size(self, factor: str) -> int | None:
        """Return a factor's global size; None if only a run knows it."""

    def index(self, factor: str) -> Any:
        """Return the number of the device's shard: 0, or a value in the program."""

    def start(self, factor: str) -> Any:
        """Return the global position at which the device's shard of a factor begins."""

    def first_row(self, operand: int, dim: int) -> Any:
        """Return the first row that the device holds along an operand's dimension, halo
        included."""

    def global_shape(self, operand: int) -> tuple[Any, ...]: ...

    def position(self, dim: int) -> fx.Node:
        """Return the global position of each local result row, so that it broadcasts."""
        ...

    def sharded(self, factor: str) -> bool: ...

    def window(self, operand: int, dim: int) -> Window:
        """Return the rows that a device holds along an operand's dimension, its halo included."""
        ...

    def narrow(self, value: object, dim: int, start: object, length: int) -> fx.Node:
        """Return `length` contiguous rows of a value, from `start` on."""
        ...

    def masked(self, value: object, dim: int, factor: str, fill: float) -> Any:
        """Return a value with `fill` in a dimension's padding."""

    def shape(self, value: object) -> tuple[int, ...]: ...

    def scalar(self, value: object, dtype: torch.dtype | None = None) -> fx.Node:
        """Return a number as a tensor, by default in the result's dtype."""
        ...

    def call(self, op: object, *args: object, **kwargs: object) -> fx.Node: ...

    def limit(self, index: Any, rows: int) -> None:
        """Note that indices are of a table with so many rows."""

    def note(self, node: fx.Node, shape: tuple[int, ...]) -> None:
        """Note a node's local shape, where it is not that of its first operand."""
