"""Linear layers whose units may be divided, as Megatron-LM divides them (arXiv 1909.08053)."""

from __future__ import annotations

from torch import nn

from torchgspmd import mark_sharding


def split(width: int, units: int, name: str) -> nn.Linear:
    """From the stream to units that may be divided."""
    linear = nn.Linear(width, units)
    mark_sharding(linear.weight, f"{name} _")  # [units, m]
    mark_sharding(linear.bias, name)  # [units]
    return linear


def join(units: int, width: int, name: str) -> nn.Linear:
    """And back."""
    linear = nn.Linear(units, width)
    mark_sharding(linear.weight, f"_ {name}")  # [m, units]
    return linear
