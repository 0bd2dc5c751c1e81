"""Calls that differ in sizes only: one program for all sizes, or a warning.

    call 1    tokens [8, 128]              its own program
    call 2    tokens [8, 96]               a program in which the second size is a symbol
    call 3    tokens [8, 200]              the same

A growing cache has another size at every token, and sequences that are not padded have many.
Where the first program has windows, dimensions that it shards have their numbers in each program.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..capture import ARGUMENT, ArgumentSizes
from ..capture.argument_sizes import LEAST
from ..compiler.plan import Plan
from ..errors import user_line, user_line_of

MOST = 16  # the most shapes that a call is compared with
MANY = 4  # so many sizes in one dimension cause a warning; a last batch that is smaller makes two


Shapes = tuple[tuple[int, ...], ...]
Dim = tuple[int, int]  # a tensor, and a dimension of it


class Lengths:
    """The shapes in calls that are alike but for sizes, and which sizes are symbols.

    first: the first call's key, whose program has numbers.
    """

    def __init__(self, shapes: Shapes, first: tuple) -> None:
        self.calls, self.first = [shapes], first
        self.sizes = ArgumentSizes()
        self.is_symbolic = True  # until a program cannot be made so

    def sizes_for(self, shapes: Shapes, free: Callable[[tuple], set[Dim]]) -> ArgumentSizes | None:
        """Return which sizes in a call are symbols; None if it is not one of these calls.

        free: the dimensions that may be symbols in programs like a key's.
        """
        base = self.calls[0]
        if all(self.sizes.fits(i, shape, base[i]) for i, shape in enumerate(shapes)):
            if self.sizes.values(shapes) is not None:
                return self.sizes
        # Sizes that were symbols stay symbols: a program for all calls is the aim.
        changed = {
            (i, d)
            for i, (shape, other) in enumerate(zip(shapes, base))
            for d, (size, before) in enumerate(zip(shape, other))
            if size != before
        } | set(self.sizes.dims)
        if not changed <= free(self.first):
            return None
        if (
            not self.is_symbolic
            # Sizes such as 0 and 1 broadcast, so they get programs of their own.
            or min(call[i][d] for call in (base, shapes) for i, d in changed) < LEAST
        ):
            return ArgumentSizes()
        self.calls.append(shapes)
        self.sizes = _common(self.calls, changed)
        return self.sizes


class SizeHistory:
    """All shapes that a module was called with, by the calls' common part."""

    def __init__(self) -> None:
        self.alike: dict[tuple, list[Lengths]] = {}

    def sizes_for(
        self, shared: tuple, shapes: Shapes, key: tuple, free: Callable[[tuple], set[Dim]]
    ) -> ArgumentSizes:
        """Return which of a call's sizes are symbols in its program.

        shared: the key without sizes. key: a program's key for these sizes.
        """
        known = self.alike.setdefault(shared, [])
        for lengths in known:
            sizes = lengths.sizes_for(shapes, free)
            if sizes is not None:
                return sizes
        # Each call is compared with all of these.
        if len(known) < MOST:
            known.append(Lengths(shapes, key))
        return ArgumentSizes()

    def use_numbers(self, sizes: ArgumentSizes) -> None:
        """Give calls with these sizes one program per number from now on."""
        for lengths in itertools.chain.from_iterable(self.alike.values()):
            if lengths.sizes is sizes:
                lengths.sizes, lengths.is_symbolic = ArgumentSizes(), False


def free_dims(plan: Plan) -> set[Dim]:
    """Return a plan's argument dimensions whose sizes may be symbols in another program.

    Windows fit one number of rows: a program for all would gather them. All ranks have to say the
    same, and a plan that was sent has its values' layouts alone.
    """
    inputs = zip(plan.captured.inputs, plan.input_layouts)
    layouts = [spec for each, spec in inputs if each.kind == ARGUMENT]
    specs = [spec for n in plan.sharded.nodes if (spec := n.meta.get("spec")) is not None]
    has_windows = any(spec.windows for spec in specs)
    return {
        (i, d)
        for i, spec in enumerate(layouts)
        for d, axes in enumerate(spec.dims)
        if not (axes and has_windows)
    }


def _common(calls: Sequence[Shapes], changed: Iterable[Dim]) -> ArgumentSizes:
    """Return the dimensions' sizes: those that have grown alike are one symbol, plus a number."""
    dims: dict[Dim, tuple[str, int]] = {}
    names: dict[tuple[int, ...], tuple[str, int]] = {}
    # The smallest size first, so that others are it plus a number that is not negative.
    for i, d in sorted(changed, key=lambda dim: calls[0][dim[0]][dim[1]]):
        size = calls[0][i][d]
        growth = tuple(call[i][d] - size for call in calls)
        name, least = names.setdefault(growth, (f"n{len(names)}", size))
        dims[i, d] = name, size - least
    return ArgumentSizes(dims)


def kind_of(leaf: Any) -> Any:
    """Return a leaf's key without its sizes."""
    shape = _shape(leaf)
    return leaf if shape is None else (len(shape), *leaf[1:])


def without_sizes(leaf_keys: Sequence[Any], sizes: ArgumentSizes) -> Iterator[object]:
    """Yield the leaves' keys, with names for sizes that are symbols."""
    tensor = 0
    for key in leaf_keys:
        shape = _shape(key)
        if shape is None:
            yield key
            continue
        named = tuple(sizes.dims.get((tensor, d), size) for d, size in enumerate(shape))
        yield named, *key[1:]
        tensor += 1


def warn_of_numbers(error: Exception) -> None:
    """Warn that a program with symbols for sizes cannot be made."""
    where = getattr(error, "where", None) or user_line_of(error) or user_line()
    reason = str(error).partition("\n")[0]
    warnings.warn(
        f"each size has a program of its own, since one for all cannot be made: {where} needs the "
        f"number ({reason})",
        stacklevel=4,
    )


def warn_of_sizes(key: tuple, others: Iterable[tuple], names: Sequence[str]) -> None:
    """Warn if a program is the fourth, eighth, sixteenth ... for calls that differ in sizes only.

    key: the call's, whose second entry has the leaves' keys. names: those of the tensors among the
    leaves.
    """
    alike = [leaves for leaves in (other[1] for other in others if _alike(other, key))]
    # At powers of two, so that a long run prints a few lines.
    if len(alike) < MANY or len(alike) & (len(alike) - 1):
        return
    tensors = [leaf for leaf in zip(*alike) if _shape(leaf[0]) is not None]
    for name, leaves in zip(names, tensors):
        for dim, sizes in enumerate(zip(*map(_shape, leaves))):
            if len(different := sorted(set(sizes))) >= MANY:
                shown = ", ".join(map(str, different[:MANY]))
                warnings.warn(
                    f"{len(alike)} programs have been made for calls that differ in sizes only: "
                    f"dimension {dim} of '{name}' is {shown}{', ...' * (len(different) > MANY)} "
                    f"({user_line()}); pad it to a few sizes, or give a cache a fixed length",
                    stacklevel=4,
                )
                return


def _alike(key: tuple, other: tuple) -> bool:
    if key[0] != other[0] or key[2:] != other[2:] or len(key[1]) != len(other[1]):
        return False
    return all(
        a == b
        or (one := _shape(a)) is not None
        and (two := _shape(b)) is not None
        and len(one) == len(two)
        and a[1:] == b[1:]
        for a, b in zip(key[1], other[1])
    )


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape in a tensor's key; None for any other leaf."""
    is_tensor = isinstance(leaf, tuple) and bool(leaf) and isinstance(leaf[0], tuple)
    return leaf[0] if is_tensor and all(type(n) is int for n in leaf[0]) else None
