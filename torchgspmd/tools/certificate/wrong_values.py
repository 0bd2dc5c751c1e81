"""A certificate's errors: each is a fault in torchgspmd, and names a value."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor, fx

from ...errors import ShardingError

# A wrong value is never the user's fault, so every error asks for a report.
_REPORT = "report it, with the file that plan.save(path) writes; do not train with this plan"


def other_value(name: str, node: fx.Node | None, claim: str, found: str) -> ShardingError:
    """Return the error for a value that differs. claim: the plan's. found: the numbers."""
    return ShardingError(
        f"'%{name}' is not the value of one device: {found}",
        where=None if node is None else node.meta.get("source"),
        why=f"the plan says that it {claim}",
        fix=_REPORT,
    )


def not_eager(name: str, mine: Tensor, eager: Tensor) -> ShardingError:
    """Return the error for a captured program whose values differ from eager PyTorch's."""
    found = f"the program has the shape {list(mine.shape)}, eager PyTorch {list(eager.shape)}"
    if mine.shape == eager.shape:
        error = (mine.to(eager.dtype) - eager).abs() if eager.dtype != torch.bool else mine ^ eager
        at = numpy.unravel_index(int(error.nan_to_num(torch.inf).argmax()), tuple(eager.shape))
        place = tuple(map(int, at))
        one, other = mine[place].item(), eager[place].item()
        found = f"the program has {one} at {list(place)}, eager PyTorch {other}"
    return ShardingError(
        f"{name} is not what eager PyTorch computes: {found}",
        why="the capture made it so: the plan computes what was captured",
        fix=_REPORT,
    )


def other_dtype(node: fx.Node, dtype: torch.dtype, known: set[torch.dtype]) -> ShardingError:
    """Return the error for a value with another dtype."""
    names = " or ".join(sorted(map(str, known)))
    return ShardingError(
        f"'%{node}' is {dtype}, its value is {names}",
        where=node.meta.get("source"),
        why=f"the plan says that it is %{value_of(node)}",
        fix=_REPORT,
    )


def fails(node: fx.Node, error: Exception, on: str, computed: str) -> ShardingError:
    """Return the error for a node that fails. on: where. computed: by one device all the same."""
    return ShardingError(
        f"'%{node}' fails on {on}: {str(error).partition(chr(10))[0]}",
        where=node.meta.get("source"),
        why=f"one device computes {computed}",
        fix=_REPORT,
    )


def value_of(node: fx.Node) -> str:
    """Return the value that a node claims to be, by its name in the plan or in the program."""
    return str(node.meta.get("value", node.meta.get("captured", node.name)))


def other_rank(node: fx.Node, rank: int, found: str, why: str) -> ShardingError:
    """Return the error of the lowered program of a rank."""
    return ShardingError(
        f"'%{node}' of rank {rank} {found}", where=node.meta.get("source"), why=why, fix=_REPORT
    )
