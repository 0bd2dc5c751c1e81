"""Rule: how the dimensions of an operation correspond, as a sentence.

    "m k, k n -> m n"           commas separate tensors; a name is a factor, the same name the same factor
    "... d -> ... d"            `...` stands for any leading dimensions
    "(h d) -> h d"              a dimension of several factors, the first one major
    "n 1 -> n"                  a dimension that carries no factor

Keywords say what a factor needs that cannot simply pass through; see Rule. A dimension whose rows
are not the positions of its factor, but are read by them (a convolution's input), has a Reach in
`halo`: `n c h[2p-1:2p+2] -> n c h`. The idea is Shardy's op sharding rule; one sentence serves
propagation, partition, cost and explanation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ..halo import Reach

Dim = tuple[str, ...]  # factors of one dimension, major first
Dims = tuple[Dim, ...]
IDENTITY = {"sum": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


@dataclass(frozen=True, eq=False)
class Rule:
    """The dimensions of every tensor operand and result of one operation on tensors of given
    shapes, as factors.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(
        default_factory=dict
    )  # factor -> reduction whose terms the shards hold
    whole: frozenset[str] = frozenset()  # factors along which a device needs everything
    linear: tuple[
        frozenset[int], ...
    ] = ()  # operands through which (together) a pending sum passes
    local: Callable | None = None  # (args, kwargs, Shapes) -> (args, kwargs) for local shapes
    emit: Callable | None = (
        None  # (Emitter, args, kwargs) -> results: if a factor is sharded that is one of
    )
    special: frozenset[str] = frozenset()  # `special`, of `emits`, or has a halo
    emits: frozenset[str] = frozenset()
    halo: Mapping[tuple[int, int], Reach] = field(
        default_factory=dict
    )  # (operand, dim): rows that a factor's positions read
    moves: Mapping[tuple[int, int], Reach] | None = (
        None  # if rows are only moved along dimensions d0, d1, ...: whatever their
    )
    # sizes, so that windows of the result can be made of windows of the operands
    positions: frozenset[int] = (
        frozenset()
    )  # operands that hold indices: their padding has to point somewhere
    padding: Mapping[int, float] = field(
        default_factory=dict
    )  # operand -> what its padding has to hold, along any factor
    contraction: bool = False  # arithmetic is the product of all factor sizes
    splits: bool = (
        False  # has a decomposition for shards of the `whole` factors, or of those with a halo
    )
    hands: int | None = None  # a result that has another form if the operation is taken apart
    takes: int | None = (
        None  # an operand that has to have that form if the operation is taken apart
    )
    known: bool = True  # False: nothing is known of the operation, it runs replicated
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def factors(self) -> list[str]:
        return list(self.sizes)

    def fill(self, factor: str) -> float | None:
        """What padding along a factor has to hold in the operands; None if it does not matter."""
        return (
            IDENTITY[self.reduce[factor]]
            if factor in self.reduce and factor not in self.special
            else None
        )

    @cached_property
    def joins(self) -> bool:
        """Whether a pending sum passes through several operands together only, as through an
        addition.
        """
        return any(len(group) > 1 for group in self.linear)

    @cached_property
    def windowed(self) -> frozenset[str]:
        """Factors of which some operand has a window."""
        return frozenset(f for operand, dim in self.halo for f in self.operands[operand][dim])


@dataclass(frozen=True)
class Shapes:
    """Local shapes of the tensor operands and results of one operation."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One operation: its arguments with fake tensors in place of nodes, the tensors among them, and
    its results.
    """

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    dynamic: bool = False  # sizes that are known only when the program runs are 1 here

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in self.tensors]


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence, not yet bound to shapes."""

    operands: tuple[tuple[str, ...], ...]  # tokens of each tensor
    results: tuple[tuple[str, ...], ...]
    text: str = field(compare=False, default="")

    @classmethod
    def parse(cls, text: str) -> Sentence:
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise ValueError(f"rule '{text}' needs exactly one '->'")
        sides = [
            tuple(_tokens(t, text) for t in side.split(",")) if side.strip() else ()
            for side in (left, right)
        ]
        known = {
            name
            for tokens in sides[0]
            for name in " ".join(tokens).replace("(", " ").replace(")", " ").split()
        }
        if not known and sides[0]:
            raise ValueError(f"rule '{text}' names no factor")
        return cls(*sides, text)

    def bind(self, call: Call, sizes: Mapping[str, int] | None = None, **keywords: Any) -> Rule:
        """The rule for tensors of these shapes. sizes: of factors that share a dimension with
        others.
        """
        found: dict[str, int] = {}
        operands = tuple(
            _dims(tokens, t.shape, found, sizes or {})
            for tokens, t in zip(self.operands, call.tensors, strict=True)
        )
        results = tuple(
            _dims(tokens, t.shape, found, sizes or {})
            for tokens, t in zip(self.results, call.results, strict=True)
        )
        return make_rule(operands, results, found, text=self.text, **keywords)


def make_rule(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: Mapping[str, int],
    *,
    reduce: str | Mapping[str, str] = "",
    whole: str | frozenset[str] = "",
    linear: Sequence[Sequence[int]] = (),
    special: str | frozenset[str] = "",
    emits: str = "",
    halo: Mapping[tuple[int, int], Reach] | None = None,
    text: str = "",
    **keywords: Any,
) -> Rule:
    """A Rule from the short forms of its keywords (factor names separated by blanks); factors of
    size 1 are dropped.
    """
    kept = {name: size for name, size in sizes.items() if size > 1}

    def clean(tensors: Sequence[Dims]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(f for f in dim if f in kept) for dim in dims) for dims in tensors)

    reductions = {f: "sum" for f in reduce.split()} if isinstance(reduce, str) else reduce
    operands, results = clean(operands), clean(results)
    halo = {place: reach for place, reach in (halo or {}).items() if operands[place[0]][place[1]]}
    return Rule(
        operands,
        results,
        kept,
        {f: kind for f, kind in reductions.items() if f in kept},
        _names(whole) & set(kept),
        tuple(frozenset(g) for g in linear),
        special=_names(special) & set(kept),
        emits=_names(emits),
        halo=halo,
        text=text or describe(operands, results, halo),
        **keywords,
    )


def describe(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    halo: Mapping[tuple[int, int], Reach] | None = None,
) -> str:
    """The sentence of given factors."""

    def tensor(dims: Dims, reaches: Mapping[int, Reach]) -> str:
        return " ".join(f"{_dim(dim)}{reaches.get(d, '')}" for d, dim in enumerate(dims))

    left = [
        tensor(dims, {d: reach for (operand, d), reach in (halo or {}).items() if operand == i})
        for i, dims in enumerate(operands)
    ]
    return f"{', '.join(left)} -> {', '.join(tensor(dims, {}) for dims in results)}"


def _dim(dim: Dim) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def _names(names: str | frozenset[str]) -> frozenset[str]:
    return frozenset(names.split()) if isinstance(names, str) else frozenset(names)


def _tokens(text: str, sentence: str) -> tuple[str, ...]:
    tokens = tuple(re.findall(r"\.\.\.|\([^()]*\)|[^\s()]+", text))
    if re.search(r"[()]", re.sub(r"\([^()]*\)", "", text)):
        raise ValueError(
            f"'{text.strip()}' in rule '{sentence}' has nested or unpaired parentheses"
        )
    for token in tokens:
        names = token.strip("()").split() if token != "..." else []
        if any(not (name.isidentifier() or name == "1") for name in names):
            raise ValueError(f"'{token}' in rule '{sentence}' is not a factor")
    if tokens.count("...") > 1:
        raise ValueError(f"'{text.strip()}' in rule '{sentence}' has more than one '...'")
    names = [
        name for token in tokens for name in token.strip("()").split() if name not in ("1", "...")
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"'{text.strip()}' in rule '{sentence}' has a factor twice")
    return tokens


def _dims(
    tokens: tuple[str, ...], shape: Sequence[int], found: dict[str, int], given: Mapping[str, int]
) -> Dims:
    if "..." in tokens:
        at, count = tokens.index("..."), len(shape) - len(tokens) + 1
        tokens = tokens[:at] + tuple(f"_{i}" for i in range(count)) + tokens[at + 1 :]
    if len(tokens) != len(shape):
        raise ValueError(
            f"'{' '.join(tokens)}' describes {len(tokens)} dimensions, the tensor has shape {list(shape)}"
        )
    dims = []
    for token, size in zip(tokens, shape):
        names = tuple(name for name in token.strip("()").split() if name != "1")
        for name in names:
            factor = given.get(name, size if len(names) == 1 else None)
            if factor is None:
                raise ValueError(f"the size of factor '{name}' in '{token}' is not known")
            if len(names) == 1 and factor != size or found.setdefault(name, factor) != factor:
                raise ValueError(f"factor '{name}' has sizes {found.get(name)} and {size}")
        dims.append(names)
    return tuple(dims)
