"""The tables of rules and decompositions. They are filled at import and only read afterwards.

rule(op, "m k, k n -> m n", reduce="k")     one sentence for all calls of an operation
@rule_for(op)                               a function from a Call to its Rule
@decomposition(op)                          a function that computes it by other operations
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.operators import AbsentOperator, find
from ..compat.private_apis import OpOverload
from .notation import Call, Rule, Sentence, Shapes, make_rule

RULES: dict[Any, Callable[[Call], Rule | None]] = {}
DECOMPOSITIONS: dict[Any, Callable] = {}  # applied to all calls, first of all
# Decompositions for calls with sharded `whole` factors, or sharded halos. None: PyTorch's.
SPLITS: dict[Any, Callable | None] = {}
BLOCKWISE: set[Any] = set()  # the operations whose split takes the number of shards
SKIPPED: list[str] = []  # names of registered operators that this torch lacks


def rule(
    op: OpOverload | AbsentOperator | str,
    sentence: str,
    *,
    splits: Callable | bool = False,
    **keywords: Any,
) -> None:
    """Register the sentence of an operation, or of a name `library::name` that may come later.

    Keywords: those of make_rule and Rule; splits: see SPLITS.
    """
    parsed = Sentence.parse(sentence)
    rule_for(op, splits=splits)(lambda call: parsed.bind(call, splits=bool(splits), **keywords))


def rule_function(op: Any) -> Callable[[Call], Rule | None] | None:
    """Return the function that computes the rule of an operation's calls, or None."""
    function = RULES.get(op)
    return RULES.get(op.name()) if function is None and isinstance(op, OpOverload) else function


def rule_for(*ops: OpOverload | AbsentOperator | str, splits: Callable | bool = False) -> Callable:
    """Register a function that computes the rule of a call. None: the call runs replicated."""

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
    """Return whether an operator is loaded by now, such as `library::name`."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return find(namespace, operator, overload or "default") is not None


def decomposition(*ops: OpOverload | AbsentOperator) -> Callable:
    """Register a function that computes operations by others, with the same arguments."""

    def register(function: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(filter(is_present, ops), function))
        return function

    return register


def is_present(op: OpOverload | AbsentOperator | str) -> bool:
    """Return whether this torch has an operator, or may load it later; else note it in SKIPPED."""
    if isinstance(op, AbsentOperator):
        SKIPPED.append(op.name())
        return False
    return True


def replicated_rule(call: Call) -> Rule:
    """Return the rule of an operation without one: every device computes all of it."""
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
    """Return a `local` function for an operation whose argument `index` is the result's shape."""

    def local(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
        return (*args[:index], list(shapes.results[0]), *args[index + 1 :]), kwargs

    return local
