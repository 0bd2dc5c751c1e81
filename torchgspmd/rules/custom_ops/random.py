"""Random numbers by an element's global position, so that a device draws its shard only.

Each operation that draws takes one seed from PyTorch's generator. It is equal on all ranks. The
number at position i hashes the seed and i: two rounds of MurmurHash3's finalizer (Appleby, public
domain), each keyed by half the seed. It is a counter-based generator, as in Random123 (Salmon et
al., Parallel random numbers: as easy as 1, 2, 3, 2011).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.operators import custom_op

_BLOCK = 1 << 15  # elements hashed at a time on a CPU, so that they stay in its cache
# Bits of a significand: a number with so many is exact, and below 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_MASK_BITS = _BITS[torch.float32]
_LOW = 0xFFFFFFFF


@custom_op("draw_seed", tags=(torch.Tag.nondeterministic_seeded,))
def draw_seed() -> Tensor:
    """Draw 63 bits: from the CPU's generator, or in a CUDA graph the card's."""
    return torch.randint(2**63 - 1, (), device=_where_seeds_are())


@draw_seed.register_fake
def _() -> Tensor:
    return torch.empty((), dtype=torch.int64)


@custom_op("draw_seeds", tags=(torch.Tag.nondeterministic_seeded,))
def draw_seeds(shape: Sequence[int]) -> Tensor:
    """Return a seed for each loop iteration."""
    return torch.randint(2**63 - 1, [*shape], device=_where_seeds_are())


def _where_seeds_are() -> str:
    """Return the card while a CUDA graph is captured: each replay draws anew there."""
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return "cuda" if is_captured else "cpu"


@draw_seeds.register_fake
def _(shape: Sequence[int]) -> Tensor:
    return torch.empty([*shape], dtype=torch.int64)


DRAW_SEED, DRAW_SEEDS = draw_seed._opoverload, draw_seeds._opoverload


class Shard(NamedTuple):
    """A part with a `shape` at `first`, in a tensor shaped `whole`."""

    shape: Sequence[int]
    first: Sequence[int]
    whole: Sequence[int]


_SHARD = "SymInt[] shape, SymInt[] first, SymInt[] whole"


@custom_op(
    "uniform",
    schema=f"(Tensor seed, SymInt stream, {_SHARD}, ScalarType dtype, Device device, bool native) "
    "-> Tensor",
)
def uniform(seed: Tensor, stream: int, *rest: Any) -> Tensor:
    """Return numbers in [0, 1) for a shard.

    A seed's streams are independent. native: draw by PyTorch's generator for the device, seeded
    anew for every shard. That is faster on some devices, but the numbers depend on the mesh. Either
    way, shards that begin at the same position are equal.
    """
    shard, (dtype, device, native) = Shard(*rest[:3]), rest[3:]
    shape, first, whole = shard
    if device.type == "cuda" and not native and dtype != torch.float64 and (fill := _kernel()):
        out = torch.empty(shape, dtype=dtype, device=device)
        if fill(out, seed, stream, first, whole, _BITS[dtype]):
            return out
    keys = _keys(int(seed.item()), stream)
    if native:
        place = sum(start * stride for start, stride in zip(first, _strides(whole)))
        # The shard's first position, so that copies of one shard are equal.
        generator = torch.Generator(device).manual_seed((keys[0] << 31 ^ keys[1]) + place)
        return torch.rand(shape, dtype=dtype, device=device, generator=generator)
    bits = _BITS[dtype]
    if bits <= 32:
        return _to_unit(_hash(keys, shard, device), bits, dtype)
    # A hash has 32 bits, so float64 takes 26 from one and 27 from another.
    high, low = (
        _hash(_keys(int(seed.item()), stream * 2 + i + 0x4000), shard, device) for i in range(2)
    )
    return _to_unit(high, 26, dtype) + _to_unit(low, 27, dtype) * 2.0**-26


@uniform.register_fake
def _(seed: Tensor, stream: int, shape: Sequence[int], *options: Any) -> Tensor:
    _, _, dtype, device, _ = options
    return torch.empty(shape, dtype=dtype, device=device)


@custom_op(
    "keep_mask", schema=f"(Tensor seed, float p, {_SHARD}, Device device, bool native) -> Tensor"
)
def keep_mask(seed: Tensor, p: float, *rest: Any) -> Tensor:
    """Return a mask for a shard, as `uniform` has it: True where dropout keeps an element.

    p: the probability that it does not. One byte an element.
    """
    shard, (device, native) = Shard(*rest[:3]), rest[3:]
    if native:
        return uniform(seed, 0, *shard, torch.float32, device, True) < 1 - p
    return dropout_mask(seed, p, shard, device)


@keep_mask.register_fake
def _(seed: Tensor, p: float, shape: Sequence[int], *options: Any) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=options[2])


def dropout_mask(seed: Tensor, p: float, shard: Shard, device: torch.device) -> Tensor:
    """Compute `keep_mask` past PyTorch's operator registry: stream 0 of `uniform` < 1 - p."""
    bound = _bound(p)
    if device.type == "cuda" and (fill := _kernel()):
        kept = torch.empty(shard.shape, dtype=torch.bool, device=device)
        if fill(kept, seed, 0, shard.first, shard.whole, _MASK_BITS, bound):
            return kept
    hashes = _hash(_keys(int(seed.item()), 0), shard, device)
    return _shifted(hashes, _MASK_BITS) < bound


def _bound(p: float) -> int:
    """Return the least n for which n / 2**_MASK_BITS is 1 - p or more.

    1 - p is rounded to float32, in which `uniform` would be compared.
    """
    kept = torch.tensor(1 - p, dtype=torch.float32).item()
    return math.ceil(kept * 2**_MASK_BITS)


@functools.cache
def _kernel() -> Callable[..., bool] | None:
    """Return the function that fills CUDA tensors by one kernel; None without Triton."""
    try:
        return importlib.import_module(f"{__package__}.random_kernel").fill
    except ImportError:
        return None


def _to_unit(hashes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    return _shifted(hashes, bits).to(dtype).mul_(2.0**-bits)


def _shifted(hashes: Tensor, bits: int) -> Tensor:
    """Replace hashes by their upper bits as numbers, in place."""
    return hashes.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


def _strides(whole: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(whole):
        strides.append(step)
        step *= size
    return strides[::-1]


def _keys(seed: int, stream: int) -> tuple[int, int]:
    # 2^32 / the golden ratio: it spreads small stream numbers over all bits.
    mixed = _finalize(stream * 0x9E3779B9 & _LOW)
    return _finalize(seed & _LOW ^ mixed), _finalize(seed >> 32 ^ mixed)


def _finalize(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & _LOW
    x = (x ^ x >> 13) * 0xC2B2AE35 & _LOW
    return x ^ x >> 16


def _hash(keys: tuple[int, int], shard: Shard, device: torch.device) -> Tensor:
    """Return 32 random bits for every element, as int32."""
    # Positions are modulo 2^32. int32 wraps around.
    place = torch.zeros([], dtype=torch.int32, device=device)
    for size, start, stride in zip(shard.shape, shard.first, _strides(shard.whole)):
        if stride * (start + size) < 1 << 31:
            rows = torch.arange(start, start + size, dtype=torch.int32, device=device) * stride
        else:  # the upper bits are mixed in row by row
            rows = torch.arange(start, start + size, dtype=torch.int64, device=device) * stride
            rows = (rows ^ (rows >> 32) * 0x632BE5AB) & _LOW
            rows = torch.where(rows > 0x7FFFFFFF, rows - (1 << 32), rows).to(torch.int32)
        place = place.unsqueeze(-1) + rows
    flat = place.view(-1)
    for block in flat.split(_BLOCK if device.type == "cpu" else max(flat.numel(), 1)):
        _mix(block.add_(_as_signed(keys[0])))
        _mix(block.bitwise_xor_(_as_signed(keys[1])))
    return place


def _as_signed(x: int) -> int:
    return x - (1 << 32) if x > 0x7FFFFFFF else x


def _mix(x: Tensor) -> None:
    """Apply MurmurHash3's finalizer in place."""
    # int32 shifts copy the sign bit; the masks drop the copies.
    x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(_as_signed(0x85EBCA6B))
    x.bitwise_xor_(x.bitwise_right_shift(13).bitwise_and_(0x7FFFF)).mul_(_as_signed(0xC2B2AE35))
    x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))
