"""PyTorch's own samples of its operators, on operands in other orders in memory.

Operands are transposed, permuted, expanded, flipped, in channels_last, or slices with steps; or the
caller's tensor itself is in another order. Forward and backward on a mesh of two devices, with
drawn layouts and poisoned padding, against eager PyTorch on the same tensors.
"""

from __future__ import annotations

import random
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parent)]
from op_coverage import OPS, Case, attempt, is_random  # noqa: E402
from test_op_db import NAMES, RAISES, SLOW, UNCOMPARED  # noqa: E402

MESHES = ({"a": 2},)
SAMPLES = 2
CHUNKS = 16
# Why operands in another order are not compared.
OTHERS = {
    "_segment_reduce.offsets": "an index error for offsets that end before the data",
    "native_group_norm": "the CPU's kernel reads a weight with steps as if it had none",
    "nn.functional.feature_alpha_dropout.with_train": "draws, unless all numbers are zeros",
    "nn.functional.rrelu": "draws, unless no number is negative",
    "tensor_split": "reads an operand's numbers, which a view does not have in a trace",
}
LEFT_OUT = {*SLOW, *RAISES, *UNCOMPARED, *OTHERS}
View = Callable[[Tensor], Tensor]


def views(t: Tensor, rng: random.Random) -> list[tuple[Tensor, View]]:
    """Pairs (base, view): the view of the base has the operand's shape, in another order."""
    found: list[tuple[Tensor, View]] = []
    if t.dim():
        d = rng.randrange(t.dim())
        found.append((t.flip(d), lambda x: x.flip(d)))
        every_second = (slice(None),) * d + (slice(0, None, 2),)
        found.append((t.repeat_interleave(2, d), lambda x: x[every_second]))
        if t.shape[d] > 1:
            found.append((t.narrow(d, 0, 1).clone(), lambda x: x.expand(t.shape)))
    if t.dim() > 1:
        order = rng.sample(range(t.dim()), t.dim())
        back = [order.index(d) for d in range(t.dim())]
        found.append((t.mT.contiguous(), lambda x: x.mT))
        found.append((t.permute(order).contiguous(), lambda x: x.permute(back)))
        found.append((t.permute(order).contiguous().permute(back), lambda x: x))
        found.append((t.mT.contiguous().mT, lambda x: x))
    if t.dim() in (4, 5):
        last = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
        found.append((t, lambda x: x.contiguous(memory_format=last)))
    return found


class OrderedCase(Case):
    """A sample whose operands are views of the program's inputs."""

    def __init__(self, op, sample, rng: random.Random) -> None:
        super().__init__(op, sample)
        drawn = [rng.choice(views(t, rng) or [(t, lambda x: x)]) for t in self.tensors]
        self.tensors, self.views = [base for base, _ in drawn], [view for _, view in drawn]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return super().forward(*(view(t) for view, t in zip(self.views, tensors)))


def failures(name: str) -> list[str]:
    """Run an operator's first samples that divide, in drawn orders. Return the failures."""
    op, bad, count = OPS[name], [], 0
    dtype = torch.float64 if torch.float64 in op.supported_backward_dtypes("cpu") else torch.float32
    backwards = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=backwards)):
        rng = random.Random(zlib.crc32(f"{name} {index}".encode()))
        try:
            case = OrderedCase(op, sample, rng)
            if not any(t.dim() for t in case.tensors) or is_random(case):
                continue
            backward = backwards and case.prepare()
            if backward:
                case.joint(*(t.clone() for t in (*case.tensors, *case.cotangents)))
        except Exception:  # noqa: BLE001 (one device cannot run it either)
            continue
        row = attempt(case, rng, backward, MESHES)
        if text := row.get("wrong") or row.get("raises"):
            bad.append(f"{name} {index}: {text}, {row['specs']}")
        count += 1
        if count == SAMPLES:
            break
    return bad


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_give_the_numbers_of_one_device_in_any_order(chunk):
    names = [n for n in NAMES[chunk::CHUNKS] if n not in LEFT_OUT]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [text for name in names for text in failures(name)]
    assert not found, "\n".join(found)
