"""Products in float8: torch._scaled_mm of shards, and tensors of libraries that call it."""

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)
E4M3 = torch.float8_e4m3fn


def quantized(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return float8 numbers, and the scale of all or of each row or column."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.float().clamp(1e-12) / torch.finfo(E4M3).max
    return (x / scale).to(E4M3), scale


class Product(nn.Module):
    def __init__(self, by_row: bool, bias: Tensor | None):
        super().__init__()
        self.by_row, self.bias = by_row, bias

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        a, scale_a = quantized(x, 1 if self.by_row else None)
        b, scale_b = quantized(w, 1 if self.by_row else None)
        return torch._scaled_mm(
            a, b.t(), scale_a, scale_b.t(), bias=self.bias, out_dtype=torch.float32
        )


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "specs", [("data _", "model _"), ("_ data", "_ data"), ("data model",) * 2]
)
def test_products_of_shards(by_row, bias, specs):
    torch.manual_seed(0)
    x, w = torch.randn(7, 21), torch.randn(9, 21)
    model = Product(by_row, torch.randn(9) if bias else None)
    plan = gspmd.plan(model, x, w, mesh=MESH, in_specs=specs)
    assert not plan.replicated_ops
    # CPUs of torch 2.9 take one number as a scale, so the product is written out.
    (a, scale_a), (b, scale_b) = (quantized(t, 1 if by_row else None) for t in (x, w))
    expected = (a.float() * scale_a) @ (b.float() * scale_b).t()
    expected = expected if model.bias is None else expected + model.bias
    assert_same(plan.simulate(x, w), expected, terms=21)
    assert plan.verify().complete, plan.verify()


class Boxed(Tensor):
    """A tensor around another one that knows operations of PyTorch alone, as libraries have."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        assert func.namespace == "aten", func
        inner = [x.inner if isinstance(x, Boxed) else x for x in args]
        return func(*inner, **(kwargs or {}))


def test_a_library_is_asked_for_its_own_operations():
    def product(x, w):
        return torch.mm(Boxed(x * 2), w) + torch.nn.functional.linear(x, Boxed(w.t()))

    x, w = torch.randn(6, 4), torch.randn(4, 8)
    plan = gspmd.plan(product, x, w, mesh=MESH, in_specs=("data _", "_ model"))
    assert not plan.sent_bytes
    torch.testing.assert_close(plan.simulate(x, w), 3 * x @ w)
