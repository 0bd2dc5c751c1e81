"""The table of operators that programs may have; a text names no others.

aten.mm.default             has a rule, or a row in the table of rewrites
aten.bucketize.Tensor       has none, and runs replicated: it writes to no argument
torchgspmd.einsum.default   is ours
shop.total.default          of a user's library, with a rule by gspmd.rule
"""

from __future__ import annotations

import re
from typing import Any

from ...compat.operators import find
from ...compat.private_apis import OpOverload
from ...rules.registry import RULES, rule_function

_NAME = re.compile(r"([a-zA-Z]\w*)\.(\w+)\.(\w+)", re.ASCII)
_OF_TORCH = ("aten", "prims")
_OWN = "torchgspmd"


def operator_of(name: str) -> OpOverload | None:
    """Return the operator of a name such as aten.mm.default; None if no program has it."""
    match = _NAME.fullmatch(name)
    # torch.ops makes an entry for every namespace that it is asked for: unknown ones end here.
    if match is None or not _has_rules(match[1]):
        return None
    op = find(*match.groups())
    return op if isinstance(op, OpOverload) and str(op) == name and is_emitted(op) else None


def is_emitted(op: OpOverload) -> bool:
    """Return whether a program may have an operator."""
    if op.namespace == _OWN or rule_function(op) is not None:
        return True
    return op.namespace in _OF_TORCH and _is_pure(op)


def _has_rules(namespace: str) -> bool:
    """Return whether a library has operators in the table."""
    if namespace == _OWN or namespace in _OF_TORCH:
        return True
    return any(
        namespace == (key.partition("::")[0] if isinstance(key, str) else key.namespace)
        for key in RULES
        if isinstance(key, (str, OpOverload))
    )


def _is_pure(op: OpOverload) -> bool:
    """Return whether an operator computes with tensors, and writes to no argument.

    aten.from_file reads a file: its text is no option of a tensor.
    """
    arguments: Any = op._schema.arguments
    types = [str(each.type) for each in arguments]
    # Without a tensor, a text could make the operator read a file or the environment.
    return not op._schema.is_mutable and (
        any("Tensor" in each for each in types) or "str" not in types
    )
