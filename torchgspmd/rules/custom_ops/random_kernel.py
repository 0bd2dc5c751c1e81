"""random.py's hash in one kernel, for CUDA: each element is written once, and nothing is read.

    before  38 kernels of PyTorch, each over all elements of int32
    after   one kernel of Triton, with the same bits

Triton comes with PyTorch's CUDA builds; without it PyTorch's operations compute the same.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

DIMS = 4  # dimensions that the kernel can take
BLOCK = 1024  # elements for each program in the grid


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _part(index, first, stride):
    place = (index + first).to(tl.int64) * stride
    return (place ^ ((place >> 32) * 0x632BE5AB)).to(tl.uint32)


# Triton would compile anew for each of these that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["low", "high", "stream", "f0", "f1", "f2", "f3", "bound"])
def _hashes(
    out,
    seed,
    n,
    low,
    high,
    stream,
    bound,
    f0,
    f1,
    f2,
    f3,
    s1,
    s2,
    s3,
    w0,
    w1,
    w2,
    w3,
    IS_WIDE: tl.constexpr,
    READS_SEED: tl.constexpr,
    BITS: tl.constexpr,
    IS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if IS_WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = at
    i3, rest = rest % s3, rest // s3
    i2, rest = rest % s2, rest // s2
    i1, i0 = rest % s1, rest // s1
    if IS_WIDE:
        place = _part(i0, f0, w0) + _part(i1, f1, w1) + _part(i2, f2, w2) + _part(i3, f3, w3)
    else:
        place = (i0 + f0) * w0 + (i1 + f1) * w1 + (i2 + f2) * w2 + (i3 + f3) * w3
        place = place.to(tl.uint32)
    if READS_SEED:
        drawn = tl.load(seed)
        low = drawn.to(tl.uint32)
        high = (drawn >> 32).to(tl.uint32)
    key = _mixed((stream.to(tl.uint32) * 0x9E3779B9).to(tl.uint32))
    x = _mixed(place + _mixed(low.to(tl.uint32) ^ key))
    x = _mixed(x ^ _mixed(high.to(tl.uint32) ^ key))
    x = x >> (32 - BITS)
    if IS_MASK:
        tl.store(out + at, (x.to(tl.int32) < bound).to(tl.int8), mask=at < n)
    else:
        unit = x.to(tl.float32) * (1.0 / (1 << BITS))
        tl.store(out + at, unit.to(out.dtype.element_ty), mask=at < n)


def fill(
    out: Tensor,
    seed: Tensor,
    stream: int,
    first: Sequence[int],
    whole: Sequence[int],
    bits: int,
    bound: int | None = None,
) -> bool:
    """Write `uniform`'s numbers, or a mask: whether their bits are below the bound.

    out: contiguous, on CUDA. Returns False, with nothing written, for more dimensions than DIMS.
    """
    merged = merged_dims(out.shape, first, whole)
    if len(merged) > DIMS:
        return False
    merged += [(1, 0, 0)] * (DIMS - len(merged))  # a division by 1 is left out
    sizes, firsts, strides = zip(*merged)
    number = 0 if seed.is_cuda else int(seed.item())
    is_mask = bound is not None
    n = out.numel()
    if n == 0:
        return True
    grid, launch = (triton.cdiv(n, BLOCK),), cast(Any, _hashes)
    target: Any = out.view(torch.int8) if is_mask else out
    with torch.cuda.device(out.device):
        launch[grid](
            target,
            seed if seed.is_cuda else target,
            n,
            _signed(number & 0xFFFFFFFF),
            _signed(number >> 32),
            stream,
            bound or 0,
            *firsts,
            *sizes[1:],
            *strides,
            IS_WIDE=max(n, torch.Size(whole).numel()) >= (1 << 31) - BLOCK,
            # A seed on the card (in a CUDA graph) is read by the kernel: the host cannot.
            READS_SEED=seed.is_cuda,
            BITS=bits,
            IS_MASK=is_mask,
            BLOCK=BLOCK,
        )
    return True


def _signed(x: int) -> int:
    return x - (1 << 32) if x > 0x7FFFFFFF else x


def merged_dims(
    shape: Sequence[int], first: Sequence[int], whole: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return (size, first, stride) for as few dimensions as give the same positions.

    A dimension that is whole joins the one before it. Positions from 2^31 on are hashed by
    dimension, so these stay apart.
    """
    step, result = 1, list[tuple[int, int, int]]()
    is_small = torch.Size(whole).numel() < 1 << 31
    for size, start, total in zip(reversed(shape), reversed(first), reversed(whole)):
        last = result[-1] if result else None
        if last and is_small and last[1] == 0 and last[0] * last[2] == step:
            result[-1] = (size * last[0], start * last[0], last[2])
        elif size > 1 or start:
            result.append((size, start, step))
        step *= total
    return result[::-1]
