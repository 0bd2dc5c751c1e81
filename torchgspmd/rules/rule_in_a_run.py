"""Rules for calls with sizes or numbers that only a run knows.

    x[mask] @ w     [u0, 8] @ [8, 4]: `m k, k n -> m n`, where every device needs m whole

Such a call is described twice, with two numbers for each size (capture/stand_in_sizes.py). A rule
that is the same for both holds for all. Factors in dimensions with such a size stay whole, and so
do those with a halo. So do those along which a device would compute by positions, if an argument is
such a number. All others are sharded as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..compat.private_apis import _pytree as pytree
from ..layout.open_sizes import OpenSize, is_whole, open_size
from .notation import Call, FactorRule
from .rewrites import DECLINED, Declined

# Rules are written for sizes that are known, and may divide by others or compare them.
_ERRORS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def rule_in_a_run(
    call: Call, other: Call, lookup: Callable[[Call], FactorRule | Declined]
) -> FactorRule | Declined:
    """Return the call's rule if other numbers give the same. DECLINED: they do not."""
    if _selects(call):
        return DECLINED
    try:
        one, two = lookup(call), lookup(other)
    except _ERRORS:
        return DECLINED
    if isinstance(one, Declined) or isinstance(two, Declined) or not _is_alike(one, two):
        return DECLINED
    sizes = {name: _size(size, two.sizes.get(name, -1)) for name, size in one.sizes.items()}
    dims = [*zip(_dims(call), _dims(other), _factors(one))]
    beside = {f for size, other_size, names in dims if size != other_size for f in names}
    argument = {f for f, n in sizes.items() if isinstance(n, OpenSize) and not is_whole(n)}
    if any(size != other_size and not names for size, other_size, names in dims):
        argument.clear()  # A size may equal another one in a run, and would have no shards.
    windowed = one.windowed - _with_halos_of_any_size(call, one, two)
    whole = {f for f, n in sizes.items() if is_whole(n)} | beside - argument | windowed
    # A local form that computes by positions would need the number while planning.
    if _numbers(call) != _numbers(other):
        whole |= {*one.local.when}
    return replace(one, replicated=one.replicated | whole, sizes=sizes, split=None)


def _with_halos_of_any_size(call: Call, one: FactorRule, two: FactorRule) -> set[str]:
    """Return the factors whose windows are a shard and rows beside it, in every run."""
    # A halo that grows with the size has no width while planning.
    if not one.local.any_size or one.halo != two.halo:
        return set()
    fits, others = set(one.windowed), set[str]()
    for (operand, d), reach in one.halo.items():
        (factor,) = one.operands[operand][d]
        if not reach.fits_any_size or call.tensors[operand].shape[d] != one.sizes[factor]:
            others.add(factor)
    return fits - others


def _size(one: int, two: int) -> int:
    """Return a factor's size, which only a run knows if the calls differ in it."""
    return one if one == two else open_size(one, two)


def _numbers(call: Call) -> list:
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


def _is_alike(one: FactorRule, two: FactorRule) -> bool:
    """Return whether two rules are one sentence, whatever the sizes are."""
    return all(
        getattr(one, name) == getattr(two, name)
        for name in ("operands", "results", "reduce", "replicated", "linear", "moves")
    ) and set(one.row_access) == set(two.row_access)


def _dims(call: Call) -> Iterator[int]:
    """Yield the sizes of a call's tensors, dimension by dimension."""
    for tensor in (*call.tensors, *call.results):
        yield from tensor.shape


def _factors(rule: FactorRule) -> Iterator[tuple[str, ...]]:
    """Yield the factors of a rule's tensors, dimension by dimension."""
    for dims in (*rule.operands, *rule.results):
        yield from dims


def _selects(call: Call) -> bool:
    """Return whether values decide on how many elements a result has."""
    tags = getattr(call.target, "tags", ())
    leaves = pytree.tree_leaves((call.args[1:], dict(call.kwargs)))
    return torch.Tag.dynamic_output_shape in tags and any(
        isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves
    )
