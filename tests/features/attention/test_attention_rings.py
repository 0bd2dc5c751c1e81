"""Keys and values that travel round a ring: numbers, bytes that are sent, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, check
from torch import Tensor

from torchgspmd import Mesh, plan
from torchgspmd.features.attention import ring_blocks

SPEC = "_ model seq _"


ALWAYS = {"link_flops_per_byte": 1e-6}  # A byte is sent while a device computes next to nothing.


def tensors(heads: int, kv_heads: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(2, h, length, 8, dtype=torch.float64) for h in shapes]


def step(causal: bool):
    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, enable_gqa=True)
        return out, *torch.autograd.grad(out, leaves, grad)

    return attend


def planned(mesh: Mesh, inputs: list, causal: bool = True, costs: Any = ALWAYS, **advanced):
    spec = " ".join(word if word in mesh.names else "_" for word in SPEC.split())
    return plan(
        step(causal),
        *inputs,
        mesh=mesh,
        in_specs=(spec,) * 4 + (None,),
        out_specs=(spec,) * 4,
        advanced={"costs": costs, **advanced},
    )


def names(result) -> list[str]:
    return [str(n.target) for n in result.program.graph.nodes if "ring_attention" in str(n.target)]


@pytest.mark.parametrize("mask", ["causal", "none", "window", "bias"])
@pytest.mark.parametrize("length", [19, 24])
@pytest.mark.parametrize(
    "mesh, heads", [(Mesh(seq=3), (4, 2)), (Mesh(seq=4), (4, 1)), (Mesh(model=2, seq=4), (6, 2))]
)
def test_numbers(mask: str, length: int, mesh: Mesh, heads: tuple[int, int]) -> None:
    place = torch.arange(length)
    window = (place <= place.unsqueeze(1)) & (place > place.unsqueeze(1) - 4)
    masks = {"window": window, "bias": torch.randn(heads[0], length, length).double()}
    inputs = [*tensors(*heads, length), masks.get(mask)]
    result = planned(mesh, inputs, mask == "causal")
    assert names(result) == ["ring_attention", "ring_attention_backward"]
    for got, want in zip(
        result.simulate(*inputs, _poison=True), step(mask == "causal")(*inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_is_that_of_one_device(causal: bool) -> None:
    case = Case("causal" if causal else "window", "seq", 2, even=False, dropout=0.3)
    result = check(case, advanced={"costs": ALWAYS})
    assert names(result) == ["ring_attention", "ring_attention_backward"]


def test_a_ring_sends_what_gathers_send() -> None:
    """Backward, keys once more."""
    length, n = 48, 4
    inputs = [*tensors(4, 1, length), None]
    rows = [c.sent_bytes for c in planned(Mesh(seq=n), inputs, causal=False).collectives]
    block = 2 * length // n * 8 * 8  # bytes of keys of a device
    assert rows == [(n - 1) * block] * 6

    # Under a causal mask late devices lend their last queries, and nothing else is sent.
    balanced = [c.sent_bytes for c in planned(Mesh(seq=n), inputs).collectives]
    queries, statistic = 4 * block, 4 * block // 8
    forward = n, length // n, 2 * block, queries, queries + statistic, False
    backward = n, length // n, 2 * block, 3 * queries + statistic, queries, True
    assert len(balanced) == 6
    assert sum(balanced[:2]) == pytest.approx(ring_blocks.sent_with_rows(*forward))
    assert sum(balanced[2:]) == pytest.approx(ring_blocks.sent_with_rows(*backward))


def test_memory_does_not_grow_with_the_whole_sequence() -> None:
    def peak(n: int, **options) -> int:
        with torch.device("meta"):
            inputs = [*(torch.empty(1, 1, 4096 * n, 64) for _ in range(4)), None]
        return planned(Mesh(seq=n), inputs, causal=False, **options).memory.peak

    assert peak(8) == peak(32) < 0.25 * peak(32, skip_passes=("attention_rings",))


def test_short_sequences_are_gathered() -> None:
    inputs = [*tensors(4, 1, 48), None]
    assert not names(planned(Mesh(seq=4), inputs, costs=None))
    assert len(names(planned(Mesh(seq=4), inputs, costs=None, regather="all"))) == 2
    with torch.device("meta"):
        long = [*(torch.empty(1, h, 1 << 17, 64, dtype=torch.bfloat16) for h in (4, 1, 1, 4)), None]
    assert len(names(planned(Mesh(seq=4), long, costs=None))) == 2
    assert not names(planned(Mesh(seq=4), long, regather="never"))
