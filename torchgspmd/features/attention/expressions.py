"""Expressions of elementwise operations, as flex_attention's functions are written.

    aten.add.Tensor(score, aten.mul.Tensor(aten.index.Tensor(u0, [h]), aten.sub.Tensor(k, q)))

A text may come from a saved plan, so it is checked before it is evaluated. The trees also say which
buffers are read, and where.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch

from ...compat.operators import aten, find
from ...compat.private_apis import OpOverload
from ...errors import ShardingError
from ...rules.ops.pointwise import named

# Operations besides elementwise ones whose operands and results are 0-d.
OF_NO_DIMENSION = {
    *named("scalar_tensor full new_ones new_zeros new_full ones zeros ones_like zeros_like"),
    *named("full_like detach alias clone _to_copy lift_fresh_copy"),
    *named("floor_divide"),  # elementwise, though torch does not tag it so
}
_VARIABLE = re.compile(r"b|h|q|k|score|grad|inf|nan|[ut]\d+")
_PLAIN = (bool, int, float, str, type(None))


@cache
def parsed(text: str) -> ast.Expression:
    """Return an expression's tree. Its text may come from a saved plan, so it is checked.

    Raises:
        ShardingError: It uses more than elementwise operations.
    """
    try:
        tree = ast.parse(text or "0", mode="eval")
        if _is_expression(tree.body):
            return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ShardingError.here(
        "a function of flex_attention is no expression of elementwise operations",
        why=f"it is {text[:80]!r}",
        fix="plan the model again",
    )


@cache
def compiled(text: str, local: tuple[tuple[int, int], ...] = ()) -> CodeType:
    """Return an expression's code.

    local: (buffer, dimension) pairs that are sharded; a position there counts from the shard on.
    """
    tree = copy.deepcopy(parsed(text))
    for buffer, index in reads_of(tree) if local else ():
        for d, place in enumerate(index):
            if (buffer, d) in local and isinstance(place, ast.Name):
                index[d] = ast.copy_location(ast.Name(f"{place.id}_", ast.Load()), place)
    return compile(tree, "<flex_attention>", "eval")


def _is_expression(node: ast.AST) -> bool:
    """Return whether code consists of elementwise operators, numbers and variables."""
    if isinstance(node, ast.Constant):
        return type(node.value) in _PLAIN
    if isinstance(node, ast.Name):
        return _VARIABLE.fullmatch(node.id) is not None
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_expression(node.operand)
    if isinstance(node, ast.List):
        return all(map(_is_expression, node.elts))
    if isinstance(node, ast.NamedExpr):
        return _is_expression(node.target) and _is_expression(node.value)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return isinstance(vars(torch).get(node.attr), torch.dtype)
    if not isinstance(node, ast.Call) or any(each.arg is None for each in node.keywords):
        return False
    values = [*node.args, *(each.value for each in node.keywords)]
    return is_elementwise(_operator(node.func)) and all(map(_is_expression, values))


def reads_of(tree: ast.AST) -> Iterator[tuple[int, list[ast.expr]]]:
    """Yield each read of a buffer: its number and its index. A buffer as it stands has none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id.startswith("u"):
            yield int(node.id[1:]), []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "aten.index.Tensor":
            buffer, index = node.args
            if isinstance(buffer, ast.Name) and isinstance(index, ast.List):
                yield int(buffer.id[1:]), index.elts
        if isinstance(node, ast.List) and len(node.elts) == 3:
            buffer, index, _ = node.elts
            if isinstance(buffer, ast.Constant) and isinstance(index, ast.List):
                yield int(buffer.value), index.elts  # pyright: ignore[reportArgumentType]


@cache
def shard_dims(mask: str, score: str, gradient: str) -> dict[tuple[int, int], str]:
    """Return the (buffer, dimension) pairs that only b, only h or only q indexes, and which.

    A mask's buffers have none: every device bounds the whole mask.
    """
    of_mask = {i for i, _ in reads_of(parsed(mask))}
    found: dict[tuple[int, int], set[str]] = {}
    for buffer, index in (read for text in (score, gradient) for read in reads_of(parsed(text))):
        for d, place in enumerate(index if buffer not in of_mask else ()):
            found.setdefault((buffer, d), set()).add(ast.unparse(place))
    names = {key: next(iter(places)) for key, places in found.items() if len(places) == 1}
    return {key: name for key, name in names.items() if name in ("b", "h", "q")}


@cache
def learned_buffers(gradient: str) -> tuple[int, ...]:
    """Return the numbers of the buffers that need a gradient."""
    return tuple(sorted({ast.literal_eval(buffer) for buffer, _ in _terms(gradient)}))


def _terms(gradient: str) -> list[tuple[ast.expr, list[ast.expr]]]:
    """Return the buffer and the index of each entry that needs a gradient."""
    body = parsed(gradient).body
    terms: list[Any] = body.elts[1:] if isinstance(body, ast.List) else []
    return [(buffer, index.elts) for buffer, index, _ in (term.elts for term in terms)]


def _operator(node: ast.AST) -> object:
    """Return the operator that a name such as aten.ge.Tensor means, or None."""
    names = ast.unparse(node).split(".")
    if len(names) != 3 or names[0] != "aten" or not all(map(str.isidentifier, names)):
        return None
    return find(*names)


def is_elementwise(op: object) -> bool:
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or op is aten.index.Tensor or op in OF_NO_DIMENSION


@cache
def entries_apart(gradient: str) -> list[bool]:
    """Return for each learned entry whether different positions have different entries."""
    places = [[*map(ast.unparse, index)] for _, index in _terms(gradient)]
    return [len({*each}) == len(each) and {*each} <= {*"bhqk"} for each in places]
