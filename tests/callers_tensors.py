"""Tensors of a caller in all dtypes and layouts, and whether a call has left them as they were."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import Tensor

from torchgspmd.comm.value_check import FLOATS, INTEGERS
from torchgspmd.dtensor.storage import local_of

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")),
]
LAYOUTS = {
    "contiguous": lambda d: drawn(d, 6, 4),
    "transposed": lambda d: drawn(d, 4, 6).t(),
    "strided": lambda d: drawn(d, 12, 8)[::2, ::2],
    "expanded": lambda d: drawn(d, 1, 4).expand(6, 4),
    "overlapping": lambda d: drawn(d, 12).as_strided((6, 4), (1, 1), 1),
    "0-d": lambda d: drawn(d),
    "empty": lambda d: drawn(d, 0, 4),
    "more than FLOATS": lambda d: drawn(d, FLOATS + 2, 1),
    "more than INTEGERS": lambda d: drawn(d, INTEGERS // 2 + 1, 2) if d.itemsize < 4 else None,
    "conjugated": lambda d: drawn(d, 6, 4).conj() if d.is_complex else None,
    "negated": lambda d: drawn(d, 6, 4).conj().imag if d.is_complex else None,
}


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor of random bits: all values, with infinities and NaN of many payloads."""
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype == torch.bool:
        bits &= 1
    x = bits.view(dtype).view(shape)
    reals = torch.view_as_real(x) if dtype.is_complex else x
    if reals.numel() and reals.is_floating_point() and reals.element_size() > 1:
        reals[(0,) * reals.dim()] = -math.inf
    return x


def tensors(*dtypes: torch.dtype) -> dict[str, Tensor]:
    """Return tensors of the dtypes in all layouts, the same on every rank."""
    torch.manual_seed(0)
    made = {f"{dtype} {name}": make(dtype) for dtype in dtypes for name, make in LAYOUTS.items()}
    return {name: x for name, x in made.items() if x is not None}


def bits(x: Tensor) -> Tensor:
    """Return the bytes of the whole memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(local_of(x).detach().untyped_storage())


def values(x: Tensor) -> Tensor:
    """Return the bits of the values of a tensor, in their order."""
    x = x.resolve_conj().resolve_neg().contiguous().view(-1)
    return x.view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)


@contextmanager
def unchanged(named: dict[str, Tensor]):
    """Fail if the block changes a bit, or the version, of a tensor."""
    before = {name: (bits(x).clone(), local_of(x)._version) for name, x in named.items()}
    yield
    changed = [
        name
        for name, x in named.items()
        if not torch.equal(bits(x), before[name][0]) or local_of(x)._version != before[name][1]
    ]
    assert not changed, changed
