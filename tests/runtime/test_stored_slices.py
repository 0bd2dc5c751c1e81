"""A part of a tensor that a conversion computes from files' tensors is read from their parts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchgspmd.runtime.stored_slices import Recorded, Stored, StoredTensors

Experts = list[Tensor]


class File:
    """Tensors by name, as safetensors has them, and the elements that were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.read = tensors, 0

    def get_tensor(self, name: str) -> Tensor:
        self.read += self.tensors[name].numel()
        return self.tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)


class _Slice:
    def __init__(self, file: File, name: str) -> None:
        self.file, self.name = file, name

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        part = self.file.tensors[self.name][box]
        self.file.read += part.numel()
        return part


def gate_and_up(x: Experts) -> Tensor:
    return torch.cat([torch.stack(x[:4]), torch.stack(x[4:])], dim=1)


# Each takes eight tensors [6, 4]. exact: a part needs no element besides its own.
CONVERSIONS: dict[str, tuple[Callable[[Experts], Tensor], bool]] = {
    "renamed": (lambda x: x[3], True),
    "experts": (lambda x: torch.stack(x), True),
    "experts, last": (lambda x: torch.stack(x, dim=-1), True),
    "gate and up": (gate_and_up, True),
    "gate and up, transposed": (lambda x: gate_and_up(x).transpose(1, 2).contiguous(), True),
    "rows": (lambda x: torch.cat(x), True),
    "one of chunks": (lambda x: torch.cat(x).chunk(5)[3], True),
    "split": (lambda x: torch.split(torch.cat(x), [5, 30, 13])[1], True),
    "columns": (lambda x: x[0].split([1, 3], dim=-1)[1].contiguous(), True),
    "every second": (lambda x: torch.cat(x)[3:40:2], False),
    "one row": (lambda x: torch.stack(x)[2].t(), True),
    "unbound": (lambda x: torch.stack(x).unbind(1)[4], True),
    "heads": (lambda x: torch.stack(x).reshape(2, 4, 6, 4).permute(1, 0, 3, 2), False),
    "merged rows": (lambda x: torch.stack(x).flatten(0, 1), False),
    "a dimension more": (lambda x: x[1].unsqueeze(1).squeeze(1).unsqueeze(0), True),
    "halves exchanged": (lambda x: x[0].view(2, 3, 4).transpose(0, 1).reshape(6, 4), False),
    "scaled": (lambda x: torch.stack([2 * t for t in x]), False),
    "from indices": (lambda x: x[0][torch.tensor([5, 0, 3])], False),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_parts(name):
    convert, is_exact = CONVERSIONS[name]
    tensors = {str(i): torch.randn(6, 4) for i in range(8)}
    file, record = File(tensors), Recorded()
    stored = [Stored(file, n, torch.empty(6, 4, device="meta")) for n in tensors]
    with record:
        like = convert([s.like for s in stored])
    found = StoredTensors({"x": like}, files={id(s.like): s for s in stored}, record=record)
    want, rng = convert([*tensors.values()]), random.Random(0)
    assert found.read("x").equal(want)
    for _ in range(20):
        begins = [rng.randrange(n) for n in want.shape]
        box = tuple(slice(b, rng.randrange(b + 1, n + 1)) for b, n in zip(begins, want.shape))
        file.read = 0
        part = found.read("x", box)
        assert part.equal(want[box]), box
        assert not is_exact or file.read == part.numel(), box


def test_a_conversion_that_writes_in_place_is_refused():
    with pytest.raises(NotImplementedError, match="writes in place, by aten.zero_"), Recorded():
        torch.empty(3, device="meta").zero_()
