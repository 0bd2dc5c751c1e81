"""Stacks of matrices, one for each expert, among a program's parameters."""

from __future__ import annotations

from torch import fx

from ...capture import PARAMETER, Captured, Input
from ...fx_passes.ir import Rules


def expert_stacks(captured: Captured) -> list[Input]:
    """Return the parameters [experts, k, n] whose matrices are multiplied each by its own rows.

    A product may also add up the experts' results. So a parameter as long as a stack, in the same
    module, is one too.
    """
    rules, placeholders = Rules(), captured.graph.find_nodes(op="placeholder")
    pairs = [
        (node, inp)
        for node, inp in zip(placeholders, captured.inputs)
        if inp.kind == PARAMETER and len(inp.shape) == 3
    ]
    places = {_place(inp) for node, inp in pairs if _is_stack(node, 0, rules)}
    return [inp for _, inp in pairs if _place(inp) in places]


def _place(inp: Input) -> tuple[str, int]:
    """Return a parameter's module and its length."""
    return inp.name.rpartition(".")[0], inp.shape[0]


def _is_stack(value: fx.Node, dim: int, rules: Rules) -> bool:
    """Return whether the first product of a value multiplies each part of a dimension by itself."""
    for user in value.users:
        if user.op != "call_function":
            continue
        op = rules.op(user)
        at = op.operands.index(value) if value in op.operands else None
        factors = {*op.rule.operands[at][dim]} if at is not None and op.rule.described else set()
        found = [
            (result, d)
            for result, dims in zip(op.results, op.rule.results)
            for d, names in enumerate(dims)
            if result is not None and not factors.isdisjoint(names)
        ]
        if op.rule.contraction:
            # Rows choose its matrices, or the other operand and the result have the dimension too.
            others = [{f for names in dims for f in names} for dims in op.rule.operands]
            if factors & op.rule.chosen or found and factors & set.intersection(*others):
                return True
        elif len(op.operands) == 1 and any(_is_stack(*place, rules) for place in found):
            return True
    return False
