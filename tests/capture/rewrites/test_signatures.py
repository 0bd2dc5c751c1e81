"""Every rewrite has the signature of its function of torch: by position, in all overloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchgspmd.features.tables import FEATURES
from torchgspmd.rules.rewrites import REWRITES

assert FEATURES  # their rows are in the table
CALLED = ("product", "value", "vmap", "body")  # the levels whose functions a program calls


def forms(target: Callable) -> list[tuple[int, dict[str, Any]]]:
    """(number of positional parameters, defaults by name) for each form of a function of torch."""
    if inspect.isfunction(target):
        # F.max_pool2d chooses between two functions by `return_indices`.
        target = inspect.getclosurevars(target).nonlocals.get("if_true", target)
        parameters = inspect.signature(target).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return [
            (
                sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters),
                defaults,
            )
        ]
    packet = getattr(torch.ops.aten, target.__name__, None)
    result = []
    for overload in packet.overloads() if packet else ():
        arguments = getattr(packet, overload)._schema.arguments
        types = " ".join(str(a.type) for a in arguments)
        # Programs have no named dimensions and no generators; some operators are not torch's.
        if any(a.is_out for a in arguments) or "str" in types or "Generator" in types:
            continue
        if arguments and arguments[0].name != "out":
            defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
            result.append((sum(not a.kwarg_only for a in arguments), defaults))
    return result


ROWS = [
    pytest.param(row.apply, *form, id=f"{level}-{target.__name__}-{form[0]}")
    for (level, target), rows in REWRITES.items()
    if level in CALLED and callable(target)
    for row in rows
    for form in forms(target)
]


@pytest.mark.parametrize("apply, count, defaults", ROWS)
def test_a_rewrite_has_its_functions_signature(apply, count, defaults):
    parameters = inspect.signature(apply).parameters
    inspect.signature(apply).bind(*range(count))
    for name in parameters.keys() & defaults.keys():
        ours, theirs = parameters[name].default, defaults[name]
        assert ours == (tuple(theirs) if isinstance(theirs, list) else theirs), name


def test_no_row_is_left_out():
    """All functions but operators of loops have a signature to compare with."""
    assert len(ROWS) > 250
