"""varlen_attn: packed documents, by sharded heads or tokens, against attention to each document."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgspmd import Mesh, ShardingError, plan

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.9 has no varlen_attn")

LENGTH = 37
MESHES = {
    "model": (Mesh(model=2), "_ model _", (4, 2)),
    "seq": (Mesh(seq=4), "seq _ _", (4, 1)),
    "uneven": (Mesh(seq=5), "seq _ _", (3, 3)),
    "both": (Mesh(seq=2, model=2), "seq model _", (4, 2)),
}
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "sliding": (4, 0), "around": (3, 2)}
PACKINGS = {
    "one": [LENGTH],
    "longer than a shard": [3, 25, 9],
    "empty": [0, 7, 0, 0, 24, 6, 0],
    "padding": [5, 12, 8],
}


def by_document(
    q: Tensor, k: Tensor, v: Tensor, of_queries: list[int], of_keys: list[int], window: Any
) -> Tensor:
    """Compute all scores of each document; a query without keys has 0, and so has padding."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = [q[:0]]
    for (a, b), (c, d) in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
        # The last query of a document stands beside its last key.
        away = torch.arange(d - c) - (torch.arange(b - a).unsqueeze(1) + d - c - (b - a))
        hidden = torch.zeros_like(away, dtype=torch.bool)
        for side, limit in zip((-away, away), window, strict=True):
            hidden |= (side > limit) & (limit >= 0)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        out.append(torch.einsum("hqk,khd->qhd", weights, v[c:d]))
    return torch.cat([*out, 0 * q[of_queries[-1] :]])


def step(attend: Callable[..., Tensor]) -> Callable[..., tuple]:
    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *rest: Any) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, *rest)
        return out, *torch.autograd.grad(out, leaves, grad)

    return run


def tensors(heads: int, kv_heads: int, queries: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    return [torch.randn(*size, 8, dtype=torch.float64) for size in sizes]


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def drawn() -> list[tuple[str, str, list[int]]]:
    draw = random.Random(0)
    packings = [[draw.choice((0, 1, 4, 9)) for _ in range(6)] for _ in range(4)]
    packings = [lengths for lengths in packings if sum(lengths) <= LENGTH]
    packings += PACKINGS.values()
    return draw.sample([(m, w, p) for p in packings for m in MESHES for w in WINDOWS], 24)


@pytest.mark.parametrize("mesh, window, lengths", drawn())
@pytest.mark.parametrize("ring", [False, True])
def test_numbers(mesh: str, window: str, lengths: list[int], ring: bool) -> None:
    devices, spec, heads = MESHES[mesh]
    around, cu = WINDOWS[window], borders(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        sizes = cu, cu, LENGTH, LENGTH
        return varlen.varlen_attn(q, k, v, *sizes, window_size=around, enable_gqa=True)

    inputs = tensors(*heads)
    result = plan(
        step(attend),
        *inputs,
        cu,
        mesh=devices,
        in_specs=(*(spec,) * 4, "_"),
        out_specs=(spec,) * 4,
        advanced={"regather": "all"} if ring else {},
    )
    assert not result.replicated_ops
    ends = cu.tolist()
    want = step(by_document)(*inputs, ends, ends, around)
    for a, b in zip(result.simulate(*inputs, cu, _poison=True), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("used", [None, [2, 0, 9]])
def test_queries_and_keys_have_lengths_of_their_own(window: str, used: list[int] | None) -> None:
    of_queries, of_keys = borders([4, 3, 8]), borders([7, 5, 9])
    counts = None if used is None else torch.tensor(used, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen.varlen_attn(
            q, k, v, of_queries, of_keys, 8, 9, window_size=WINDOWS[window], seqused_k=counts
        )

    q, k, v, _ = tensors(2, 2, 15, 21)
    spec = "seq _ _"
    got = plan(attend, q, k, v, mesh=Mesh(seq=3), in_specs=(spec,) * 3).simulate(q, k, v)
    if used is not None:  # Keys beyond those that count are not there.
        begins = of_keys.tolist()
        rows = torch.tensor([b + i for b, n in zip(begins, used) for i in range(n)])
        k, v, of_keys = k[rows], v[rows], borders(used)
    want = by_document(q, k, v, of_queries.tolist(), of_keys.tolist(), WINDOWS[window])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_sharded_heads_send_nothing() -> None:
    q, k, v, _ = tensors(4, 2)
    cu = borders([20, 17])

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple:
        aux = varlen.AuxRequest(lse=True)
        return varlen.varlen_attn(q, k, v, cu, cu, 20, 20, return_aux=aux, enable_gqa=True)

    result = plan(attend, q, k, v, cu, mesh=Mesh(model=2), in_specs=(*("_ model _",) * 3, "_"))
    out, lse = result.simulate(q, k, v, cu)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8**0.5
    apart = (torch.arange(LENGTH) < 20).unsqueeze(1) != (torch.arange(LENGTH) < 20)
    assert not result.sent_bytes
    torch.testing.assert_close(lse, scores.masked_fill(apart, -torch.inf).logsumexp(-1))
    torch.testing.assert_close(out, by_document(q, k, v, cu.tolist(), cu.tolist(), (-1, -1)))


def test_the_certificate_covers_it() -> None:
    inputs, spec = tensors(2, 1), "seq _ _"
    cu = borders([20, 17])

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen.varlen_attn(q, k, v, cu, cu, 20, 20, window_size=(-1, 0), enable_gqa=True)

    specs = (*(spec,) * 4, "_")
    result = plan(step(attend), *inputs, cu, mesh=Mesh(seq=3), in_specs=specs)
    assert "certified" in str(result.verify())


def test_keys_in_pages_are_an_error() -> None:
    q, k, v, _ = tensors(2, 2)
    cu, table = borders([20, 17]), torch.zeros(2, 1, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages, counts = (x.unsqueeze(0) for x in (k, v)), cu[1:] - cu[:-1]
        return varlen.varlen_attn(
            q, *pages, cu, None, 20, 20, seqused_k=counts, block_table=table, window_size=(-1, 0)
        )

    with pytest.raises(ShardingError, match="varlen_attn reads its keys from pages"):
        plan(attend, q, k, v, mesh=Mesh(model=2), in_specs=("_ model _",) * 3)
