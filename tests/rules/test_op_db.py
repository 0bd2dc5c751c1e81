"""PyTorch's own samples of all its operators: the numbers of one device, but for a table.

Two samples of each of some 650 operators, forward and backward, on a mesh of two devices with drawn
layouts and poisoned padding. Every pass and every pattern meets their graphs. More samples, dtypes
and meshes:

    python benchmarks/op_coverage.py
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from op_coverage import OPS, Case, attempt, is_random  # noqa: E402

MESHES = ({"a": 2},)
SAMPLES = 2
CHUNKS = 16
NAMES = [name for name, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")]
SLOW = {"pca_lowrank", "svd_lowrank"}  # minutes: their programs have thousands of nodes
RAISES = {
    "linalg.lstsq": "needs numbers that are known only when it runs",
    "linalg.lstsq.grad_oriented": "needs numbers that are known only when it runs",
    "sparse.mm.reduce": "is sparse_csr, and a layout is one of dense tensors",
}
# Operators without a sample whose results two runs on one device have in common.
UNCOMPARED = frozenset(
    "bernoulli cauchy exponential geometric hash_tensor jiterator_2inputs_2outputs "
    "jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref "
    "jiterator_unary log_normal multinomial nn.functional.fractional_max_pool2d "
    "nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward normal "
    "normal.in_place normal.number_mean rand_like randint randint_like randn randn_like "
    "sparse.sampled_addmm to_sparse torch.ops.aten._scaled_dot_product_flash_attention_for_cpu "
    "uniform".split()
)


def cases(name: str) -> Iterator[tuple[Case, bool]]:
    """Yield the smallest samples that a layout can divide, and whether each has a gradient."""
    op = OPS[name]
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=differentiable)
    drawn = [Case(op, sample) for sample in itertools.islice(samples, 12)]
    drawn.sort(
        key=lambda case: (
            max((t.numel() for t in case.tensors), default=0) < 2,
            sum(t.numel() for t in case.tensors),
        )
    )
    count = 0
    for case in drawn:
        try:
            if is_random(case):
                return
            backward = differentiable and case.prepare()
            if backward:
                case.joint(*(t.clone() for t in (*case.tensors, *case.cotangents)))
        except Exception:  # noqa: BLE001 (one device cannot run it either)
            continue
        yield case, backward
        count += 1
        if count == SAMPLES:
            return


def failures(name: str) -> tuple[int, list[str]]:
    """Run an operator. Return the number of its samples, and the failures."""
    rows = []
    for index, (case, backward) in enumerate(cases(name)):
        rng = random.Random(zlib.crc32(f"{name} {index}".encode()))
        row = attempt(case, rng, backward, MESHES)
        if not row.get("random"):
            rows.append(row)
    bad = [row for row in rows if "wrong" in row or "raises" in row]
    return len(rows), [f"{r.get('wrong') or r['raises']}, {r['specs']}" for r in bad]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_but_for_a_table_give_the_numbers_of_one_device(chunk):
    names = [name for name in NAMES[chunk::CHUNKS] if name not in SLOW]
    unexpected, count = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            samples, found = failures(name)
            count += samples
            expected = RAISES.get(name)
            if (samples == 0) != (name in UNCOMPARED):
                unexpected.append(f"{name}: {samples} samples were compared")
            elif expected is None:
                unexpected += [f"{name}: {text}" for text in found]
            elif not found:
                unexpected.append(f"{name} works: take it out of the table")
            else:
                unexpected += [f"{name}: {text}" for text in found if expected not in text]
    print(f"{len(names)} operators, {count} samples")
    assert not unexpected, "\n".join(unexpected)
