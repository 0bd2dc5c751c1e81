"""Arguments of a local operation that are sizes which only a run knows.

    %y = view(%x, [1808, 2])        where 1808 stands for 4 * u0
    %y = view(%x, [%mul, 2])        what a device runs

No device has less than all of such a dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ...compat.operators import aten
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ..ir import is_number, operands_of, unknown_sizes


def with_sizes(
    node: fx.Node, args: tuple, before: tuple, new: Mapping[fx.Node, fx.Node], graph: fx.Graph
) -> tuple:
    """Return arguments with the numbers of a run in place of those that stand for them.

    node: in the global graph. before: its arguments in the local graph, whose sizes are global.
    """
    numbers = {n.meta["val"]: new[n] for n in node.all_input_nodes if is_number(n)}
    unknown = {size: (new[n], d) for n in operands_of(node) for d, size in unknown_sizes(n)}
    results = dict.fromkeys(size for _, size in unknown_sizes(node))

    def replaced(value: Any, old: Any) -> Any:
        if isinstance(value, (tuple, list)):
            known = isinstance(old, (tuple, list)) and len(old) == len(value)
            return [replaced(v, old[i] if known else None) for i, v in enumerate(value)]
        if type(value) is not int or value not in results and value not in unknown:
            return value
        if value in numbers:
            return numbers[value]
        if value in unknown:
            return graph.call_function(aten.sym_size.int, unknown[value])
        if old is None:
            raise needs_number(node.name, node.meta.get("source"))
        return old

    return tuple(
        replaced(value, before[i] if i < len(before) else None) for i, value in enumerate(args)
    )


def check_sizes(node: fx.Node, last: fx.Node) -> None:
    """Raise ShardingError if a local node behind `last` has a number that stands for a size.

    So does one that such a number divides: rows times what a row has.
    """
    stand_ins = {size for n in (node, *operands_of(node)) for _, size in unknown_sizes(n)}
    while stand_ins and (last := last.next).op != "root":
        numbers = {n for n in pytree.tree_leaves((last.args, last.kwargs)) if type(n) is int}
        if any(n and n % size == 0 for n in numbers for size in stand_ins):
            raise needs_number(node.name, node.meta.get("source"))


def needs_number(name: str, source: str | None) -> ShardingError:
    """Return the error of an operation that one program for all sizes cannot have."""
    return ShardingError(
        f"%{name} needs the number of a size that only a run knows",
        where=source,
        why="no argument of it has this size, and devices have one program for all sizes",
        fix="a plan for each size: leave out dynamic=, or parallelize(dynamic=False); "
        "a size that depends on values: pad it to a known one",
    )
