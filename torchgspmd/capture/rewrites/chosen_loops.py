"""Loops over what values chose: each iteration that could be, and its sums where it is.

    hit = (mask.sum((1, 2)) > 0).nonzero()          hit[e], e < experts, from weights
    for e in hit:                                   for e in range(experts):
        rows, at = torch.where(mask[e])                 rows, at = torch.where(mask[e])
        y = self.experts[e](x[rows])                    y = self.experts[e](x[rows])
        out.index_add_(0, rows, y)                      out.index_add_(0, rows, where(hit[e], y, 0))

All that could be chosen are traced, and those that were not add zeros. A loop with other effects
is refused: its source has to show that it only sums and assigns rows. An iteration that raises
IndexError or KeyError, as that of a class without an expert, is left out: a run that has it raises.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat.operators import aten
from ...compat.private_apis import FunctionalTensor
from ...errors import ShardingError
from ..assumed_sizes import EMPTY_IS_NOTHING
from ..traced_values import unwrap, was_mutated
from .branch_effects import TRACE

_MOST = 64  # iterations; each is traced
_SUMS = {"index_add_", "scatter_add_"}  # (dim, index, source), in place
_NEW_SUMS = {"index_add", "scatter_add"}
# Methods of containers, which would have an effect on each iteration.
CONTAINER_METHODS = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "put",
    "write",
}
GATED = {Tensor.__setitem__} | {
    getattr(of, name)
    for of in (Tensor, torch)
    for name in (*_SUMS, *_NEW_SUMS)
    if hasattr(of, name)
}


def count_of(node: fx.Node | None, size: object) -> int | None:
    """Return how many iterations a loop over indices can have; None if it is none over `nonzero`.

    node: of a view of the indices, in which each is one row. size: the number of rows.
    """
    while node is not None and node.target is not aten.nonzero.default:
        is_view = getattr(node.target, "is_view", False) or node.target is operator.getitem
        node = next(iter(node.all_input_nodes), None) if is_view else None
    if node is None:
        return None
    rows, mask = node.meta["val"], node.all_input_nodes[0].meta["val"]
    known = mask.dim() == 1 and type(mask.shape[0]) is int and mask.shape[0] <= _MOST
    return mask.shape[0] if known and str(rows.shape[0]) == str(size) else None


@dataclass
class Missing:
    """Iterations that raise an error; by the loop's line, and the index in it."""

    errors: dict[tuple[str, int], Exception] = field(default_factory=dict)
    # the one that an error has left last in this trace, and the code of its function
    broken: tuple[tuple[str, int], CodeType] | None = None


class Gate:
    """An iteration that may be none. flag: whether it is one [], bool.

    around: the traced tensors that are there before. key: the loop's line, and its index in it.
    """

    def __init__(self, flag: Tensor, around: Iterator[Tensor], key: tuple[str, int]) -> None:
        self.flag, self.key = flag, key
        self.values = {id(x): (x, unwrap(x)) for x in around}  # as sums have left them
        self.assumed: set[Any] = set()  # sizes that a branch took for more than 0
        self.rows: list[set[Any]] = []  # the sizes in each effect's index

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a sum or an assignment, without effect if the flag is off."""
        self._check_unchanged()
        args, kwargs = self._gated(func, args, kwargs)
        result = func(*args, **kwargs)
        if id(args[0]) in self.values:
            self.values[id(args[0])] = args[0], unwrap(args[0])
        return result

    def _gated(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of a call that adds or assigns nothing if the flag is off."""
        if func is Tensor.__setitem__:
            x, index, value = args
            self._note(index if isinstance(index, tuple) else (index,))
            value = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype)
            return (x, index, torch.where(self.flag, value, x[index])), kwargs
        named = {**dict(zip(("input", "dim", "index", "source"), args)), **kwargs}
        key = "src" if "src" in named else "source"
        self._note((named["index"],))
        source = torch.where(self.flag, named.pop(key), 0)
        rest = {k: v for k, v in named.items() if k not in ("input", "self", "dim", "index")}
        x = named["input"] if "input" in named else named["self"]
        return (x, named["dim"], named["index"], source), rest

    def _note(self, index: Sequence[object]) -> None:
        sizes = [n for i in index if isinstance(i, Tensor) for n in i.shape]
        symbols = (n.node.expr.free_symbols for n in sizes if isinstance(n, torch.SymInt))
        self.rows.append(set().union(*symbols))

    def check(self) -> None:
        """Raise ShardingError if an effect remains where there is no such iteration."""
        self._check_unchanged()
        if any(not self.assumed <= rows for rows in self.rows):
            raise _other_effect()

    def _check_unchanged(self) -> None:
        if any(was_mutated(x, value) for x, value in self.values.values()):
            raise _other_effect()


def _other_effect() -> ShardingError:
    return ShardingError.here(
        "a loop over what values chose has another effect than a sum of the rows that it asks for",
        why="all that could be chosen are traced, and add zeros where they were not",
        fix="loop over all that could be chosen, and leave branches on their rows out",
    )


def _tensors_around(frame: FrameType) -> Iterator[Tensor]:
    """Yield the traced tensors in a frame's variables, and in their modules."""
    for value in frame.f_locals.values():
        own = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        yield from (x for x in own if isinstance(x, FunctionalTensor))


def iterations(
    indices: Tensor, count: int, gates: list[Gate], frame: FrameType, missing: Missing
) -> Iterator[Tensor]:
    """Yield the rows of `nonzero`, as constants: all that could be, each behind a gate.

    missing: the iterations that are left out.
    """
    rows = torch.arange(count).reshape(count, *(1 for _ in indices.shape[1:]))
    flags = (torch.arange(count)[:, None] == indices.reshape(1, -1)).any(1)
    outer = EMPTY_IS_NOTHING.get()
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    for i in range(count):
        if (error := missing.errors.get((line, i))) is not None:
            TRACE.get()[2].refuse(flags[i], error)
            continue
        gates.append(gate := Gate(flags[i], _tensors_around(frame), (line, i)))
        EMPTY_IS_NOTHING.set(gate.assumed)
        try:
            yield rows[i]
            gate.check()
        except GeneratorExit:  # an error ended the loop, since `break` is refused
            missing.broken = gate.key, frame.f_code
            raise
        finally:
            gates.pop()
            EMPTY_IS_NOTHING.set(outer)


def only_sums(frame: FrameType) -> bool:
    """Return whether the loop that a frame begins has no effects but sums and assigned rows."""
    with suppress(OSError, SyntaxError, TypeError):
        lines, first = inspect.getsourcelines(frame.f_code)
        function = ast.parse(textwrap.dedent("".join(lines))).body[0]
        at = frame.f_lineno - first + 1
        loops = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.For) and node.lineno <= at <= (node.iter.end_lineno or 0)
        ]
        return len(loops) == 1 and _Body(loops[0], function).is_pure()
    return False


class _Body:
    """A loop's body, and the names that it assigns."""

    def __init__(self, loop: ast.For, function: ast.AST) -> None:
        self.loop, self.function = loop, function
        summed = {_sum_of(s) for s in ast.walk(loop) if isinstance(s, ast.Assign)} - {None}
        stored = [
            node
            for node in ast.walk(loop)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        others = {
            name.id
            for s in ast.walk(loop)
            if isinstance(s, ast.Assign | ast.AugAssign | ast.AnnAssign) and _sum_of(s) is None
            for name in ast.walk(s.targets[0] if isinstance(s, ast.Assign) else s.target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        self.sums = summed - others
        self.names = {node.id for node in stored} - self.sums
        self.fresh: set[str] = set()  # names of results of arithmetic

    def is_pure(self) -> bool:
        """Return whether an iteration leaves sums and assigned rows alone."""
        loop = self.loop
        if loop.orelse:
            return False
        defined = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        if not all(isinstance(n, ast.Name | ast.expr_context) for n in ast.walk(loop.target)):
            return False
        return self._run(loop.body, defined) is not None and not self._is_read_elsewhere()

    def _is_read_elsewhere(self) -> bool:
        """Return whether a name of the body is read outside of it."""
        inside = {id(node) for node in ast.walk(self.loop)}
        return any(
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in self.names
            and id(node) not in inside
            and (node.lineno > self.loop.lineno or self._is_in_loop())
            for node in ast.walk(self.function)
        )

    def _is_in_loop(self) -> bool:
        return any(
            isinstance(node, ast.For | ast.While)
            and node is not self.loop
            and any(each is self.loop for each in ast.walk(node))
            for node in ast.walk(self.function)
        )

    @staticmethod
    def _reads(node: ast.AST) -> set[str]:
        names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        return {n.id for n in names if isinstance(n.ctx, ast.Load)}

    def _run(self, body: Sequence[ast.stmt], defined: set[str]) -> set[str] | None:
        """Return the names that are assigned behind statements; None if one is not allowed."""
        for statement in body:
            after = self._step(statement, set(defined))
            if after is None:
                return None
            defined = after
        return defined

    def _step(self, s: ast.stmt, defined: set[str]) -> set[str] | None:
        if isinstance(s, ast.Pass | ast.Continue):
            return defined
        if isinstance(s, ast.If):
            sides = [self._run(side, defined) for side in (s.body, s.orelse)]
            if not self._is_known(s.test, defined) or None in sides:
                return None
            leaves = [
                bool(side) and isinstance(side[-1], ast.Continue) for side in (s.body, s.orelse)
            ]
            kept = [side for side, left in zip(sides, leaves) if side is not None and not left]
            return set.intersection(*kept) if kept else defined
        if isinstance(s, ast.With):
            known = all(self._is_known(i.context_expr, defined) for i in s.items)
            named = any(i.optional_vars is not None for i in s.items)
            return self._run(s.body, defined) if known and not named else None
        if isinstance(s, ast.Expr):
            call = s.value
            is_text = isinstance(call, ast.Constant)
            is_sum = (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in _SUMS
            )
            return defined if (is_text or is_sum) and self._is_known(call, defined) else None
        if _sum_of(s) in self.sums:
            return defined if self._is_known(s, defined) else None
        if isinstance(s, ast.AugAssign):
            fresh = isinstance(s.target, ast.Name) and s.target.id in self.fresh & defined
            allowed = fresh or isinstance(s.target, ast.Subscript)
            return defined if allowed and self._is_known(s, defined) else None
        if isinstance(s, ast.Assign) and len(s.targets) == 1 and self._is_known(s, defined):
            return self._assign(s.targets[0], s.value, defined)
        if (
            isinstance(s, ast.AnnAssign)
            and s.value is not None
            and self._is_known(s.value, defined)
        ):
            return self._assign(s.target, s.value, defined)
        return None

    def _assign(self, target: ast.expr, value: ast.expr, defined: set[str]) -> set[str] | None:
        if isinstance(target, ast.Subscript):
            return defined
        items = target.elts if isinstance(target, ast.Tuple) else [target]
        names = {item.id for item in items if isinstance(item, ast.Name)}
        if len(names) < len(items):
            return None
        self.fresh = self.fresh | names if isinstance(value, ast.BinOp) else self.fresh - names
        return defined | names

    def _is_known(self, node: ast.AST, defined: set[str]) -> bool:
        """Return whether all names of the body that are read are assigned, and nothing is kept."""
        for each in ast.walk(node):
            if isinstance(each, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda):
                return False
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                name = each.func.attr
                if (
                    name in CONTAINER_METHODS
                    or name.endswith("_")
                    and name[-2:] != "__"
                    and name not in _SUMS
                ):
                    return False
        return not (self._reads(node) & self.names) - defined


def _sum_of(s: ast.stmt) -> str | None:
    """Return x for `x = x.index_add(...)`, else None."""
    if not isinstance(s, ast.Assign) or len(s.targets) != 1:
        return None
    target, call = s.targets[0], s.value
    if not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
        return None
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr not in _NEW_SUMS:
        return None
    is_same = isinstance(func.value, ast.Name) and func.value.id == target.id
    return target.id if is_same else None
