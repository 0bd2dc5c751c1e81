"""Checksums on a program's arguments, to compare the ranks (rank_check.py).

All values are read in integer tensors up to INTEGERS elements, and in float tensors up to FLOATS.
Larger tensors are sampled. Integers have an exact checksum. Floats may differ by rounding: theirs
are two numbers, a norm and an irregular mean.

The tensors are the caller's: no operation here writes to its operand unless it allocated it.

Nobody waits for a GPU: it computes the words of a message from its checksums (call_comparison.py).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ROUNDING = 1e-3  # Relative tolerance for equal values; different values differ by about 1.
INTEGERS, FLOATS, SAMPLE = 2**18, 2**12, 2**10  # Numbers of elements.
WORDS = 4  # of a message, of 8 bytes each
TURN = 8  # Number of large tensors that a call reads; the next calls read the next ones.
_GOLDEN, _WORD = 0.6180339887498949, 2**64
_TINY = 1e-300
_BOUND = 1e100  # Infinities and larger values count as this; its square is finite.
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype
COLUMNS = 1024  # of a hash of all bits
_ODD = 0x1E3779B97F4A7C15

Checksum = int | tuple[float, float]


class ArgumentValues:
    """Checksums for the tensors that one program is called with.

    names: the tensors' names, "" for those that are not compared: a DTensor differs between ranks.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self.names, self.turn = names, 0
        compared = [i for i, name in enumerate(names) if name]
        self.small = [i for i in compared if tensors[i].numel() <= _limit(tensors[i])]
        self.large = [i for i in compared if tensors[i].numel() > _limit(tensors[i])]

    def read(self, tensors: Sequence[Tensor]) -> list[Reading]:
        """Begin to read tensors, those of each device together."""
        indices = self.small
        if self.large:
            turn = [*self.large[self.turn :], *self.large[: self.turn]][:TURN]
            indices = [*indices, *turn]
            self.turn = (self.turn + TURN) % len(self.large)
        by_device: dict[torch.device, list[int]] = {}
        for i in indices:
            by_device.setdefault(tensors[i].device, []).append(i)
        return [
            Reading([self.names[i] for i in each], [tensors[i] for i in each])
            for each in by_device.values()
        ]


class Reading:
    """Checksums of tensors of one device, where they are computed.

    most: elements of a tensor that are read, if other than those of a call's arguments.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], most: int = 0) -> None:
        pairs = [*zip(names, (t.detach() for t in tensors))]
        integers = [pair for pair in pairs if _is_integer(pair[1])]
        floats = [pair for pair in pairs if not _is_integer(pair[1])]
        self.device, none = tensors[0].device, torch.empty(0)
        self.integers, self.floats = ([name for name, _ in each] for each in (integers, floats))
        self.sums = torch.stack([_sum(_sample(t, most)) for _, t in integers]) if integers else none
        parts = [part for _, t in floats for part in _squares_and_mean(_sample(as_real(t), most))]
        self.parts = torch.stack(parts) if parts else none

    def checksums(self) -> dict[str, Checksum]:
        """Wait for the values and return them by name."""
        sums, parts = self.sums.tolist(), self.parts.tolist()
        floats = [
            (math.sqrt(squares), mean / math.sqrt(squares))
            if 0 < squares < math.inf
            else (0.0, 0.0)
            for squares, mean in zip(parts[::2], parts[1::2])
        ]
        return dict(zip([*self.integers, *self.floats], [*sums, *floats]))

    def words(self) -> tuple[Tensor, Tensor]:
        """Return a word of the integers and a double of the floats, where the tensors are."""
        exact = torch.zeros((), dtype=torch.int64, device=self.device)
        double = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.integers:
            exact = (self.sums * _factors(len(self.sums), self.device)).sum()
        if self.floats:
            squares, means = self.parts.view(-1, 2).unbind(1)
            norms = squares.sqrt().clamp(min=_TINY)
            weights = 0.75 + _weights(len(norms), self.device) / 2
            double = ((norms.log() + means / norms) * weights).sum()
        return exact, double


def checksums_of(readings: Sequence[Reading]) -> dict[str, Checksum]:
    """Wait for readings and return all checksums by name."""
    return {name: value for reading in readings for name, value in reading.checksums().items()}


def words(checksums: Mapping[str, Checksum]) -> list[int]:
    """Return checksums as WORDS in a message: their number, one that is exact, two floats' bits."""
    exact, norms, means = 0, 0.0, 0.0
    for i, value in enumerate(checksums.values(), 1):
        if isinstance(value, int):
            exact += value * (2 * i + 1)
        else:
            weight = 0.5 + i * _GOLDEN % 0.5
            norms += weight * math.log(value[0] + _TINY)
            means += weight * value[1]
    return [len(checksums), signed(exact), bits_of(norms), bits_of(means)]


def signed(number: int) -> int:
    """Return a number modulo 2 ** 64 as int64 has it."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


def bits_of(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]


def double_of(bits: int) -> float:
    return struct.unpack("d", struct.pack("q", bits))[0]


def words_differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether words differ by more than rounding."""
    return [*one[:2]] != [*other[:2]] or any(
        abs(double_of(a) - double_of(b)) > ROUNDING * one[0] for a, b in zip(one[2:], other[2:])
    )


def is_close(one: Checksum, other: Checksum) -> bool:
    """Whether two checksums are equal; float ones may differ by rounding."""
    if isinstance(one, int) or isinstance(other, int):
        return one == other
    return math.isclose(one[0], other[0], rel_tol=ROUNDING) and abs(one[1] - other[1]) <= ROUNDING


def hash_of_bits(tensor: Tensor) -> Tensor:
    """Return a 0-d int64 tensor that depends on every bit: it is another if one bit is flipped.

    8-byte words are summed modulo 2 ** 64, in COLUMNS sums with odd factors.
    """
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    flat = flat.resolve_neg().view(_BY_SIZE[flat.element_size()])
    words = 8 // flat.element_size()
    if flat.storage_offset() % words:
        flat = flat.clone()
    whole = len(flat) - len(flat) % (words * COLUMNS)
    sums = flat[:whole].view(torch.int64).view(-1, COLUMNS).sum(0)
    tail = flat[whole:].long()
    return (sums * _factors(COLUMNS, flat.device)).sum() + (
        tail * _factors(len(tail), flat.device)
    ).sum()


def _is_integer(tensor: Tensor) -> bool:
    """Whether values are compared exactly: also one-byte ones, such as float8."""
    exact = tensor.element_size() == 1
    return exact or not (tensor.is_floating_point() or tensor.is_complex())


def _limit(tensor: Tensor) -> int:
    return INTEGERS if _is_integer(tensor) else FLOATS


def _sample(tensor: Tensor, most: int) -> Tensor:
    """Return a vector: a small tensor's values, or a larger one's at irregular places."""
    limit, count = (most, most) if most else (_limit(tensor), SAMPLE)
    if _is_integer(tensor):  # take() has no kernel for uint16, uint32, uint64
        tensor = tensor.view(_BY_SIZE[tensor.element_size()])
    if tensor.numel() <= limit:
        return tensor.reshape(-1)
    return tensor.take(_places(tensor.numel(), count, tensor.device))  # whatever the strides are


def _sum(values: Tensor) -> Tensor:
    """Sum integers with irregular factors, modulo 2 ** 64."""
    values = values.long()
    factors = _factors(len(values), values.device)
    return torch.dot(values, factors) if values.is_cpu else (values * factors).sum()


def _squares_and_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the squares, and the values with irregular weights."""
    values = as_doubles(values)
    return torch.dot(values, values), torch.dot(values, _weights(len(values), values.device))


def as_real(tensor: Tensor) -> Tensor:
    """Return real floats; complex ones get a last dimension with size two."""
    tensor = tensor.resolve_conj()  # view_as_real refuses a lazy conjugate
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_doubles(values: Tensor) -> Tensor:
    """Return floats as finite doubles, in new memory also where they are doubles."""
    finite = values.double().nan_to_num(posinf=_BOUND, neginf=-_BOUND)
    return finite.clamp(-_BOUND, _BOUND)


@functools.lru_cache(64)
def _places(size: int, count: int, device: torch.device) -> Tensor:
    """Return `count` indices below `size`, one per equal stretch."""
    ordinals = torch.arange(count, dtype=torch.float64)
    within = (ordinals * _GOLDEN).frac_()
    return moved(((ordinals + within) * (size / count)).long().clamp_(max=size - 1), device)


@functools.lru_cache(64)
def _factors(count: int, device: torch.device) -> Tensor:
    return moved(torch.arange(count).mul_(2 * _ODD).add_(_ODD), device)


@functools.lru_cache(64)
def _weights(count: int, device: torch.device) -> Tensor:
    weights = torch.arange(count, dtype=torch.float64).mul_(_GOLDEN).frac_().sub_(0.5)
    return moved(weights, device)


def moved(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device, or one that is there; the host does not wait."""
    if value.device.type == "cpu" and device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)
