"""Functions of numbers that are known only when a program runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.operators import aten
from ...errors import ShardingError


def at_least(number: int, low: int, where: str | None) -> int:
    """Return a number, or raise ShardingError if the program was not made for one so small."""
    if number < low:
        raise ShardingError(
            f"a size that depends on values is {number}, and the program was made for {low} and "
            "more",
            where=where,
            why="forward branches on whether it is, and one program is made for all values",
            fix="leave such a batch out, or pad it to more",
        )
    return number


@torch.library.custom_op("torchgspmd::within", mutates_args=())
def within(counts: Tensor, room: int, where: str | None) -> Tensor:
    """Return a copy of counts, or raise ShardingError if one is larger than the room.

    On a GPU nothing is read: the device asserts it.
    """
    if counts.is_cuda:
        aten._assert_async.msg((counts <= room).all(), f"no room for more than {room} rows")
    elif counts.numel() and (largest := int(counts.max())) > room:
        raise ShardingError(
            f"{largest} rows go from one shard of the tokens to one of the experts, which has room "
            f"for {room}",
            where=where,
            why="dispatch has a capacity, and drops nothing in silence",
            fix='a larger capacity, or overflow="count", which drops rows and counts them',
        )
    return counts.clone()


@within.register_fake
def _(counts: Tensor, room: int, where: str | None) -> Tensor:
    return torch.empty_like(counts)
