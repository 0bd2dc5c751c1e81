"""`dynamic=` for a size that another tensor fixes: right at each size, or an error with its name.

A case is an operation of two tensors, one of which has a dynamic dimension that has to equal one of
the other's. PyTorch compares them in words of its own for each operation.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

MESH = Mesh(a=2)
N, M, K = 6, 4, 8  # rows, other rows, the size that is fixed


def numbers(*shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).cos().reshape(shape)


def labels(count: int) -> Tensor:
    return torch.arange(count) % 3


WEIGHT = numbers(K)
# Name: a function of x and other tensors, x's shape, the dimension, the other tensors.
CASES = {
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), (N, K), 1, [WEIGHT]),
    "batch_norm_eval": (lambda x, m, v: F.batch_norm(x, m, v), (N, K), 1, [WEIGHT, WEIGHT.abs()]),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (N, K, 5), 1, [WEIGHT]),
    "cdist": (torch.cdist, (N, K), 1, [numbers(M, K)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), (N, K), 1, [numbers(K, M)]),
    "bilinear": (F.bilinear, (N, K), 1, [numbers(N, M), numbers(3, K, M)]),
    "bilinear_rows": (F.bilinear, (N, K), 0, [numbers(N, M), numbers(3, K, M)]),
    "repeats": (lambda x, n: x.repeat_interleave(n, 0), (K, M), 0, [labels(K)]),
    "prelu": (F.prelu, (N, K), 1, [WEIGHT]),
    "class_weights": (lambda x, w: F.cross_entropy(x, labels(N), w), (N, K), 1, [WEIGHT.abs()]),
    "bce": (F.binary_cross_entropy_with_logits, (N, K), 1, [numbers(N, K).abs()]),
    "trapezoid": (torch.trapezoid, (N, K), 1, [WEIGHT]),
    "linear": (F.linear, (N, K), 1, [numbers(M, K)]),
    "product": (torch.matmul, (N, K), 1, [numbers(K, M)]),
    "addition": (torch.add, (N, K), 1, [WEIGHT]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (K,), w), (N, K), 1, [WEIGHT]),
    "convolution": (F.conv1d, (N, K, 5), 1, [numbers(M, K, 3)]),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (N, K, 5), 1, [WEIGHT]),
    "kron": (torch.kron, (N, K), 1, [numbers(2, 2)]),
    "dot": (torch.dot, (K,), 0, [WEIGHT]),
    "attention_mask": (
        lambda x, m: F.scaled_dot_product_attention(x, x, x, m),
        (1, 2, K, 4),
        2,
        [numbers(K, K)],
    ),
}
# Which PyTorch refuses with a dynamic size, as this package's attention does.
PINNED = [*[*CASES][:12], "attention_mask"]


@pytest.mark.parametrize("name", CASES)
def test_a_size_that_another_tensor_fixes(name: str) -> None:
    """The plan is right for the size and refuses others, or it is an error that names the size."""
    fn, shape, dim, others = CASES[name]
    x, draw = numbers(*shape), random.Random(name)

    def program(x: Tensor, *others: Tensor) -> Tensor:
        return fn(x, *others)

    options = {"mesh": MESH, "in_specs": tuple([None] * (1 + len(others)))}
    try:
        plan = gspmd.plan(program, x, *others, **options, dynamic={"x": {dim}})
    except ShardingError as error:
        assert error.where and error.where.startswith(("tests/", "/", "test_")) and error.fix
        assert "dynamic=" in error.fix
        if name in PINNED:
            assert str(error).startswith(f"dimension {dim} of 'x' cannot be dynamic"), error
            assert "u0" not in str(error) and "Error: " in (error.why or "")
        # The fix, tried.
        plan = gspmd.plan(program, x, *others, **options)
    else:
        assert name not in PINNED
        other = [*shape]
        other[dim] = draw.choice([n for n in range(2, 12) if n != shape[dim]])
        try:
            expected = fn(numbers(*other), *others)
        except RuntimeError:
            with pytest.raises((ShardingError, RuntimeError)):
                plan.simulate(numbers(*other), *others)
        else:
            assert_same(plan.simulate(numbers(*other), *others), expected)
    assert_same(plan.simulate(x, *others), fn(x, *others))


def test_only_the_size_that_is_fixed_is_named() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return F.batch_norm(x, WEIGHT, WEIGHT.abs()).sum(0) + y.sum()

    with pytest.raises(ShardingError) as raised:
        gspmd.plan(
            program, numbers(N, K), numbers(M), mesh=MESH, dynamic={"x": {0: "b", 1: "c"}, "y": {0}}
        )
    assert raised.value.what == "dimension 1 of 'x' cannot be dynamic"
    assert "running_mean should contain c elements not 8" in (raised.value.why or "")


def test_an_error_without_dynamic_sizes_is_the_programs_own() -> None:
    def program(x: Tensor) -> Tensor:
        return F.batch_norm(x, numbers(K + 1), numbers(K + 1))

    with pytest.raises(RuntimeError, match=f"should contain {K} elements not {K + 1}"):
        gspmd.plan(program, numbers(N, K), mesh=MESH, dynamic={"x": {1}})
