"""Checksums of arguments: equal for equal values, whatever their strides; others for others."""

import pytest
import torch
from callers_tensors import DTYPES, tensors, unchanged

from torchgspmd.comm.rank_check import MOST
from torchgspmd.comm.value_check import (
    FLOATS,
    SAMPLE,
    TURN,
    ArgumentValues,
    Reading,
    checksums_of,
    is_close,
    words,
    words_differ,
)


def words_of(*tensors):
    return words(checksums_of(readings_of(*tensors)))


def readings_of(*tensors):
    return ArgumentValues([f"x{i}" for i in range(len(tensors))], tensors).read(tensors)


def differ(a, b):
    return words_differ(words_of(*a), words_of(*b))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_exact(dtype):
    x = torch.arange(90000).view(300, 300).remainder(97).to(dtype)
    one, swapped = x.clone(), x.clone()
    one[123, 45] += 1 if dtype != torch.bool else True
    one[0, 0] = not one[0, 0]
    swapped[[3, 4]] = x[[4, 3]]
    assert not differ([x], [x.clone()]) and not differ([x], [x.t().contiguous().t()])
    assert differ([x], [one]) and (dtype == torch.bool or differ([x], [swapped]))


@pytest.mark.parametrize("rows", [8, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_floats_differ_by_more_than_rounding(dtype, rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 16, dtype=dtype)
    other_row = x.clone()
    other_row[: rows // 4] = torch.randn_like(other_row[: rows // 4])
    assert (x.numel() > FLOATS) == (rows == 2000)
    assert not differ([x], [x.t().contiguous().t()]) and not differ([x], [x * (1 + 1e-6)])
    assert differ([x], [other_row]) and differ([x], [torch.randn_like(x)])
    assert differ([x], [x.roll(1, 0)])


def test_values_without_a_norm():
    for values in ([], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 2.0], [3e38, -3e38]):
        x = torch.tensor(values, dtype=torch.float64)
        assert not differ([x], [x.clone()])
    assert differ([torch.zeros(2)], [torch.ones(2)])


def test_swapped_arguments_differ():
    x, y, i, j = torch.randn(9), torch.randn(9), torch.arange(9), torch.arange(9).flip(0)
    assert differ([x, y], [y, x]) and differ([i, j], [j, i])


def test_large_tensors_take_turns_and_unnamed_ones_are_left_out():
    tensors = [torch.randn(5000) for _ in range(TURN + 3)] + [torch.ones(2), torch.ones(2)]
    names = [f"cache{i}" for i in range(TURN + 3)] + ["token", ""]
    values = ArgumentValues(names, tensors)
    seen = [set(checksums_of(values.read(tensors))) for _ in range(2)]
    assert all(len(names) == TURN + 1 and "token" in names for names in seen)
    assert seen[0] | seen[1] == {*names} - {""}


def test_a_sample_reads_all_of_a_tensor():
    x = torch.zeros(64, 784)
    for row in range(64):
        other = x.clone()
        other[row] = 1.0
        assert differ([x], [other]), row
    assert SAMPLE == 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_read_and_not_written(dtype):
    named = tensors(dtype)
    with unchanged(named):
        for x in named.values():
            assert not differ([x], [x.clone()])
            one, other = (Reading([""], [each], MOST).checksums()[""] for each in (x, x.clone()))
            assert is_close(one, other)
