"""Products in float8: torch._scaled_mm of shards, and tensors of libraries that call it."""

import pytest
import torch
import torch.nn.functional as F
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


def in_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 numbers, and a power of two for each 32 of a row, as MX has them."""
    blocks = x.unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(-1) / torch.finfo(E4M3).max).log2().ceil().exp2()
    return (blocks / scale.unsqueeze(-1)).flatten(1).to(E4M3), scale.to(torch.float8_e8m0fnu)


def in_tiles(scale: Tensor) -> Tensor:
    """Return scales in the order that a card wants, as torchao's to_blocked does."""
    (rows, columns), (r, c) = scale.shape, (-(-n // tile) for n, tile in zip(scale.shape, (128, 4)))
    whole = torch.zeros(r * 128, c * 4, dtype=scale.dtype)
    whole[:rows, :columns] = scale
    tiles = whole.view(r, 128, c, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4).transpose(1, 2)
    return tiles.reshape(-1, 32, 16).flatten()


def by_blocks(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    (a, scale_a), (b, scale_b) = in_blocks(x), in_blocks(w)
    scales = in_tiles(scale_a), in_tiles(scale_b)
    return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.float32)


def by_recipe(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    (a, scale_a), (b, scale_b) = in_blocks(x), in_blocks(w)
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scales = in_tiles(scale_a), recipe, in_tiles(scale_b), recipe
    return F.scaled_mm(a, b.t(), *scales, swizzle, swizzle, bias, output_dtype=torch.float32)


def dequantized(x: Tensor) -> Tensor:
    numbers, scale = in_blocks(x)
    return numbers.float() * scale.float().repeat_interleave(32, 1)


# F.scaled_mm came with torch 2.10.
@pytest.mark.parametrize("product", [by_blocks, *([by_recipe] if hasattr(F, "scaled_mm") else [])])
@pytest.mark.parametrize("sizes", [(7, 160, 9), (256, 128, 6)])  # m, k, n
@pytest.mark.parametrize(
    "specs", [("data _", "model _"), ("_ data", "_ data"), ("data model",) * 2]
)
def test_products_of_shards_in_blocks(product, sizes, specs):
    torch.manual_seed(0)
    x, w, bias = torch.randn(*sizes[:2]), torch.randn(*sizes[:0:-1]), torch.randn(sizes[2])
    plan = gspmd.plan(product, x, w, bias, mesh=MESH, in_specs=(*specs, "_"))
    names = [str(row.op) for row in plan.replicated_ops]
    assert not any("scale" in name or "permute" in name for name in names), names
    if specs[0] == "data _":
        assert not plan.sent_bytes
    expected = dequantized(x) @ dequantized(w).t() + bias
    assert_same(plan.simulate(x, w, bias), expected, terms=sizes[1])
    assert plan.verify().complete, plan.verify()


@pytest.mark.parametrize("k, axes", [(256, "data+model"), (96, "data")])
def test_a_shard_of_k_has_whole_blocks_and_their_scales(k, axes):
    """Eight blocks on four devices; three on two: no block is cut."""
    torch.manual_seed(0)
    (a, scale_a), (b, scale_b) = in_blocks(torch.randn(7, k)), in_blocks(torch.randn(9, k))
    product = torch.ops.torchgspmd.block_scaled_mm

    def summed(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return product(a, b.t(), scale_a, scale_b, torch.float32)

    args = a, b, scale_a.float(), scale_b.float()
    specs = (f"_ {axes}", f"_ {axes}") * 2
    plan = gspmd.plan(summed, *args, mesh=MESH, in_specs=specs, out_specs="_ _")
    kinds = {each.kind for each in plan.collectives}
    assert k == 96 or kinds == {"all_reduce"}, plan
    expected = (a.float() * args[2].repeat_interleave(32, 1)) @ (
        b.float() * args[3].repeat_interleave(32, 1)
    ).t()
    assert_same(plan.simulate(*args), expected, terms=k)


@torch.library.custom_op("torchao::triton_to_mxfp8_dim0", mutates_args=())
def by_row(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "") -> tuple[Tensor, Tensor]:
    """Stand in for torchao's kernel, with its name and its results' shapes."""
    return in_blocks(x)


@torch.library.custom_op("torchao::triton_to_mxfp8_dim1", mutates_args=())
def by_column(
    x: Tensor, inner_block_size: int = 32, scaling_mode: str = ""
) -> tuple[Tensor, Tensor]:
    numbers, scale = in_blocks(x.t())
    return numbers.t().clone(), scale


@torch.library.custom_op("torchao::mxfp8_quantize", mutates_args=())
def quantize(
    x: Tensor, rowwise: bool, colwise: bool, dim_x: int, dim_y: int, form: str, mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = x.new_empty(0)
    numbers, scale = in_blocks(x) if rowwise else (none.to(E4M3), none.clone())
    turned, other = in_blocks(x.t()) if colwise else (none.to(E4M3), none.clone())
    turned = turned.t().clone() if colwise else turned
    return numbers, turned, scale.unsqueeze(-1) if rowwise else scale, other


for _op in (by_row, by_column, quantize):
    _op.register_fake(_op._init_fn)


@pytest.mark.parametrize("kind", ["dim0", "dim1", "row", "column", "both"])
@pytest.mark.parametrize("spec", ["data model", "model data"])
def test_kernels_of_torchao_keep_their_blocks(kind, spec):
    def scaled(x: Tensor) -> tuple[Tensor, ...]:
        if kind in ("dim0", "dim1"):
            return getattr(torch.ops.torchao, f"triton_to_mxfp8_{kind}")(x, 32, "rceil")
        asked = kind in ("row", "both"), kind in ("column", "both")
        found = torch.ops.torchao.mxfp8_quantize(x, *asked, 1, 32, "e4m3", "rceil")
        return tuple(t for t in found if t.numel())

    torch.manual_seed(0)
    x = torch.randn(128, 192)
    plan = gspmd.plan(scaled, x, mesh=MESH, in_specs=spec)
    assert not plan.sent_bytes and not plan.replicated_ops, plan
    for got, want in zip(plan.simulate(x), scaled(x)):
        assert torch.equal(got.float(), want.float())


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
