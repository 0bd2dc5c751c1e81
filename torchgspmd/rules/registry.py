"""The table of rules: operation -> function from a Call to its Rule. Filled at import, read
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.operators import AbsentOperator, find
from ..compat.private_apis import OpOverload
from .notation import Call, Rule, Sentence, Shapes, make_rule

RULES: dict[Any, Callable[[Call], Rule | None]] = {}
DECOMPOSITIONS: dict[Any, Callable] = {}  # always taken apart, before anything else
SPLITS: dict[
    Any, Callable | None
] = {}  # taken apart if what they need whole, or in windows, is sharded; None: PyTorch's table
BLOCKWISE: set[Any] = set()  # those among SPLITS that are told how many shards there are
SKIPPED: list[
    str
] = []  # operators that were to have a rule or a decomposition, and that this torch lacks


def rule(
    op: OpOverload | AbsentOperator | str,
    sentence: str,
    *,
    splits: Callable | bool = False,
    **keywords: Any,
) -> None:
    """Registers an operation's sentence; an operation that need not be there by its name,
    `library::name`.

    Keywords: those of make_rule and Rule; splits: see SPLITS.
    """
    parsed = Sentence.parse(sentence)
    computed(op, splits=splits)(lambda call: parsed.bind(call, splits=bool(splits), **keywords))


def rule_function(op: Any) -> Callable[[Call], Rule | None] | None:
    """What computes the rule of an operation's calls, if anything does."""
    found = RULES.get(op)
    return RULES.get(op.name()) if found is None and isinstance(op, OpOverload) else found


def computed(*ops: OpOverload | AbsentOperator | str, splits: Callable | bool = False) -> Callable:
    """Registers a function that computes the rule of a call; it may return None: then the operation
    runs replicated.
    """

    def register(function: Callable[[Call], Rule | None]) -> Callable[[Call], Rule | None]:
        for op in filter(is_present, ops):
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = function
            if splits:
                SPLITS[op] = splits if callable(splits) else None
        return function

    return register


def is_registered(name: str) -> bool:
    """Whether there is an operator of that name, such as `library::name`, by now."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return find(namespace, operator, overload or "default") is not None


def decomposition(*ops: OpOverload | AbsentOperator) -> Callable:
    """Registers how operations are expressed by others; called as the operation itself."""

    def register(function: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(filter(is_present, ops), function))
        return function

    return register


def is_present(op: OpOverload | AbsentOperator | str) -> bool:
    """Whether this torch has an operator; one that it lacks is noted in SKIPPED. A name stands for
    one that may come later.
    """
    if isinstance(op, AbsentOperator):
        SKIPPED.append(op.name())
        return False
    return True


def replicated(call: Call) -> Rule:
    """The rule of an operation of which nothing is known: every device computes all of it."""
    sizes, dims = {}, []
    for i, tensor in enumerate((*call.tensors, *call.results)):
        names = tuple((f"r{i}_{d}",) for d in range(tensor.dim()))
        sizes.update({name[0]: size for name, size in zip(names, tensor.shape)})
        dims.append(names)
    count = len(call.tensors)
    return make_rule(
        dims[:count],
        dims[count:],
        sizes,
        whole=frozenset(sizes),
        known=max(sizes.values(), default=1) < 2,
    )


def shape_argument(index: int) -> Callable:
    """A `local` function: argument number `index` is the shape of the result."""

    def local(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
        return (*args[:index], list(shapes.results[0]), *args[index + 1 :]), kwargs

    return local
