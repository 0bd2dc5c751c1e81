"""The code of a function whose branches on values are calls.

    if torch.rand([]) < self.rate:              def one(x):
        continue                                    return (x,)
    x = layer(x)                                def other(x):
                                                    x = layer(x)
                                                    return (x,)
                                                (x,) = branch(torch.rand([]) < self.rate, one, ...)

A side may compute, assign names, and end in `return` or `continue`: then it also has the rest of
the function, or of the loop. Where a side raises, a run does. A function with other branches stays
as it is.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

from .chosen_loops import CONTAINER_METHODS

HELPERS = "_torchgspmd_branches_"  # a global variable of the compiled functions
_RESULT = "_torchgspmd_result_"
_NEW = "_torchgspmd_new_"
_SIDE = "_torchgspmd_side_"
_IN_PLACE = "_torchgspmd_in_place"  # an attribute of names that a branch changes in place
_LEAVES = ast.Return | ast.Continue | ast.Break
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = (
    *(ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Import, ast.ImportFrom),
)


class _Refused(Exception):
    """A side has an effect, or leaves the branch in a way that no expression has."""


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
        lowering.caught = {
            id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)
        }
        if not _leaves(tree.body):
            tree.body += _statements("return None", tree.body[-1])
        tree.body = lowering.block(tree.body, "return")
        if not lowering.count:
            return None
        # The free variables of the function become those of a function in this one. It has another
        # name, so that the old one stays that of a global or free variable.
        tree.name = _NEW
        outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body = [tree]
        module = ast.fix_missing_locations(ast.Module([outer], []))
        factory = _inner(compile(module, code.co_filename, "exec"), "outer")
        new = _inner(factory, tree.name)
        return new.replace(co_name=code.co_name) if new.co_freevars == code.co_freevars else None
    return None


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


class _Lowering:
    """Rewrites the branches of one function whose tests are in these lines."""

    def __init__(self, lines: set[int], args: Sequence[ast.arg]) -> None:
        self.lines, self.count = lines, 0
        self.caught: set[int] = set()  # statements whose exceptions the function may catch
        self.first = args[0].arg if args else ""

    def block(self, body: list[ast.stmt], end: str, is_inner: bool = False) -> list[ast.stmt]:
        """Return statements without these branches.

        end: `return` or `continue` if that would change nothing behind the last statement.
        is_inner: whether a result is assigned in place of `return`.
        """
        out = list[ast.stmt]()
        for i, s in enumerate(body):
            rest = body[i + 1 :]
            is_caught, s = id(s) in self.caught, self._as_if(s)
            is_target = isinstance(s, ast.If) and self._is_at(s.test)
            if is_target and is_caught and any(isinstance(n, ast.Raise) for n in ast.walk(s)):
                raise _Refused
            is_leaving = isinstance(s, ast.If) and _may_leave([*s.body, *s.orelse])
            is_around = is_leaving and (is_inner or self._has_target(s))
            if isinstance(s, ast.If) and (is_target or is_around):
                sides = [[*s.body], [*s.orelse]]
                if is_leaving:
                    if not end:
                        raise _Refused
                    for side in sides:
                        side += [] if _leaves(side, ast.Raise) else copy.deepcopy(rest)
                    sides = [_without_leave(side, end) for side in sides]
                at = end if is_leaving or not rest else ""
                s.body, s.orelse = (self.block(side, at, True) for side in sides)
                out += self._call(s) if is_target else [s]
                if is_leaving:
                    if end == "return" and not is_inner:
                        out += _statements(f"return {_RESULT}", s)
                    return out
                continue
            out.append(_Expressions(self).visit(s))
            last = end if not rest and isinstance(s, ast.If) else ""
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(s, field, None)
                if isinstance(inner, list) and not isinstance(s, _SCOPES):
                    is_loop = isinstance(s, ast.For | ast.While) and field == "body"
                    at = "continue" if is_loop else last
                    setattr(s, field, self.block(inner, at, is_inner and not is_loop))
        return out

    def _as_if(self, s: ast.stmt) -> ast.stmt:
        """Return an `assert` whose test is a target as a branch that raises."""
        if isinstance(s, ast.Assert) and self._is_at(s.test):
            [branch] = _statements("if not 0: raise AssertionError()", s)
            assert isinstance(branch, ast.If) and isinstance(branch.test, ast.UnaryOp)
            assert isinstance(raised := branch.body[0], ast.Raise)
            branch.test.operand = s.test
            assert isinstance(raised.exc, ast.Call)
            raised.exc.args = [s.msg] if s.msg else []
            return branch
        return s

    def _has_target(self, s: ast.stmt) -> bool:
        return any(isinstance(node, ast.If) and self._is_at(node.test) for node in ast.walk(s))

    def _is_at(self, test: ast.expr) -> bool:
        return any(test.lineno <= n <= (test.end_lineno or test.lineno) for n in self.lines)

    def _call(self, s: ast.If) -> list[ast.stmt]:
        self.count, sides = self.count + 1, (s.body, s.orelse)
        assigned = _stored([*sides[0], *sides[1]])
        changed = (_changed(sides[0]) | _changed(sides[1])) - assigned
        for side in sides:
            _check_pure(side, _stored(side) | changed)
        names = sorted(assigned | changed)
        values = "".join(f"{n}, " for n in names)
        reads = "".join(f"(lambda: {n}), " for n in names)
        texts = [
            f"def {_SIDE}{i}({values}): return {HELPERS}['values'](({reads}))" for i in range(2)
        ]
        functions = _statements("\n".join(texts), s)
        for function, side in zip(functions, sides):
            assert isinstance(function, ast.FunctionDef)
            copies = "".join(f"{n} = {HELPERS}['copied']({n})\n" for n in sorted(changed))
            if owners := _owners(side, assigned | changed):
                copies += f"{HELPERS}['owned']({', '.join(sorted(owners))})\n"
            function.body[:0] = [_Supers(self.first).visit(each) for each in side]
            function.body[:0] = _statements(copies, s)
        left = f"({values}) = " if names else ""
        listed = "".join(f"{n!r}, " for n in names)
        rest = f"({reads}), ({listed}), {changed or '()'}"
        text = f"{left}{HELPERS}['branch'](0, {_SIDE}0, {_SIDE}1, {rest})"
        text += "".join(f"\nif {n} is {HELPERS}['ABSENT']: del {n}" for n in names)
        call = _statements(text, s)
        assert isinstance(call[0], ast.Assign | ast.Expr)
        assert isinstance(call[0].value, ast.Call)
        for node in ast.walk(call[0]):  # for a branch around, it changes these
            if isinstance(node, ast.Name) and node.id in changed:
                setattr(node, _IN_PLACE, True)
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
        call = _expression(f"{HELPERS}['choose'](0, lambda: 0, lambda: 0)", node)
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
        call = _expression(f"{HELPERS}['no'](0)", test)
        call.args = [_truth(test.operand)]
        return call
    if isinstance(test, ast.BoolOp):
        name = "both" if isinstance(test.op, ast.And) else "either"
        call = _expression(f"{HELPERS}[{name!r}]()", test)
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
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(value)):
        raise _Refused  # it would assign a name of the lambda
    function = _expression("lambda: 0", value)
    function.body = value
    return function


def _leaves(side: Sequence[ast.stmt], *more: type[ast.stmt]) -> bool:
    """Return whether a side's last statement leaves the branch."""
    return bool(side) and isinstance(side[-1], (_LEAVES, *more))


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
    """Return the names that statements assign, other than by `+=`."""
    nodes = [*_walk(body)]
    added = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    added |= {id(node) for node in nodes if hasattr(node, _IN_PLACE)}
    return {
        node.id if isinstance(node, ast.Name) else node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith(_SIDE)
        or isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and id(node) not in added
    }


def _changed(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names whose values statements change in place, if these are tensors."""
    targets = list[ast.AST]()
    for node in _walk(body):
        if isinstance(node, ast.AugAssign):
            targets.append(node.target)
        elif hasattr(node, _IN_PLACE):
            targets.append(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            targets.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            targets += [node.func.value] if name[-1] == "_" and name[-2:] != "__" else []
    targets = [t.value if isinstance(t, ast.Subscript) else t for t in targets]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _owners(body: Sequence[ast.stmt], own: set[str]) -> set[str]:
    """Return the names of objects whose attributes statements assign. own: names of the sides."""
    nodes = (n for n in _walk(body) if isinstance(n, ast.Attribute))
    objects = [n.value for n in nodes if not isinstance(n.ctx, ast.Load)]
    if not all(isinstance(each, ast.Name) and each.id not in own for each in objects):
        raise _Refused
    return {each.id for each in objects if isinstance(each, ast.Name)}


def _check_pure(body: Sequence[ast.stmt], own: set[str]) -> None:
    """Raise _Refused if a side does more than compute and assign names. own: these names."""
    for node in _walk(body):
        if isinstance(node, _REFUSED) or isinstance(node, ast.Return):
            raise _Refused
        changed = node.value if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in CONTAINER_METHODS else None
        if changed is not None and not (isinstance(changed, ast.Name) and changed.id in own):
            raise _Refused
