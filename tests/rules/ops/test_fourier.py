"""Fourier transforms along sharded dimensions: numbers, gradients, bytes beside a lower bound."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from torch import Tensor, fft

import torchgspmd as gspmd

MESH, ALL = gspmd.Mesh(m=8), 7 / 8  # a device keeps 1/8 of what moves


def numbers(*shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def spectrum(x: Tensor) -> Tensor:
    """The gradient of a loss on the spectrum, so forward and backward."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(fft.fft2(leaf).abs().square().sum(), leaf)[0]


REAL = torch.float32
# arguments: function, operand, layout, of the result; bytes over those of the operand of a device.
# Where two dimensions are transformed, each is whole once: the array moves once, and once more if
# the result has the layout of the operand.
TRANSFORMS = {
    "2-D": (fft.fft2, numbers(16, 24), "m _", "_ m", 1),
    "2-D, back": (fft.fft2, numbers(16, 24), "m _", "m _", 2),
    "2-D, last dimension": (fft.ifft2, numbers(16, 24), "_ m", "_ m", 2),
    "3-D": (lambda x: fft.ifftn(x, norm="ortho"), numbers(16, 8, 6), "m _ _", "_ m _", 1),
    "real": (fft.fft2, numbers(16, 24, dtype=REAL), "m _", "_ m", 2),  # complex numbers move
    "real and back": (spectrum, numbers(16, 24, dtype=REAL), "m _", "m _", 4),
    "uneven": (fft.rfft2, numbers(12, 10, dtype=REAL), "m _", "m _", None),
    "to real": (lambda x: fft.irfft2(x, s=(12, 14)), numbers(12, 8), "m _", "m _", None),
    # A vector: positions n + m k, frequencies of one order, then of the other, and in place.
    "vector": (fft.ifft, numbers(128), "m", "m", 3),
    "vector of real": (fft.fft, numbers(128, dtype=REAL), "m", "m", 1 + 2 + 2),
    "vectors": (lambda x: fft.fft(x, dim=1), numbers(3, 64, 2), "_ m _", "_ m _", 3),
    "uneven vector": (fft.fft, numbers(100), "m", "m", None),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_moves_its_operand_and_gathers_nothing(name: str) -> None:
    function, x, spec, result, moves = TRANSFORMS[name]
    plan = gspmd.plan(function, x, mesh=MESH, in_specs=spec, out_specs=result)
    assert_same(plan.simulate(x, _poison=True), function(x), name)
    if moves is not None:
        assert plan.sent_bytes == moves * ALL * x.nbytes / 8


def test_a_vector_is_gathered_where_exchanges_send_more() -> None:
    """On two devices three all_to_all move 3/4 of the vector, and a gather 1/2."""
    x = numbers(128)
    plan = gspmd.plan(fft.fft, x, mesh=gspmd.Mesh(m=2), in_specs="m", out_specs="m")
    assert_same(plan.simulate(x), fft.fft(x))
    assert [e.kind for e in plan.collectives] == ["all_gather"]
