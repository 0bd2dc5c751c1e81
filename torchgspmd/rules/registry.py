"""The rule table. It is filled at import and only read afterwards.

rule(op, "m k, k n -> m n", reduce="k")     one sentence for all calls of an operation
@rule_for(op)                               a function from a Call to its FactorRule
@host_reads(op)                             a function from a node to the reason why the host reads
                                            a value for this call, or None if it does not
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import AbsentOperator, find
from ..compat.private_apis import OpOverload
from .notation import Call, FactorRule, LocalForm, Sentence, Shapes, factors
from .rewrites import Declined, check_ended, feature_of, is_present, restored

RuleFunction = Callable[[Call], FactorRule | Declined]
RULES: dict[Any, RuleFunction] = {}
Reason = Callable[[fx.Node], str | None]
HOST_READS: dict[Any, Reason] = {}  # filled at import, and only read afterwards


def rule(op: OpOverload | AbsentOperator | str, sentence: str, **keywords: Any) -> None:
    """Register an operation's sentence; a name `library::name` may be loaded later.

    keywords: see make_rule.
    """
    parsed = Sentence.parse(sentence)

    def bound(call: Call) -> FactorRule:
        return parsed.bind(call, **keywords)

    bound.__module__ = sys._getframe(1).f_globals["__name__"]  # as namedtuple does: feature_of
    rule_for(op)(bound)


def rule_function(op: object) -> RuleFunction | None:
    """Return the function that computes rules for an operation's calls, or None."""
    check_ended()
    function = RULES.get(op)
    # A rule may be registered by name before its library is loaded.
    return RULES.get(op.name()) if function is None and isinstance(op, OpOverload) else function


def rule_for(*ops: OpOverload | AbsentOperator | str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that computes a call's rule. DECLINED: the call runs replicated."""

    def register(function: RuleFunction) -> RuleFunction:
        for op in filter(is_present, ops):
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = function
        return function

    return register


@contextmanager
def without_rules(feature: str) -> Generator[None, None, None]:
    """Take a feature's rows out of the table while in this context."""
    with restored(RULES) as before:
        for op, function in before.items():
            if feature_of(function) == feature:
                del RULES[op]
        yield


def is_registered(name: str) -> bool:
    """Return whether an operator is loaded by now, such as `library::name`."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return find(namespace, operator, overload or "default") is not None


def replicated_rule(call: Call) -> FactorRule:
    """Return a rule for an operation without one: every device computes all of it."""
    tensors, count = (*call.tensors, *call.results), len(call.tensors)
    dims = [factors(f"r{i}_", t.dim()) for i, t in enumerate(tensors)]
    return call.rule(
        dims[:count],
        dims[count:],
        replicated=[name for names in dims for name in names],
        # Tensors of one element cannot be sharded, so no rule is missing.
        described=all(size < 2 for t in tensors for size in t.shape),
    )


def shape_argument(index: int, emit: Callable | None = None, **keywords: Any) -> LocalForm:
    """Return the local form for an operation whose argument `index` is the result's shape."""

    def arguments(args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
        return (*args[:index], list(shapes.results[0]), *args[index + 1 :]), kwargs

    return LocalForm(emit, arguments=arguments, **keywords)


def host_reads(*ops: object) -> Callable[[Reason], Reason]:
    """Register the reason, which operands decide. A CUDA graph cannot capture such a call."""

    def register(reason: Reason) -> Reason:
        HOST_READS.update(dict.fromkeys(ops, reason))
        return reason

    return register


# Operands whose order in memory an operation's results depend on.
#
#     ordered(aten._linalg_slogdet.default, "A")     factors A, or A.mT if A is contiguous
#     packed(aten.native_layer_norm.default)         all results are contiguous
#
# PyTorch's formula for the gradient of a determinant asks whether the matrix is contiguous. The
# trace asks once; the kernel asks in each run, and has to find the same answer. So each device
# brings such an operand into the order that it had in the trace.
#
# An operation without a rule depends on the order of all its operands, as far as anybody knows. The
# rule of an operation says that it does not, or `ordered` says which do: tests/rules/
# test_memory_order.py runs all samples in several orders.


# Argument -> the tensor's dimensions in memory, outermost first. The others are contiguous.
Orders = Mapping[str, tuple[int, ...]]

_ORDERED: dict[Any, frozenset[str] | None] = {}  # None: all tensor arguments
_PACKED: set[Any] = set()
# Their results do not depend on memory: views, and what PyTorch has in its core of operations.
_FREE = (torch.Tag.core, torch.Tag.pointwise)


def ordered(op: OpOverload | AbsentOperator | str, names: str | None = None) -> None:
    """Say on which arguments' order in memory an operation's results depend; by default on all."""
    _ORDERED[op] = None if names is None else frozenset(names.split())


def packed(op: OpOverload) -> None:
    """Say that an operation's results are contiguous, whatever its operands are."""
    _PACKED.add(op)


def is_packed(op: object) -> bool:
    """Return whether an operation's results are contiguous, whatever its operands are.

    Python functions say so: `packs`.
    """
    return op in _PACKED or getattr(op, "packs", False)


def declares_order(op: object) -> bool:
    """Return whether an operation says that its results depend on an order in memory."""
    return op in _ORDERED or isinstance(op, OpOverload) and op.name() in _ORDERED


def ordered_arguments(op: object) -> frozenset[str]:
    """Return the arguments on whose order in memory an operation's results may depend."""
    if not isinstance(op, OpOverload):
        return frozenset()
    if declares_order(op):
        names = _ORDERED[op] if op in _ORDERED else _ORDERED[op.name()]
    elif rule_function(op) or op.is_view or any(tag in op.tags for tag in _FREE):
        return frozenset()
    else:
        names = None
    tensors = {a.name for a in op._schema.arguments if "Tensor" in str(a.type)}
    return frozenset(tensors if names is None else tensors & names)


def map_ordered(
    op: Any, args: tuple, kwargs: Mapping[str, Any], function: Callable[[str, fx.Node], Any]
) -> tuple[tuple, dict[str, Any]]:
    """Apply a function to a call's operands whose order in memory matters.

    function: from an argument's name and a node. `name[i]` is number i of a list of tensors.
    """
    names = ordered_arguments(op)

    def mapped(name: str, value: Any) -> Any:
        if name not in names:
            return value
        if isinstance(value, (list, tuple)):
            return [
                function(f"{name}[{i}]", x) if isinstance(x, fx.Node) else x
                for i, x in enumerate(value)
            ]
        return function(name, value) if isinstance(value, fx.Node) else value

    positions = (a.name for a in op._schema.arguments) if names else ()
    new = tuple(mapped(name, value) for name, value in zip(positions, args))
    return new if names else args, {name: mapped(name, value) for name, value in kwargs.items()}


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in memory, outermost first."""
    return tuple(sorted(range(x.dim()), key=lambda d: (-int(x.stride(d)), d)))


def order_text(x: Tensor) -> str:
    """Return a tensor's order in memory, for keys and messages."""
    return "contiguous" if x.is_contiguous() else f"a tensor with strides {list(x.stride())}"


def traced_orders(node: fx.Node) -> Orders | None:
    """Return the orders in which a trace had a call's operands; None if they do not matter."""
    if not ordered_arguments(node.target):
        return None
    orders: dict[str, tuple[int, ...]] = {}

    def note(name: str, operand: fx.Node) -> None:
        x = operand.meta["val"]
        if isinstance(x, Tensor) and not x.is_contiguous():
            orders[name] = memory_order(x)

    map_ordered(node.target, node.args, node.kwargs, note)
    return orders
