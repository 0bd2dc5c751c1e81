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
from torchgspmd.features.attention import lending, ring, ring_blocks
from torchgspmd.features.attention.call import AttentionCall
from torchgspmd.features.attention.ring_blocks import LOANS_OF_ROWS, LOANS_OF_STEPS

SIZES = [2, 3, 4, 5, 8]  # of rings
HEADS = [(2, 2), (4, 1)]  # of queries, of keys and values
LOANS = [LOANS_OF_STEPS, LOANS_OF_ROWS]
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
    steps: Callable[..., Any], n: int, tensors: list[Tensor], length: int, loans: str
) -> tuple[list[Tensor], Counter[int]]:
    """Run a ring on n devices; return its whole results, and the elements that devices sent."""
    rows, sent = -(-length // n), Counter[int]()
    parts = [
        F.pad(x.movedim(2, -1), (0, rows * n - length), value=torch.nan).movedim(-1, 2).chunk(n, 2)
        for x in tensors
    ]
    tail = ((None, (), (), ()), "seq", True, WIDTH**-0.5, length, length, None, loans)
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


@pytest.mark.parametrize("loans", LOANS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("n", SIZES)
def test_numbers_and_bytes(n: int, heads: tuple[int, int], dtype: torch.dtype, loans: str) -> None:
    for length in (n * 6, n * 5 + 1):
        q, k, v, grad = inputs(heads, length, dtype)
        (out, lse), sent = run(ring._forward_steps, n, [q, k, v], length, loans)
        saved = [grad, q, k, v, out, lse]
        grads, sent_back = run(ring._backward_steps, n, saved, length, loans)
        # Results are rounded once more for each device that a sum passes.
        tolerance = torch.finfo(dtype).eps * 8 * n
        for got, want in zip((out, *grads), expected(q, k, v, grad), strict=True):
            scale = want.abs().max().item()
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * scale)
        # In elements: a logsumexp of a bfloat16 result is two.
        rows = 2 * heads[0] * 6
        one, statistic = rows * WIDTH, rows * (2 if dtype == torch.bfloat16 else 1)
        keys = 2 * 2 * heads[1] * 6 * WIDTH
        assert max(sent.values()) == sent_bytes(n, loans, keys, one, one + statistic, False)
        lent = 3 * one + statistic
        assert max(sent_back.values()) == sent_bytes(n, loans, keys, lent, one, True)


def sent_bytes(n: int, loans: str, *rest: Any) -> float:
    return (
        lending.sent_bytes(n, *rest)
        if loans == LOANS_OF_STEPS
        else (round(ring_blocks.sent_with_rows(n, 6, *rest), 6))
    )


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
    run(ring._forward_steps, n, [q, k, v], n * 6, LOANS_OF_STEPS)
    assert len(set(work.values())) == 1 and sum(work.values()) == n * 6 * (n * 6 + 1) // 2


@pytest.mark.parametrize("n", SIZES)
def test_lent_rows_balance_the_work(n: int) -> None:
    """Each device computes within a row's scores of its fair share."""
    rows = 1000
    for me in range(n):
        runs = ring_blocks.LentRows(n, me, rows).runs(n * rows)
        work = sum((r.stop - r.start) * (first + (r.stop - r.start + 1) / 2) for r, first in runs)
        assert abs(work - n * rows * (n * rows + 1) / 2 / n) <= n * rows


def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def planned(
    heads: tuple[int, int], mesh: Mesh, spec: str, **advanced: Any
) -> tuple[Any, list[str], float]:
    """Return a plan for 256k tokens, its rings' loans, and the MiB that forward sends."""
    with torch.device("meta"):
        q, k, v, grad = (
            torch.empty(1, h, 1 << 18, 128, dtype=torch.bfloat16)
            for h in (heads[0], heads[1], heads[1], heads[0])
        )
    specs = (spec,) * 4
    options: Any = {"in_specs": specs, "out_specs": specs, "advanced": advanced}
    result = plan(step, q, k, v, grad, mesh=mesh, **options)
    rings = [n for n in result.program.graph.nodes if "ring_attention" in str(n.target)]
    forward = sum(c.sent_bytes for c in result.collectives[:2]) / 2**20
    return result, [n.args[-1] for n in rings], forward


def test_a_plan_lends_where_queries_are_inputs() -> None:
    """8 heads on 8 x 8 devices, 256k tokens: a ring of all keys sends 112 MiB, zigzag order 128."""
    result, loans, forward = planned((8, 8), Mesh(model=8, seq=8), "_ model seq _")
    assert forward == 84 and result.sent_bytes < 273 * 2**20
    assert loans == [LOANS_OF_STEPS] * 2


def test_a_plan_lends_rows_where_heads_share_keys() -> None:
    """A ring of all keys sends 224 MiB, zigzag order 496; 45 % of the last queries are 115."""
    result, loans, forward = planned((32, 2), Mesh(seq=8), "_ _ seq _")
    assert 339 < forward < 342 and loans == [LOANS_OF_ROWS] * 2
    # All of zigzag order with its backward are 1,216.
    assert result.sent_bytes < 1140 * 2**20


@pytest.mark.parametrize("flops_per_byte, sent", [(1e5, 339), (1e6, 224)])
def test_a_slow_link_sends_keys_alone(flops_per_byte: float, sent: int) -> None:
    """The last device has 6e13 operations more than the mean, for which 115 MiB may be sent."""
    costs = {"link_flops_per_byte": flops_per_byte}
    result, _, forward = planned((32, 2), Mesh(seq=8), "_ _ seq _", costs=costs)
    assert int(forward) == sent
    choice = (
        "late devices lend queries, 115.24 MiB more"
        if sent == 339
        else "not balanced, 115.24 MiB less"
    )
    less = "less" if sent == 339 else "more"
    line = f"attention over seq: {choice}; the last device computes 6.2e+13 FLOPs {less}, at "
    assert f"{line}{flops_per_byte:,.0f} FLOPs while a byte is sent" in result.summary()


def test_named_hardware_says_how_much_a_device_computes_while_a_byte_is_sent() -> None:
    q, k = (torch.empty(1, h, 1 << 18, 128, dtype=torch.bfloat16, device="meta") for h in (32, 2))
    # 989e12 FLOP/s, of which 0.7 are reached; 450e9 B/s in a host, 50e9 between hosts.
    for mesh, rate in ((Mesh(seq=8), "1,538"), (Mesh(seq=16), "13,846")):
        options: Any = {"in_specs": ("_ _ seq _",) * 3, "out_specs": "_ _ seq _"}
        result = plan(attend, q, k, k, mesh=mesh, hardware="h100", **options)
        assert f"at {rate} FLOPs while a byte is sent" in result.summary()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
