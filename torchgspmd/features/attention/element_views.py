"""Follow an element of a view to the tensor that it shows.

    %u = unsqueeze(%x, 1)       element (q, 0) of %u is element (q,) of %x
    %t = transpose(%x, 0, 1)    element (q, k) of %t is element (k, q) of %x

An element is a place for each dimension, as expressions.py writes it; None where the size is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...compat.operators import aten

# None: of a dimension of size 1, which has one position.
Coordinate = str | None
ZERO = "aten.scalar_tensor.default(0, dtype=torch.int64)"


def shifted(place: str, start: int, step: int) -> str:
    text = place if step == 1 else f"aten.mul.Scalar({place}, {step})"
    return text if start == 0 else f"aten.add.Scalar({text}, {start})"


Shape = tuple[int, ...]
Places = Sequence[Coordinate]


def _same(shape: Shape, new: Shape, places: Places, *_: object) -> list[Coordinate]:
    return [*places]


def _unsqueezed(shape: Shape, new: Shape, places: Places, dim: int) -> list[Coordinate]:
    rest = [*places]
    del rest[dim % len(new)]
    return rest


def _expanded(shape: Shape, new: Shape, places: Places, *_: object) -> list[Coordinate]:
    return [*places][len(new) - len(shape) :]


def _viewed(shape: Shape, new: Shape, places: Places, *_: object) -> list[Coordinate] | None:
    """Pass dimensions of size 1, and no others."""
    if [n for n in shape if n != 1] != [n for n in new if n != 1]:
        return None
    rest = iter([place for n, place in zip(new, places) if n != 1])
    return [None if n == 1 else next(rest) for n in shape]


def _permuted(shape: Shape, new: Shape, places: Places, dims: Any) -> list[Coordinate]:
    found: list[Coordinate] = [None] * len(shape)
    for place, d in zip(places, dims):
        found[d] = place
    return found


def _transposed(shape: Shape, new: Shape, places: Places, a: int, b: int) -> list[Coordinate]:
    rest = [*places]
    rest[a], rest[b] = rest[b], rest[a]
    return rest


def _turned(shape: Shape, new: Shape, places: Places) -> list[Coordinate]:
    return [*places][::-1]


def _selected(shape: Shape, new: Shape, places: Places, dim: int, i: Any) -> Any:
    if type(i) is not int:
        return None
    rest, d = [*places], dim % len(shape)
    return [*rest[:d], shifted(ZERO, i % shape[d], 1), *rest[d:]]


def _sliced(shape: Shape, new: Shape, places: Places, dim: int = 0, *ends: Any) -> Any:
    if not all(x is None or type(x) is int for x in ends):
        return None
    d = dim % len(shape)
    start, _, step = slice(*ends[:2], *ends[2:3]).indices(shape[d]) if ends else (0, 0, 1)
    rest = [*places]
    rest[d] = shifted(rest[d] or ZERO, start, step)
    return rest


VIEWS: dict[Any, Callable[..., list[Coordinate] | None]] = {
    **dict.fromkeys(
        (aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default),
        _same,
    ),
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
    **dict.fromkeys(
        (
            *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
            *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        ),
        _viewed,
    ),
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: _turned,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
}
