"""The builder that the `emit` of a LocalForm writes the program of one device with."""

# pyright: reportReturnType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from ..layout.halo_window import Window
from .notation import FactorRule


@dataclass
class LocalTensor:
    """The local shape, dtype and device of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class LocalBuilder(Protocol):
    """The builder of one operation's local nodes: fx_passes.localize.Emitter."""

    node: fx.Node
    rule: FactorRule
    assignment: Mapping[str, tuple[str, ...]]  # factor -> mesh axes that shard it
    results: Sequence[LocalTensor]

    def size(self, factor: str) -> int:
        """Return the length of a device's shard of a factor."""
        ...

    def index(self, factor: str) -> Any:
        """Return which shard of a factor the device has: 0, or a value of the program."""

    def start(self, factor: str) -> Any:
        """Return the global position of the first row of a device's shard of a factor."""

    def first_row(self, operand: int, dim: int) -> Any:
        """Return the first row of an operand's dimension that the device holds, halo included."""

    def global_shape(self, operand: int) -> tuple[Any, ...]:
        """Return the global shape of an operand."""
        ...

    def position(self, dim: int) -> fx.Node:
        """Return the global position of each local row of the result, so that it broadcasts."""
        ...

    def sharded(self, factor: str) -> bool:
        """Return whether mesh axes shard a factor."""
        ...

    def window(self, operand: int, dim: int) -> Window:
        """Return the rows of an operand's dimension that a device holds, its halo included."""
        ...

    def narrow(self, value: object, dim: int, start: object, length: int) -> fx.Node:
        """Return `length` rows of a value, from `start` on, contiguous."""
        ...

    def masked(self, value: object, dim: int, factor: str, fill: float) -> Any:
        """Return a value with `fill` in the padding of a dimension."""

    def shape(self, value: object) -> tuple[int, ...]:
        """Return the local shape of a value."""
        ...

    def scalar(self, value: object, dtype: torch.dtype | None = None) -> fx.Node:
        """Return a tensor of one number, by default of the result's dtype."""
        ...

    def call(self, op: object, *args: object, **kwargs: object) -> fx.Node:
        """Return a new node that calls an operation."""
        ...
