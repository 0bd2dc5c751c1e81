"""Mixtures of experts without dropped tokens, and with few: rows sorted by their experts.

    routed = moe.dispatch(x, chosen, experts=8)             chosen [t, k]: the experts of each token
    hidden = moe.grouped_mm(routed.rows, up, routed.ends)   or torch._grouped_mm
    y = moe.combine(moe.grouped_mm(hidden.relu(), down, routed.ends), routed, weights)

Plain PyTorch, with one meaning on one device and on a mesh. Experts are sharded over n devices;
there are T tokens with width M, k choices a token and b bytes a number. A device sends in the
forward, and again in the backward:

    capacity=None           2 (n-1) T M b           tokens come to all experts, sums are scattered
    shards=n, capacity=c    2 (n-1)/n k T M b c     rows go to their experts and back: all_to_all

The first needs no bound on the rows that come to a device. The second sends less where n > c k; c,
the capacity, is room relative to an even share. Source: the dispatchers in Megatron-LM and
torchtitan, which users call with process groups; groups and capacities in GShard (arXiv
2006.16668).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ShardingError, did_you_mean, user_line
from ..features.experts import op as grouped

OVERFLOW = ("error", "count")


class Dispatched(NamedTuple):
    """Rows sorted by their experts, and the way back.

    rows: [t k, m]; with shards [groups shards, s, m], where a block begins with its experts' rows.
    ends: int32 [groups experts]: the row behind each expert's last row, if there were no gaps.
    dropped: Choices that had no room, as a number without dimensions.
    slots: [t, k]: where each choice's row is, -1 if it was dropped. None for blocks of gathered
        tokens.
    order: [groups shards, s]: the received row that each block row was. For blocks of gathered
        tokens it is each row's choice, -1 if it has none.
    shards: Number of parts into which experts are cut.
    """

    rows: Tensor
    ends: Tensor
    dropped: Tensor
    slots: Tensor | None
    order: Tensor | None
    shards: int


def dispatch(
    x: Tensor,
    expert_index: Tensor,
    experts: int,
    shards: int = 1,
    groups: int = 1,
    capacity: float | None = None,
    overflow: str = "error",
) -> Dispatched:
    """Return a row for each choice a token made, sorted by expert.

    An expert's tokens stay in their order. Neither the result nor the dropped rows depend on the
    mesh; the latter depend on shards and groups. At best `shards` counts the devices along the
    experts' axis, and `groups` those along the tokens' other axes, which come first.

    Args:
        x: Tokens [..., m].
        expert_index: Each token's experts, [..., k].
        experts: How many there are.
        shards: Number of parts into which the experts are cut, in their order. With a capacity, a
            group's tokens are cut into as many.
        groups: Number of groups into which the tokens are cut, each with its own rows.
        capacity: Send rows. Room from one part of the tokens to one part of the experts, relative
            to an even share. None: a group's tokens all come to all its experts.
        overflow: For rows without room: "error" raises, "count" drops them, and `dropped` says how
            many.

    Returns:
        The rows, where each expert's rows end, and the other arguments for `combine`.

    Raises:
        ShardingError: Shapes do not fit, shards do not divide the tokens, or, when it runs, there
            was no room for a row.

    Example:
        >>> x = torch.arange(3.0).unsqueeze(1)
        >>> routed = moe.dispatch(x, torch.tensor([[1, 0], [2, 1], [0, 2]]), experts=4)
        >>> routed.rows.flatten().tolist(), routed.ends.tolist()
        ([0.0, 2.0, 0.0, 1.0, 1.0, 2.0], [2, 4, 6, 6])
    """
    _check(x, expert_index, experts, groups * (1 if capacity is None else shards), overflow)
    chosen = expert_index.flatten(0, -2)
    tokens = x.flatten(0, -2)
    if shards == groups == 1:
        return _sorted(tokens, chosen, experts)
    if capacity is None:
        return _gathered(tokens, chosen, experts, (groups, shards))
    return _sent(tokens, chosen, experts, (groups, shards), capacity, overflow)


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each row by its expert's matrix, and add its expert's bias.

    As torch._grouped_mm, also for every type and width, under autocast, and for the blocks that
    `dispatch(shards=)` makes.

    Args:
        rows: [r, m], or blocks [groups shards, s, m].
        weight: A matrix for each expert, [experts, m, h].
        ends: int32 [groups experts], as from `dispatch`.
        bias: [experts, h].

    Returns:
        [r, h] or [groups shards, s, h]. Rows without an expert are 0.

    Raises:
        ShardingError: There are not as many matrices as ends.

    Example:
        >>> ends = torch.tensor([1, 1, 3], dtype=torch.int32)
        >>> weight = torch.tensor([10.0, 20.0, 30.0]).view(3, 1, 1)
        >>> moe.grouped_mm(torch.ones(4, 1), weight, ends).flatten().tolist()
        [10.0, 30.0, 30.0, 0.0]
    """
    groups, rest = divmod(ends.numel(), max(1, len(weight)))
    if weight.dim() != 3 or rest or rows.dim() != 3 and groups != 1:
        raise ShardingError.here(
            f"weight of shape {list(weight.shape)} does not have a matrix for each of "
            f"{list(ends.shape)} ends",
            fix="pass weight [experts, m, h] and ends [experts]",
        )
    device = rows.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    if bias is not None:
        column, matrix = _biased(rows, bias)
        return grouped_mm(rows, weight, ends) + grouped_mm(column, matrix, ends)
    if rows.dim() == 2:
        return grouped.grouped_mm(rows, weight, ends)
    shards = len(rows) // groups
    width = grouped.groups_of_block(len(weight), shards)
    if missing := shards * width - len(weight):
        weight = pad(weight, [0, 0, 0, 0, 0, missing])
        ends = ends.view(groups, -1)
        ends = torch.cat([ends, ends[:, -1:].expand(-1, missing)], 1).flatten()
    blocks = weight.unflatten(0, (shards, width))
    if groups > 1:
        blocks = blocks.expand(groups, -1, -1, -1, -1).flatten(0, 1)
    return grouped.block_mm(rows, blocks, ends, len(rows))


def _biased(rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return a column of ones, and each expert's bias as a matrix; zeros pad both."""
    # torch's grouped kernel requires rows whose bytes are a multiple of KERNEL_BYTES.
    lanes = grouped.KERNEL_BYTES // rows.element_size()
    ones = (torch.arange(lanes, device=rows.device) == 0).to(rows.dtype)
    column = ones.expand(*rows.shape[:-1], lanes).contiguous()
    return column, pad(bias.unsqueeze(1), [0, 0, 0, lanes - 1])


def combine(rows: Tensor, routed: Dispatched, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rows that each token chose.

    Args:
        rows: The experts' results for `routed.rows`, row by row.
        routed: The result of `dispatch`.
        weights: One for each choice, [..., k].

    Returns:
        [..., h]; a choice that was dropped adds nothing.

    Raises:
        ShardingError: Rows or weights do not fit the dispatched ones.

    Example:
        >>> x, chosen = torch.arange(3.0).unsqueeze(1), torch.tensor([[1, 0], [2, 1], [0, 2]])
        >>> routed = moe.dispatch(x, chosen, experts=4)
        >>> moe.combine(routed.rows, routed, torch.full((3, 2), 0.5)).equal(x)
        True
    """
    if rows.shape[:-1] != routed.rows.shape[:-1] or weights.numel() != _choices(routed):
        raise ShardingError.here(
            f"rows of shape {list(rows.shape)} and weights of shape {list(weights.shape)} do not "
            f"fit {list(routed.rows.shape)} rows of {_choices(routed)} choices",
            fix="pass a row for each row of `dispatch`, and weights of the shape of expert_index",
        )
    shape, weights = weights.shape[:-1], weights.flatten(0, -2)
    if routed.slots is None:
        return _scattered(rows, routed, weights).unflatten(0, shape)
    y = rows[routed.slots] if rows.dim() == 2 else _received(rows, routed, routed.slots)
    y = torch.einsum("tkh,tk->th", y, weights.masked_fill(routed.slots < 0, 0))
    return y.unflatten(0, shape)


def _choices(routed: Dispatched) -> int:
    if routed.slots is not None:
        return routed.slots.numel()
    return routed.rows.shape[0] // routed.shards * routed.rows.shape[1]


def _check(x: Tensor, expert_index: Tensor, experts: int, parts: int, overflow: str) -> None:
    """Raise ShardingError if dispatch's arguments do not fit."""
    if x.shape[:-1] != expert_index.shape[:-1] or x.dim() < 2:
        raise ShardingError.here(
            f"tokens of shape {list(x.shape)} and experts of shape {list(expert_index.shape)} "
            "differ in more than the last dimension",
            fix="pass x [..., m] and expert_index [..., k]",
        )
    if overflow not in OVERFLOW:
        raise ShardingError.here(
            f"dispatch has no overflow '{overflow}'", fix=did_you_mean(overflow, OVERFLOW)
        )
    tokens = math.prod(x.shape[:-1])
    if experts < 1 or parts < 1 or tokens % parts:
        raise ShardingError.here(
            f"{tokens} tokens for {experts} experts cannot be cut into {parts} parts",
            why="each group, and with a capacity each shard of it, has as many tokens",
            fix="choose groups and shards that divide the tokens",
        )


def _sorted(tokens: Tensor, chosen: Tensor, experts: int) -> Dispatched:
    """Dispatch to one part: all rows, sorted by expert."""
    flat = chosen.flatten()
    # Stable: an expert's tokens stay in their order.
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(experts).scatter_add(0, flat, torch.ones_like(flat))
    slots = _inverse(order, 0).view_as(chosen)
    rows = tokens.index_select(0, order // chosen.shape[1])
    ends = counts.cumsum(0, dtype=torch.int32)
    return Dispatched(rows, ends, flat.new_zeros(()), slots, None, 1)


def _inverse(order: Tensor, dim: int) -> Tensor:
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(dim, order, places)


# In comments: n groups, of which each has g parts of tokens and d parts of experts (as many), p
# experts of a part, r choices of the tokens of a part, c places for its rows in each part of the
# experts, s = g c.


def _gathered(tokens: Tensor, chosen: Tensor, experts: int, cut: tuple[int, int]) -> Dispatched:
    """Dispatch in each group: a block begins with its experts' rows; others are behind."""
    (groups, shards), choices = cut, chosen.shape[1]
    flat = chosen.reshape(groups, -1)  # [n, r]
    width = grouped.groups_of_block(experts, shards)
    counts = _counted(flat, shards * width)
    total = counts.unflatten(1, (shards, width)).sum(2)  # [n, d]
    start = total.cumsum(1) - total

    order, length = flat.argsort(dim=1, stable=True), flat.shape[1]
    spots = torch.arange(length, device=flat.device)
    source = (start.unsqueeze(2) + spots).remainder(length).flatten(1)  # [n, d r]
    choice = order.gather(1, source)
    rows = _take(tokens.unflatten(0, (groups, -1)), choice // choices)
    choice = choice.masked_fill((spots >= total.unsqueeze(2)).flatten(1), -1)
    rows, choice = (x.unflatten(1, (shards, -1)).flatten(0, 1) for x in (rows, choice))
    ends = counts[:, :experts].flatten().cumsum(0, dtype=torch.int32)
    return Dispatched(rows, ends, flat.new_zeros(()), None, choice, shards)


def _scattered(rows: Tensor, routed: Dispatched, weights: Tensor) -> Tensor:
    """Return [t, h]: weighted rows, added up for each token."""
    assert routed.order is not None
    groups, choices = len(rows) // routed.shards, weights.shape[1]
    rows, choice = (x.unflatten(0, (groups, -1)).flatten(1, 2) for x in (rows, routed.order))
    none, choice = (choice < 0).unsqueeze(2), choice.clamp(0)  # [n, d r]
    weighted = rows.masked_fill(none, 0) * weights.view(groups, -1).gather(1, choice).unsqueeze(2)
    tokens = (choice // choices).unsqueeze(2).expand_as(rows)
    out = weighted.new_zeros(groups, len(weights) // groups, rows.shape[2])
    return out.scatter_add(1, tokens, weighted).flatten(0, 1)


def _sent(
    tokens: Tensor,
    chosen: Tensor,
    experts: int,
    cut: tuple[int, int],
    capacity: float,
    overflow: str,
) -> Dispatched:
    """Dispatch between parts: choices sorted by expert in each, sent, and sorted again."""
    shards, parts, choices = cut[1], math.prod(cut), chosen.shape[1]
    flat = chosen.reshape(parts, -1)  # [n g, r]
    width = grouped.groups_of_block(experts, shards)
    room = min(flat.shape[1], math.ceil(capacity * flat.shape[1] / shards))
    counts = _counted(flat, shards * width)
    sent = counts.unflatten(1, (shards, width)).cumsum(2)  # [n g, d, p] up to each expert
    if overflow == "error":
        sent = grouped.within(sent, room, user_line())
    total = sent[..., -1]  # [n g, d]
    start = total.cumsum(1) - total
    kept = sent.clamp(max=room)  # [n g, d, p]

    order = flat.argsort(dim=1, stable=True)  # [n g, r]
    block = flat // width
    place = _inverse(order, 1) - start.gather(1, block)  # [n g, r] among those to the same part
    slots = (block * room + place).masked_fill(place >= room, -1)

    spots = torch.arange(room, device=flat.device)
    source = (start.unsqueeze(2) + spots).clamp(max=flat.shape[1] - 1)  # [n g, d, c]
    used = (spots < total.unsqueeze(2)).flatten(1)  # [n g, d c]
    rows = _take(tokens.unflatten(0, (parts, -1)), order.gather(1, source.flatten(1)) // choices)
    received = _exchange(rows.where(used.unsqueeze(2), 0), shards)  # [n d, s, m]

    come = _exchange(kept, shards)  # [n d, g, p]
    expert = (spots >= come.unsqueeze(-1)).sum(2).flatten(1)  # [n d, s] of its part; p: of none
    again = expert.argsort(dim=1, stable=True)
    counted = kept.diff(dim=2, prepend=torch.zeros_like(kept[..., :1]))  # [n g, d, p]
    counted = counted.unflatten(0, cut).sum(1).flatten(1)[:, :experts]  # [n, e]
    ends = counted.flatten().cumsum(0, dtype=torch.int32)
    dropped = (total - kept[..., -1]).sum()
    slots = slots.view_as(chosen)
    return Dispatched(_take(received, again), ends, dropped, slots, again, shards)


def _received(rows: Tensor, routed: Dispatched, slots: Tensor) -> Tensor:
    """Return [t, k, h]: each choice's row, sent back."""
    assert routed.order is not None
    back = _exchange(_take(rows, _inverse(routed.order, 1)), routed.shards)  # [n g, d c, h]
    return _take(back, slots.view(len(rows), -1).clamp(0)).view(*slots.shape, -1)


def _counted(flat: Tensor, experts: int) -> Tensor:
    """Return [n, experts]: how often each is in a row."""
    return flat.new_zeros(len(flat), experts).scatter_add(1, flat, torch.ones_like(flat))


def _exchange(rows: Tensor, shards: int) -> Tensor:
    """Turn [n g, d c, m] into [n d, g c, m], or the other way."""
    split = rows.unflatten(1, (shards, -1)).unflatten(0, (-1, shards))  # [n, g, d, c, m]
    return split.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index.unsqueeze(2).expand(-1, -1, rows.shape[2]))


PUBLIC: tuple[Any, ...] = (combine, dispatch, grouped_mm)
