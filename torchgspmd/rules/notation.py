"""Rule: how the dimensions of an operation correspond, as a sentence.

    "m k, k n -> m n"           commas separate tensors; equal names are the same factor
    "... d -> ... d"            `...` stands for any leading dimensions
    "(h d) -> h d"              a dimension of several factors, the first one major
    "n 1 -> n"                  a dimension that carries no factor

Keywords say what a factor needs that cannot simply pass through; see Rule. A position of a
convolution's result reads several rows of its input. Then the input's dimension has a Reach in
`halo`: `n c h[2p-1:2p+2] -> n c h`. The idea is Shardy's op sharding rule. One sentence serves
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
    """The dimensions of all operands and results of one call, as factors.

    "m k, k n -> m n" for shapes [4, 8], [8, 2]: operands ((m,), (k,)), ((k,), (n,)) and sizes
    {m: 4, k: 8, n: 2}.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    # Factor -> reduction. Each shard holds a term of it: "sum" for the k of a matrix product.
    reduce: Mapping[str, str] = field(default_factory=dict)
    # Factors that every device needs whole.
    whole: frozenset[str] = frozenset()
    # Groups of operands in which the operation is linear. A pending sum passes through a group.
    linear: tuple[frozenset[int], ...] = ()
    # (args, kwargs, Shapes) -> (args, kwargs) for local shapes.
    local: Callable | None = None
    # (LocalBuilder, args, kwargs) -> results. It is called if a factor of `special` or `emits` is
    # sharded, or one with a halo. For a reduced factor of `special` it masks padding itself.
    emit: Callable | None = None
    special: frozenset[str] = frozenset()
    emits: frozenset[str] = frozenset()
    # (operand, dim) -> the rows that a position of its factor reads.
    halo: Mapping[tuple[int, int], Reach] = field(default_factory=dict)
    # (operand, dim) -> Reach, if the operation only moves rows along its dimensions d0, d1, ...
    # Sizes of 1 are included. With it, windows of operands give windows of the result.
    moves: Mapping[tuple[int, int], Reach] | None = None
    # Operands that hold indices. Their padding must hold a valid index.
    positions: frozenset[int] = frozenset()
    # Operand -> the value that its padding must hold, along any factor.
    padding: Mapping[int, float] = field(default_factory=dict)
    # Whether the number of multiplications is the product of all factor sizes.
    contraction: bool = False
    # Whether a decomposition exists for shards of the `whole` factors, or of those with a halo.
    splits: bool = False
    # The result that has another format if the operation is decomposed (max-pool indices).
    hands: int | None = None
    # The operand that must have that format if the operation is decomposed.
    takes: int | None = None
    # False: the operation has no rule, so it runs replicated.
    known: bool = True
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def factors(self) -> list[str]:
        return list(self.sizes)

    def fill(self, factor: str) -> float | None:
        """Return what padding along a factor must hold in the operands; None: anything."""
        return (
            IDENTITY[self.reduce[factor]]
            if factor in self.reduce and factor not in self.special
            else None
        )

    @cached_property
    def joins(self) -> bool:
        """Whether a pending sum passes through several operands only together (an addition)."""
        return any(len(group) > 1 for group in self.linear)

    @cached_property
    def windowed(self) -> frozenset[str]:
        """The factors with a halo in some operand."""
        return frozenset(f for operand, dim in self.halo for f in self.operands[operand][dim])


@dataclass(frozen=True)
class Shapes:
    """The local shapes of the tensor operands and results of one operation."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operation. Its arguments have fake tensors in place of nodes."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    dynamic: bool = False  # some sizes are symbolic; they are 1 here

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
        """Parse "m k, k n -> m n", or raise ValueError."""
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise ValueError(f"rule '{text}' needs exactly one '->'")
        sides = [
            tuple(_tokens(t, text) for t in side.split(",")) if side.strip() else ()
            for side in (left, right)
        ]
        factors = {
            name
            for tokens in sides[0]
            for name in " ".join(tokens).replace("(", " ").replace(")", " ").split()
        }
        if not factors and sides[0]:
            raise ValueError(f"rule '{text}' names no factor")
        return cls(*sides, text)

    def bind(self, call: Call, sizes: Mapping[str, int] | None = None, **keywords: Any) -> Rule:
        """Return the rule of a call. sizes: of factors that share a dimension with others."""
        bound: dict[str, int] = {}
        operands = tuple(
            _dims(tokens, t.shape, bound, sizes or {})
            for tokens, t in zip(self.operands, call.tensors, strict=True)
        )
        results = tuple(
            _dims(tokens, t.shape, bound, sizes or {})
            for tokens, t in zip(self.results, call.results, strict=True)
        )
        return make_rule(operands, results, bound, text=self.text, **keywords)


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
    """Return a Rule without factors of size 1. Keywords may be names separated by blanks."""
    factors = {name: size for name, size in sizes.items() if size > 1}

    def clean(tensors: Sequence[Dims]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(f for f in dim if f in factors) for dim in dims) for dims in tensors
        )

    reductions = {f: "sum" for f in reduce.split()} if isinstance(reduce, str) else reduce
    operands, results = clean(operands), clean(results)
    halo = {place: reach for place, reach in (halo or {}).items() if operands[place[0]][place[1]]}
    return Rule(
        operands,
        results,
        factors,
        {f: kind for f, kind in reductions.items() if f in factors},
        _names(whole) & set(factors),
        tuple(frozenset(g) for g in linear),
        special=_names(special) & set(factors),
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
    """Return the sentence of these factors."""

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
    """Split "... (h d) k" into ("...", "(h d)", "k"), or raise ValueError."""
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
    tokens: tuple[str, ...],
    shape: Sequence[int],
    bound: dict[str, int],
    declared: Mapping[str, int],
) -> Dims:
    """Return the factors of each dimension. bound: sizes of all factors, completed here."""
    if "..." in tokens:
        at, count = tokens.index("..."), len(shape) - len(tokens) + 1
        tokens = tokens[:at] + tuple(f"_{i}" for i in range(count)) + tokens[at + 1 :]
    if len(tokens) != len(shape):
        raise ValueError(
            f"'{' '.join(tokens)}' describes {len(tokens)} dimensions, "
            f"the tensor has shape {list(shape)}"
        )
    dims = []
    for token, size in zip(tokens, shape):
        names = tuple(name for name in token.strip("()").split() if name != "1")
        for name in names:
            factor = declared.get(name, size if len(names) == 1 else None)
            if factor is None:
                raise ValueError(f"the size of factor '{name}' in '{token}' is not known")
            if len(names) == 1 and factor != size or bound.setdefault(name, factor) != factor:
                raise ValueError(f"factor '{name}' has sizes {bound.get(name)} and {size}")
        dims.append(names)
    return tuple(dims)
