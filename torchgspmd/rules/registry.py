"""The rule table. It is filled at import and only read afterwards.

rule(op, "m k, k n -> m n", reduce="k")     one sentence for all calls of an operation
@rule_for(op)                               a function from a Call to its FactorRule
@host_reads(op)                             a function from a node to the reason why the host reads
                                            a value for this call, or None if it does not
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.operators import AbsentOperator, find
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from ..layout.open_sizes import OpenSize, is_whole, open_size
from .notation import Call, FactorRule, LocalForm, Sentence, Shapes, factors
from .rewrites import DECLINED, Declined, check_ended, feature_of, is_present, restored

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


# Rules for calls with sizes or numbers that only a run knows.
#
#     x[mask] @ w     [u0, 8] @ [8, 4]: `m k, k n -> m n`, where every device needs m whole
#
# Such a call is described twice, with two numbers for each size (capture/stand_in_sizes.py). A rule
# that is the same for both holds for all. Factors in dimensions with such a size stay whole, and so
# do those with a halo. So do those along which a device would compute by positions, if an argument
# is such a number. All others are sharded as usual.

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
