"""Order in memory: the results of an operation are those of the trace, whatever a run's order is.

Operands are permuted, and have gaps. An operation either gives the same results on them, or its
rule says that they depend on the order (rules/registry.py).
"""

from __future__ import annotations

import warnings

import pytest
import torch
from samples import SAMPLES
from torch import Tensor
from torch.utils import _pytree as pytree

from torchgspmd.rules.decompositions import RENAMED
from torchgspmd.rules.registry import _ORDERED, is_packed, ordered_arguments


def orders(x: Tensor) -> dict[str, Tensor]:
    """The same elements in other orders in memory."""
    found = {}
    if x.dim() > 1:
        back = list(reversed(range(x.dim())))
        found["reversed"] = x.permute(back).contiguous().permute(back)
        found["rolled"] = x.movedim(0, -1).contiguous().movedim(-1, 0)
    if x.dim() == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    if x.dim():
        gaps = x.new_zeros(*x.shape, 2)
        gaps[..., 0] = x
        found["gaps"] = gaps[..., 0]
    return found


def results(op, flat, tree) -> list:
    torch.manual_seed(1)
    args, kwargs = pytree.tree_unflatten(flat, tree)
    return pytree.tree_leaves(op(*args, **kwargs))


def same(a: Tensor, b: Tensor) -> bool:
    wide = torch.complex128 if b.is_complex() else torch.float64
    return a.shape == b.shape and torch.allclose(
        a.to(wide), b.to(wide), rtol=1e-4, atol=1e-5, equal_nan=True
    )


def arguments_by_operand(op, args, kwargs) -> list[str]:
    """The name of the argument of each tensor operand."""
    names = [a.name for a in op._schema.arguments]
    named = [*zip(names, args), *kwargs.items()]
    return [name for name, x in named for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("op", [op for op in SAMPLES if op not in RENAMED], ids=str)
def test_results_do_not_depend_on_an_order_that_no_rule_declares(op):
    for make in SAMPLES[op]:
        args, kwargs = make()
        names = arguments_by_operand(op, args, kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs))
        flat = [x.contiguous() if isinstance(x, Tensor) else x for x in flat]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = [x.clone() if isinstance(x, Tensor) else x for x in results(op, flat, tree)]
            operands = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
            for name, i in zip(names, operands):
                if name in ordered_arguments(op):
                    continue
                for what, x in orders(flat[i]).items():
                    got = results(op, [*flat[:i], x, *flat[i + 1 :]], tree)
                    for j, (a, b) in enumerate(zip(got, want)):
                        if isinstance(b, Tensor):
                            assert same(a, b), f"result {j} depends on {name}: {what}"
                            assert not is_packed(op) or a.is_contiguous()


@pytest.mark.parametrize("op", [op for op in _ORDERED if op in SAMPLES], ids=str)
def test_results_depend_on_each_order_that_a_rule_declares(op):
    differs = {name: False for name in ordered_arguments(op)}
    for make in SAMPLES[op]:
        args, kwargs = make()
        names = arguments_by_operand(op, args, kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs))
        want = [x.clone() if isinstance(x, Tensor) else x for x in results(op, flat, tree)]
        operands = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        for name, i in zip(names, operands):
            for x in orders(flat[i]).values() if name in differs else ():
                try:
                    got = results(op, [*flat[:i], x, *flat[i + 1 :]], tree)
                except RuntimeError:
                    differs[name] = True
                    continue
                pairs = [(a, b) for a, b in zip(got, want) if isinstance(b, Tensor)]
                differs[name] |= not all(same(a, b) for a, b in pairs)
    assert all(differs.values()), differs
