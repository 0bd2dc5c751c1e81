"""FactorRule: how an operation's dimensions correspond, as a sentence.

    "m k, k n -> m n"           commas separate tensors; equal names are the same factor
    "... d -> ... d"            `...` stands for any leading dimensions
    "(h d) -> h d"              a dimension of several factors, the first one major
    "n 1 -> n"                  a dimension that carries no factor

Keywords describe a factor that cannot simply pass through; see FactorRule. A position in a
convolution's result reads several input rows. Then the input's dimension has a Reach: `n c
h[2p-1:2p+2] -> n c h`. The idea is Shardy's op sharding rule. One sentence serves propagation,
partition, cost and explanation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from ..layout.halo_window import Reach

Dim = tuple[str, ...]  # one dimension's factors, major first
Dims = tuple[Dim, ...]
DimNames = Sequence[str | Sequence[str]]  # Dims, where "d0" stands for ("d0",) and "" for ()
Ints = Sequence[int]  # sizes, strides or places
Names = str | Iterable[str]  # factors; a string has blanks between them
Place = tuple[int, int]  # (operand, dim)
IDENTITY = {"sum": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


@dataclass(frozen=True, eq=False)
class LocalForm:
    """One device's program on its shards, if it is not the same call."""

    # (LocalBuilder, args, kwargs) -> result, or list of results. It is called if a factor of `when`
    # is sharded, or one with a halo.
    emit: Callable[..., Any] | None = None
    when: Names = frozenset()
    # Otherwise: (args, kwargs, Shapes) -> args, kwargs for local shapes.
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    # Operand -> the value that its padding must hold along any factor, such as a valid index.
    fill: Mapping[int, float] = field(default_factory=dict[int, float])
    # Whether `emit` computes by positions along `when`, or along which of these. It then masks
    # padding there itself, and propagation shards such a factor last.
    positional: bool | Names = True
    # Whether `emit` has no number of the rows of a window: of a size that only a run knows, halos
    # are exchanged.
    any_size: bool = False
    # Whether `emit` is called though no factor is sharded.
    always: bool = False


@dataclass(frozen=True)
class Split:
    """A rewrite at level "split" exists for shards along replicated factors, or those with a halo.

    hands: the result that has another format then (max-pool indices). takes: the operand that must
    have that format. merges: the only factor that is split; results for its shards are merged.
    blocks: the factor whose shards the rewrite computes one by one. tried: the rewrite may send
    more than a gather, so the program without it is partitioned too. It is not for operations that
    have another dimension for these axes.
    """

    hands: int | None = None
    takes: int | None = None
    merges: str | None = None
    blocks: str | None = None
    tried: bool = False


@dataclass(frozen=True)
class Instead:
    """A factor whose rows some operands need whole can leave its axes to another factor.

    moved: the bytes that are exchanged then, relative to the operands that are gathered otherwise.
    stays: the factor keeps its axes unless the other sends less, though a gather would send more.
    """

    factor: str
    other: str
    moved: float
    stays: bool = False

    def sent(self, count: int, part: int) -> float:
        """Return the bytes sent, as in `moved`, if `part` of `count` shards are the other's."""
        rest = count // part
        return self.moved * (part - 1) / (part * count) + (rest - 1) / (rest * part)


@dataclass(frozen=True)
class Balance:
    """Later shards have more to do than earlier ones, unless tokens are in another order.

    factors: the tokens' factors; shards along the first one differ in work. flops: operations in
    all shards together. call: from this call's arguments, the order and a node with its starts,
    the operation for tokens in that order and its arguments.
    """

    factors: tuple[str, ...]
    flops: float
    call: Callable[[tuple[Any, ...], Any, Any], tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, eq=False)
class FactorRule:
    """One call's operand and result dimensions, as factors.

    "m k, k n -> m n" for shapes [4, 8], [8, 2]: operands ((m,), (k,)), ((k,), (n,)) and sizes
    {m: 4, k: 8, n: 2}.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    # Factor -> reduction. Each shard holds a term of it: "sum" for the k of a matrix product.
    reduce: Mapping[str, str] = field(default_factory=dict[str, str])
    # Factors that every device needs whole.
    replicated: frozenset[str] = frozenset()
    # Groups of operands in which the operation is linear. A pending sum passes through a group.
    linear: tuple[frozenset[int], ...] = ()
    # The rows of an operand that a position of its factor reads.
    row_access: Mapping[Place, Reach] = field(default_factory=dict[Place, Reach])
    # Whether each row of the result is a row of an operand, or a pad. Dimensions are d0, d1, ...
    # Windows of operands then give windows of the result.
    moves: bool = False
    local: LocalForm = LocalForm()
    split: Split | None = None
    instead: Instead | None = None
    balance: Balance | None = None
    # Whether the number of multiplications is the product of all factor sizes but those `chosen`:
    # of these each row meets one shard only.
    contraction: bool = False
    chosen: frozenset[str] = frozenset()
    # False: no rule describes the operation, so it runs replicated.
    described: bool = True
    text: str = ""

    def __str__(self) -> str:
        return self.sentence

    @cached_property
    def sentence(self) -> str:
        """The rule as text, which reasons for layouts quote again and again."""
        return self.text or describe(self.operands, self.results, self.halo)

    @cached_property
    def special(self) -> frozenset[str]:
        """The factors along which the local form computes by positions."""
        positional = self.local.positional
        if isinstance(positional, bool):
            return frozenset(self.local.when if positional else ())
        return frozenset(self.local.when) & frozenset(_names(positional))

    def is_like(self, other: FactorRule) -> bool:
        """Return whether another rule says the same, by other names."""
        return self._renamed() == other._renamed()

    def _renamed(self) -> tuple[Any, ...]:
        """Return all that says what is computed, with numbers for names."""
        tensors = (*self.operands, *self.results)
        names: dict[str, int] = {}
        dims = [[[names.setdefault(f, len(names)) for f in dim] for dim in t] for t in tensors]
        sets = (self.replicated, self.special, self.windowed)
        return (
            (dims, self.linear, len(self.operands)),
            *(
                {names[f]: each[f] for f in names if f in each}
                for each in (self.sizes, self.reduce)
            ),
            *({names[f] for f in names if f in each} for each in sets),
        )

    def splits(self, factor: str) -> bool:
        """Return whether the operation may be split along a factor that it needs whole."""
        return self.split is not None and self.split.merges in (None, factor)

    def fill(self, factor: str) -> float | None:
        """Return the padding that operands need along a factor; None: anything."""
        masked = factor in self.reduce and factor not in self.special
        return IDENTITY[self.reduce[factor]] if masked else None

    @cached_property
    def joins(self) -> bool:
        """Whether a pending sum passes through several operands only together (an addition)."""
        return any(len(group) > 1 for group in self.linear)

    @cached_property
    def halo(self) -> Mapping[Place, Reach]:
        """The row accesses along factors that may be sharded."""
        return {
            (operand, dim): reach
            for (operand, dim), reach in self.row_access.items()
            if set(self.operands[operand][dim]) - self.replicated
        }

    @cached_property
    def windowed(self) -> frozenset[str]:
        """The factors with a halo in some operand."""
        return frozenset(f for operand, dim in self.halo for f in self.operands[operand][dim])


@dataclass(frozen=True)
class Shapes:
    """One operation's local shapes: its tensor operands and results."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operation. Its arguments have fake tensors instead of nodes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    # The same call with other numbers in place of sizes and arguments that only a run knows.
    other: Call | None = None

    def argument(self, index: int, name: str, default: object = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def dim(self, index: int, default: int | None = None) -> int:
        """Return the argument `dim`, counted from the first tensor's front."""
        return self.argument(index, "dim", default) % max(self.tensors[0].dim(), 1)

    def rule(
        self,
        operands: Sequence[DimNames],
        results: Sequence[DimNames],
        sizes: Mapping[str, int] | None = None,
        **keywords: Any,
    ) -> FactorRule:
        """Return the call's rule, from the factors in every dimension of its tensors.

        A factor has the size of the first dimension that it is alone in, unless `sizes` has it.
        keywords: see make_rule.
        """
        bound = dict(sizes or {})
        for dims, tensor in zip((*operands, *results), (*self.tensors, *self.results), strict=True):
            for names, size in zip(dims, tensor.shape):
                if isinstance(names, str) and names:
                    bound.setdefault(names, size)
        return make_rule(operands, results, bound, **keywords)


def factors(prefix: str, count: int) -> list[str]:
    """Return factor names, such as d0, d1, d2."""
    return [f"{prefix}{i}" for i in range(count)]


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence, not yet bound to shapes."""

    operands: tuple[tuple[str, ...], ...]  # each tensor's tokens
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
        return cls(sides[0], sides[1], text)

    def bind(
        self, call: Call, sizes: Mapping[str, int] | None = None, **keywords: Any
    ) -> FactorRule:
        """Return a call's rule. sizes: for factors that share a dimension with others."""
        bound: dict[str, int] = {}
        operands, results = (
            [_dims(tokens, t.shape, bound, sizes or {}) for tokens, t in zip(*side, strict=True)]
            for side in ((self.operands, call.tensors), (self.results, call.results))
        )
        return make_rule(operands, results, bound, text=self.text, **keywords)


def make_rule(
    operands: Sequence[DimNames],
    results: Sequence[DimNames],
    sizes: Mapping[str, int],
    *,
    reduce: Names | Mapping[str, str] = "",
    replicated: Names = "",
    chosen: Names = "",
    linear: Sequence[Iterable[int]] = (),
    local: LocalForm = LocalForm(),
    **keywords: Any,
) -> FactorRule:
    """Return a FactorRule without size-1 factors. reduce: a sum, if no kind is named."""
    present = {name: size for name, size in sizes.items() if size > 1}

    def clean(tensors: Sequence[DimNames]) -> tuple[Dims, ...]:
        return tuple(
            tuple(
                tuple(f for f in ((dim,) if isinstance(dim, str) else dim) if f in present)
                for dim in dims
            )
            for dims in tensors
        )

    if isinstance(reduce, Mapping):
        kinds = cast(Mapping[str, str], reduce)
    else:
        kinds = dict.fromkeys(_names(reduce), "sum")
    return FactorRule(
        clean(operands),
        clean(results),
        present,
        {f: kind for f, kind in kinds.items() if f in present},
        frozenset(f for f in _names(replicated) if f in present),
        tuple(frozenset(g) for g in linear),
        chosen=frozenset(_names(chosen)),
        local=replace(local, when=frozenset(f for f in _names(local.when) if f in present)),
        **keywords,
    )


def describe(
    operands: Sequence[Dims], results: Sequence[Dims], halo: Mapping[Place, Reach] | None = None
) -> str:
    def tensor(dims: Dims, reaches: Mapping[int, Reach]) -> str:
        return " ".join(f"{_dim(dim)}{reaches.get(d, '')}" for d, dim in enumerate(dims))

    left = [
        tensor(dims, {d: reach for (operand, d), reach in (halo or {}).items() if operand == i})
        for i, dims in enumerate(operands)
    ]
    return f"{', '.join(left)} -> {', '.join(tensor(dims, {}) for dims in results)}"


def _dim(dim: Dim) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def _names(names: Names) -> list[str]:
    return names.split() if isinstance(names, str) else list(names)


def _tokens(text: str, sentence: str) -> tuple[str, ...]:
    """Split "... (h d) k" into ("...", "(h d)", "k"), or raise ValueError."""
    tokens: tuple[str, ...] = tuple(re.findall(r"\.\.\.|\([^()]*\)|[^\s()]+", text))
    if re.search(r"[()]", re.sub(r"\([^()]*\)", "", text)):
        raise ValueError(
            f"'{text.strip()}' in rule '{sentence}' has nested or unpaired parentheses"
        )
    for token in tokens:
        names: list[str] = token.strip("()").split() if token != "..." else []
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
    tokens: tuple[str, ...], shape: Ints, bound: dict[str, int], declared: Mapping[str, int]
) -> Dims:
    """Return each dimension's factors. bound: the sizes of all factors, completed here."""
    if "..." in tokens:
        at, count = tokens.index("..."), len(shape) - len(tokens) + 1
        tokens = tokens[:at] + tuple(f"_{i}" for i in range(count)) + tokens[at + 1 :]
    if len(tokens) != len(shape):
        raise ValueError(
            f"'{' '.join(tokens)}' describes {len(tokens)} dimensions, "
            f"the tensor has shape {list(shape)}"
        )
    dims: list[Dim] = []
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
