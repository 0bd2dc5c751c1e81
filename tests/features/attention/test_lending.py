"""Late devices of a causal ring lend queries to early ones: numbers, work and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchgspmd import Mesh, plan
from torchgspmd.features.attention import lending, ring
from torchgspmd.features.attention.call import AttentionCall

SIZES = [2, 3, 4, 5, 8]  # of rings
HEADS = [(2, 2), (4, 1)]  # of queries, of keys and values
WIDTH = 8


def driven(steps: list[Any], sent: Counter[int]) -> list[Any]:
    """Run all devices' steps; add the elements that each sends. Each message is received."""
    results: list[Any] = [None] * len(steps)
    arrivals: list[Any] = [None] * len(steps)
    while any(result is None for result in results):
        messages: dict[int, Any] = {}
        for i, each in enumerate(steps):
            try:
                messages[i] = each.send(arrivals[i])
            except StopIteration as done:
                results[i] = done.value
        for i, (sends, _) in messages.items():
            sent[i] += sum(x.numel() for x in sends.values())
        for i, (_, receives) in messages.items():
            came = {j: sends[i] for j, (sends, _) in messages.items() if i in sends}
            assert {j: x.numel() for j, x in came.items()} == receives
            arrivals[i] = came.copy
    return results


def run(
    steps: Callable[..., Any], n: int, tensors: list[Tensor], length: int
) -> tuple[list[Tensor], Counter[int]]:
    """Run a ring on n devices; return its whole results, and the elements that devices sent."""
    rows, sent = -(-length // n), Counter[int]()
    parts = [
        F.pad(x.movedim(2, -1), (0, rows * n - length), value=torch.nan).movedim(-1, 2).chunk(n, 2)
        for x in tensors
    ]
    tail = ((None, (), (), ()), "seq", True, WIDTH**-0.5, length, length, None, True)
    made = [steps(n, me, *(x[me] for x in parts), *tail) for me in range(n)]
    results = zip(*driven(made, sent))
    return [torch.cat(each, 2)[:, :, :length] for each in results], sent


def inputs(heads: tuple[int, int], length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, h, length, WIDTH) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("n", SIZES)
def test_numbers_and_bytes(n: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for length in (n * 6, n * 5 + 1):
        q, k, v, grad = inputs(heads, length, dtype)
        (out, lse), sent = run(ring._forward_steps, n, [q, k, v], length)
        saved = [grad, q, k, v, out, lse]
        grads, sent_back = run(ring._backward_steps, n, saved, length)
        # Results are rounded once more for each device that a sum passes.
        tolerance = torch.finfo(dtype).eps * 8 * n
        for got, want in zip((out, *grads), expected(q, k, v, grad), strict=True):
            scale = want.abs().max().item()
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * scale)
        # In elements: a logsumexp of a bfloat16 result is two.
        rows = 2 * heads[0] * 6
        one, statistic = rows * WIDTH, rows * (2 if dtype == torch.bfloat16 else 1)
        keys = 2 * 2 * heads[1] * 6 * WIDTH
        assert max(sent.values()) == lending.sent_bytes(n, keys, one, one + statistic, False)
        lent = 3 * one + statistic
        assert max(sent_back.values()) == lending.sent_bytes(n, keys, lent, one, True)


@pytest.mark.parametrize("n", SIZES)
def test_all_devices_have_the_same_work(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work: Counter[int] = Counter()
    q, k, v, _ = inputs((1, 1), n * 6, torch.float64)
    blocks = {x[0, 0, 0, 0].item(): i for i, x in enumerate(k.chunk(n, 2))}

    def counted(call: AttentionCall) -> Any:
        first, key, *_ = call.region
        queries = torch.arange(call.q.shape[-2]).unsqueeze(1) + first
        seen = torch.arange(call.k.shape[-2]) + key <= queries
        # Devices compute for others with their own keys.
        helps = first // 6 - key // 6 > n // 2 or 2 * (first // 6 - key // 6) == n and first % 6 > 0
        at = blocks[call.k[0, 0, 0, 0].item()] if helps else first // 6
        work[at] += int(seen.sum())
        return original(call)

    original = ring.computed
    monkeypatch.setattr(ring, "computed", counted)
    monkeypatch.setattr(lending, "computed", counted)
    run(ring._forward_steps, n, [q, k, v], n * 6)
    assert len(set(work.values())) == 1 and sum(work.values()) == n * 6 * (n * 6 + 1) // 2


def test_a_plan_lends_where_queries_are_inputs() -> None:
    """8 heads on 8 x 8 devices, 256k tokens: a ring of all keys sends 112 MiB, zigzag order 128."""
    spec, mesh = "_ model seq _", Mesh(model=8, seq=8)
    with torch.device("meta"):
        tensors = [torch.empty(1, 8, 1 << 18, 128, dtype=torch.bfloat16) for _ in range(4)]

    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    result = plan(step, *tensors, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    forward = sum(c.sent_bytes for c in result.collectives[:2])
    assert forward == 84 * 2**20 and result.sent_bytes < 273 * 2**20
    reaches = [n.args[-1] for n in result.program.graph.nodes if "ring_attention" in str(n.target)]
    assert reaches == [True, True]
