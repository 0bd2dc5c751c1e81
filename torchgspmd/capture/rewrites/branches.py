"""Python branches on values that only a run knows, as torch.cond.

    if torch.rand([]) < self.rate:              def one(x):
        continue                                    return (x,)
    x = layer(x)                                def other(x):
                                                    x = layer(x)
                                                    return (x,)
                                                (x,) = branch(torch.rand([]) < self.rate, one, other)

A trace that fails at a branch is repeated with the function compiled anew. Its source has to show
that the sides only compute: they assign names, and may end in `return` or `continue`. Both sides
are traced, and a run computes one. A name that both assign alike keeps its value, tensors and
numbers are results of the cond, and any other name is unusable behind the branch.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...compat.private_apis import (
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
    TorchDispatchMode,
)
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError, innermost_frame_of
from ...rules.rewrites import rewrite_of
from .chosen_loops import CONTAINER_METHODS

# (asks for a tensor's value, returns the module state's tables) in the trace that runs
TRACE: ContextVar[tuple[Callable[[Tensor], Tensor | None], Callable[[], list]]] = ContextVar("TRACE")
_UNKNOWN = DataDependentOutputException, GuardOnDataDependentSymNode

_HELPERS = "_torchgspmd_branches_"  # a global variable of the compiled functions
_RESULT = "_torchgspmd_result_"
_SIDE = "_torchgspmd_side_"
_LEAVES = ast.Return | ast.Continue | ast.Break
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = (
    *(ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise),
    *(ast.Assert, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Import, ast.ImportFrom),
)


class _Refused(Exception):
    """A side has an effect, or leaves the branch in a way that no expression has."""


# ------------------------------------------------------------------------------- the compiled code


class Branches:
    """The functions that branch on values in the traces so far."""

    def __init__(self) -> None:
        self.lines: dict[FunctionType, set[int]] = {}  # of the tests
        self.of_code: dict[CodeType, FunctionType] = {}  # by a code that was compiled anew

    def learn(self, error: BaseException | None) -> bool:
        """Return whether another trace can pass the branch at which a trace has failed."""
        trace = innermost_frame_of(error) if isinstance(error, _UNKNOWN) else None
        if trace is None:
            return False
        code, line = trace.tb_frame.f_code, trace.tb_lineno
        found = (f for f in gc.get_referrers(code) if isinstance(f, FunctionType))
        function = self.of_code.get(code) or next((f for f in found if f.__code__ is code), None)
        if function is None or line in (lines := self.lines.get(function, set())):
            return False
        if compiled(function.__code__, {*lines, line}) is None:
            return False
        self.lines[function] = {*lines, line}
        return True

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Run the functions with their branches as calls."""
        changed = list[tuple[FunctionType, CodeType]]()
        try:
            for function, lines in self.lines.items():
                if (code := compiled(function.__code__, lines)) is not None:
                    changed.append((function, function.__code__))
                    self.of_code |= dict.fromkeys(_with_inner(code), function)
                    function.__globals__[_HELPERS] = _NAMESPACE
                    function.__code__ = code
            yield
        finally:
            for function, code in changed:
                function.__code__ = code
                function.__globals__.pop(_HELPERS, None)


def compiled(code: CodeType, lines: set[int]) -> CodeType | None:
    """Return a function's code with the branches in these lines as calls of `branch`."""
    with suppress(OSError, SyntaxError, TypeError, IndexError, _Refused):
        source, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(source))).body[0]
        if not isinstance(tree, ast.FunctionDef) or code.co_flags & inspect.CO_GENERATOR:
            return None
        ast.increment_lineno(tree, first - 1)
        tree.decorator_list = []
        lowering = _Lowering(lines, [*tree.args.posonlyargs, *tree.args.args])
        if not _leaves(tree.body):
            tree.body += _statements("return None", tree.body[-1])
        tree.body = lowering.block(tree.body, "return")
        if not lowering.count:
            return None
        # The free variables of the function become those of a function in this one.
        outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body = [tree]
        module = ast.fix_missing_locations(ast.Module([outer], []))
        factory = _inner(compile(module, code.co_filename, "exec"), "outer")
        new = _inner(factory, tree.name)
        return new if new.co_freevars == code.co_freevars else None
    return None


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)


class _Lowering:
    """Rewrites the branches of one function whose tests are in these lines."""

    def __init__(self, lines: set[int], args: Sequence[ast.arg]) -> None:
        self.lines, self.count = lines, 0
        self.first = args[0].arg if args else ""

    def block(self, body: list[ast.stmt], end: str, is_inner: bool = False) -> list[ast.stmt]:
        """Return statements without these branches.

        end: `return` or `continue` if that would change nothing behind the last statement.
        is_inner: whether a result is assigned in place of `return`.
        """
        out = list[ast.stmt]()
        for i, s in enumerate(body):
            rest = body[i + 1 :]
            is_leaving = isinstance(s, ast.If) and _may_leave([*s.body, *s.orelse])
            is_target = isinstance(s, ast.If) and self._is_at(s.test)
            if isinstance(s, ast.If) and (is_target or is_inner and is_leaving):
                sides = [[*s.body], [*s.orelse]]
                if is_leaving:
                    if not end:
                        raise _Refused
                    for side in sides:
                        side += [] if _leaves(side) else copy.deepcopy(rest)
                    sides = [_without_leave(side, end) for side in sides]
                at = end if is_leaving or not rest else ""
                s.body, s.orelse = (self.block(side, at, True) for side in sides)
                out += self._call(s) if is_target else [s]
                if is_leaving:
                    if end == "return" and not is_inner:
                        out += _statements(f"return {_RESULT}", s)
                    return out
                continue
            s = _Expressions(self).visit(s)
            last = end if not rest else ""
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(s, field, None)
                if isinstance(inner, list) and not isinstance(s, _SCOPES):
                    is_loop = isinstance(s, ast.For | ast.While) and field == "body"
                    at = "continue" if is_loop else last if isinstance(s, ast.If) else ""
                    setattr(s, field, self.block(inner, at, is_inner))
            out.append(s)
        return out

    def _is_at(self, test: ast.expr) -> bool:
        return any(test.lineno <= n <= (test.end_lineno or test.lineno) for n in self.lines)

    def _call(self, s: ast.If) -> list[ast.stmt]:
        self.count, sides = self.count + 1, (s.body, s.orelse)
        names = sorted(_stored([*sides[0], *sides[1]]))
        for side in sides:
            _check_pure(side, set(names))
        values = "".join(f"{n}, " for n in names)
        reads = "".join(f"(lambda: {n}), " for n in names)
        texts = [
            f"def {_SIDE}{i}({values}): return {_HELPERS}['values'](({reads}))" for i in range(2)
        ]
        functions = _statements("\n".join(texts), s)
        for function, side in zip(functions, sides):
            assert isinstance(function, ast.FunctionDef)
            function.body[:0] = [_Supers(self.first).visit(each) for each in side]
        left = f"({values}) = " if names else ""
        listed = "".join(f"{n!r}, " for n in names)
        text = f"{left}{_HELPERS}['branch'](0, {_SIDE}0, {_SIDE}1, ({reads}), ({listed}))"
        text += "".join(f"\nif {n} is {_HELPERS}['ABSENT']: del {n}" for n in names)
        call = _statements(text, s)
        assert isinstance(call[0], ast.Assign | ast.Expr)
        assert isinstance(call[0].value, ast.Call)
        call[0].value.args[0] = _truth(_Expressions(self).visit(s.test))
        return [*functions, *call]


class _Expressions(ast.NodeTransformer):
    """Rewrites `a if test else b`; leaves other scopes and nested statements alone."""

    def __init__(self, lowering: _Lowering) -> None:
        self.lowering, self.is_root = lowering, True

    def visit(self, node: ast.AST) -> Any:
        is_root, self.is_root = self.is_root, False
        is_left = isinstance(node, (ast.stmt, *_SCOPES)) and not is_root
        return node if is_left or isinstance(node, _SCOPES) else super().visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if not self.lowering._is_at(node.test):
            return node
        self.lowering.count += 1
        _check_pure([ast.Expr(node.body), ast.Expr(node.orelse)], set())
        call = _expression(f"{_HELPERS}['choose'](0, lambda: 0, lambda: 0)", node)
        call.args = [_truth(node.test), *(_lambda(side) for side in (node.body, node.orelse))]
        return call


class _Supers(ast.NodeTransformer):
    """super() names its class and object: a side is a function without them."""

    def __init__(self, first: str) -> None:
        self.first = first

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            node.args = [_expression("__class__", node), _expression(self.first, node)]
        return node


def _truth(test: ast.expr) -> ast.expr:
    """Return a test whose `and`, `or` and `not` take tensors."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        call = _expression(f"{_HELPERS}['no'](0)", test)
        call.args = [_truth(test.operand)]
        return call
    if isinstance(test, ast.BoolOp):
        name = "both" if isinstance(test.op, ast.And) else "either"
        call = _expression(f"{_HELPERS}[{name!r}]()", test)
        call.args = [_lambda(_truth(value)) for value in test.values]
        return call
    return test


def _expression(text: str, at: ast.AST) -> Any:
    [statement] = _statements(text, at)
    assert isinstance(statement, ast.Expr)
    return statement.value


def _statements(text: str, at: ast.AST) -> list[ast.stmt]:
    body = ast.parse(text).body
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.expr | ast.stmt | ast.arg):
                ast.copy_location(node, at)
    return body


def _lambda(value: ast.expr) -> ast.expr:
    function = _expression("lambda: 0", value)
    function.body = value
    return function


def _leaves(side: Sequence[ast.stmt]) -> bool:
    """Return whether a side's last statement leaves the branch."""
    return bool(side) and isinstance(side[-1], _LEAVES)


def _may_leave(body: Iterable[ast.AST]) -> bool:
    """Return whether a statement leaves this body, other than a loop in it."""
    return any(
        isinstance(node, _LEAVES)
        or not isinstance(node, (*_SCOPES, ast.expr, ast.For, ast.While))
        and _may_leave(ast.iter_child_nodes(node))
        for node in body
    )


def _without_leave(side: list[ast.stmt], end: str) -> list[ast.stmt]:
    """Return a side of a branch behind which nothing is left to do."""
    last = side[-1] if side else None
    if end == "continue":
        if isinstance(last, ast.Return | ast.Break):
            raise _Refused
        return side[:-1] if isinstance(last, ast.Continue) else side
    if isinstance(last, ast.Return):
        [result] = _statements(f"{_RESULT} = None", last)
        assert isinstance(result, ast.Assign)
        result.value = last.value or result.value
        return [*side[:-1], result]
    return side  # a branch around it has assigned the result


def _walk(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own scope."""
    for node in body:
        yield node
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            yield from _walk(ast.iter_child_nodes(node))


def _stored(body: Sequence[ast.stmt]) -> set[str]:
    return {
        node.id if isinstance(node, ast.Name) else node.name
        for node in _walk(body)
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith(_SIDE)
        or isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
    }


def _check_pure(body: Sequence[ast.stmt], own: set[str]) -> None:
    """Raise _Refused if a side does more than compute and assign names. own: these names."""
    for node in _walk(body):
        if isinstance(node, _REFUSED) or isinstance(node, ast.Return):
            raise _Refused
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            raise _Refused
        changed = node.value if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in CONTAINER_METHODS else None
        if changed is not None and not (isinstance(changed, ast.Name) and changed.id in own):
            raise _Refused


# ------------------------------------------------------------------------------------- in the trace


class _Absent:
    """The value of a name that is not assigned."""


class Differing:
    """The value of a name that is no tensor or number, and other on either side of a branch."""

    def __init__(self, error: ShardingError) -> None:
        self.__dict__["_error"] = error

    def _raise(self, *_: object) -> NoReturn:
        raise self.__dict__["_error"]

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        self._raise()

    __setattr__ = __bool__ = __iter__ = __getitem__ = __call__ = __len__ = _raise
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _raise


ABSENT = _Absent()


def branch(
    test: object,
    yes: Callable[..., tuple],
    no: Callable[..., tuple],
    reads: Sequence[Callable[[], object]],
    names: Sequence[str],
) -> tuple:
    """Return the values of names behind a branch. reads: return their values before it."""
    before = values(reads)
    if (goes := _unknown(test)) is None:
        return (yes if test else no)(*before)
    sides = [_leaves_of(_run_once(side, before)) for side in (yes, no)]
    results, chosen = list[Any](), list[tuple[int, int]]()
    for i, (name, one, other) in enumerate(zip(names, *sides)):
        if one[1] != other[1]:
            results.append(_differing(name))
            continue
        leaves = list[Any]()
        for k, (a, b) in enumerate(zip(one[0], other[0])):
            if not (is_same := a is b or _is_plain(a) and type(a) is type(b) and a == b):
                if _type_of(a, b) is None:
                    leaves = [_differing(name)]
                    break
                chosen.append((i, k))
            leaves.append(a if is_same else ABSENT)
        results.append(leaves)
    types = {(i, k): _type_of(sides[0][i][0][k], sides[1][i][0][k]) for i, k in chosen}

    def tensors(side: Callable[..., tuple]) -> list[Tensor]:
        leaves = [each for each, _ in _leaves_of(side(*before))]
        return [_as_tensor(leaves[i][k], types[i, k]) for i, k in chosen]

    if chosen:
        cond = rewrite_of("body", torch.ops.higher_order.cond)
        assert cond is not None
        outs = cond(goes, lambda: tensors(yes), lambda: tensors(no), ())
        for (i, k), out in zip(chosen, outs):
            results[i][k] = out
    return tuple(
        leaves if isinstance(leaves, Differing) else _rebuilt(leaves, one[1])
        for leaves, one in zip(results, sides[0])
    )


def choose(test: object, yes: Callable[[], object], no: Callable[[], object]) -> object:
    """Return `yes() if test else no()`."""
    return branch(test, lambda _: (yes(),), lambda _: (no(),), (lambda: None,), ("the value",))[0]


def no(value: object) -> object:
    return not value if (truth := _unknown(value)) is None else truth.logical_not()


def both(*parts: Callable[[], object]) -> object:
    """Return `a and b`; all parts are computed from the first on that only a run knows."""
    return _joined(parts, torch.logical_and, True)


def either(*parts: Callable[[], object]) -> object:
    return _joined(parts, torch.logical_or, False)


def _joined(parts: Sequence[Callable[[], object]], join: Callable, goes_on: bool) -> object:
    value: Any = goes_on
    for i, part in enumerate(parts):
        value = part()
        if (truth := _unknown(value)) is not None:
            for each in parts[i + 1 :]:
                other = _unknown(value := each())
                truth = join(truth, torch.tensor(bool(value)) if other is None else other)
            return truth
        if bool(value) is not goes_on:
            return value
    return value


def _unknown(test: object) -> Tensor | None:
    """Return a truth value [] that only a run knows; None for another test."""
    if isinstance(test, torch.SymBool):
        test = test.node.maybe_as_bool() if test.node.has_hint() else _of_symbol(test)
    if not isinstance(test, Tensor) or test.numel() != 1 or TRACE.get()[0](test) is not None:
        return None
    return (test.detach().reshape(()) != 0) if test.dtype != torch.bool else test.reshape(())


def _of_symbol(test: torch.SymBool) -> Tensor:
    return torch.scalar_tensor(torch.sym_ite(test, 1, 0), dtype=torch.int64) != 0


def values(reads: Sequence[Callable[[], object]]) -> tuple:
    """Return the values of names, ABSENT for one that is not assigned."""
    results = list[object]()
    for read in reads:
        try:
            results.append(read())
        except NameError:
            results.append(ABSENT)
    return tuple(results)


def _leaves_of(values: Sequence[object]) -> list[tuple[list[Any], Any]]:
    return [pytree.tree_flatten(value) for value in values]


def _rebuilt(leaves: list[Any], tree: Any) -> object:
    differing = [x for x in leaves if isinstance(x, Differing)]
    return differing[0] if differing else pytree.tree_unflatten(leaves, tree)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _type_of(a: Any, b: Any) -> torch.dtype | None:
    """Return the dtype of a result that two tensors or numbers have in common, else None."""
    one, other = (x if isinstance(x, Tensor) else None for x in (a, b))
    if one is not None and other is not None:
        return one.dtype if one.dtype == other.dtype and one.shape == other.shape else None
    tensor, number = (one, b) if one is not None else (other, a)
    if not isinstance(number, bool | int | float):
        return None
    if tensor is not None:
        return tensor.dtype if tensor.dim() == 0 else None
    return torch.tensor(a).dtype if type(a) is type(b) else None


def _as_tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)


def _differing(name: str) -> Differing:
    return Differing(
        ShardingError.here(
            f"the program depends on values: '{name}' is of another kind on either side of a "
            "branch on a value",
            why="what comes after is one program for both sides",
            fix="give it tensors of one shape and dtype on both sides",
        ),
    )


def _run_once(side: Callable[..., tuple], before: Sequence[object]) -> tuple:
    """Run a side for its values; raise ShardingError if it has effects.

    Its operations are traced again in the cond, and these are dropped.
    """
    tables = TRACE.get()[1]
    held = [(table, table.entries()) for table in tables()]
    with _Writes():
        results = side(*before)
    for table, entries in held:
        now = table.entries()
        if now.keys() != entries.keys() or any(now[k] is not entries[k] for k in now):
            raise _effect("assigns an attribute")
    return results


def _effect(what: str) -> ShardingError:
    return ShardingError.here(
        f"the program depends on values: a side of a branch on a value {what}",
        why="both sides are traced, and a run computes one of them: its results alone count",
        fix="compute new tensors there, and assign them behind the branch; or use torch.where",
    )


class _Writes(TorchDispatchMode):
    """Raises if an operation changes a tensor in place that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for i, parameter in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(parameter.name)
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                for x in pytree.tree_leaves(value):
                    if isinstance(x, Tensor) and id(x) not in self.own:
                        raise _effect("changes a tensor in place")
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False) or id(args[0]) in self.own:
            self.own |= {id(x): x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)}
        return result


_NAMESPACE = {
    "branch": branch,
    "choose": choose,
    "no": no,
    "both": both,
    "either": either,
    "values": values,
    "ABSENT": ABSENT,
}
