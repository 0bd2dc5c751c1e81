"""Tokens of causal attention in an order that balances it: numbers, what is exchanged, the cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._higher_order_ops import scan

from torchgspmd import Mesh, mark_sharding, plan
from torchgspmd.features.attention.balance_attention import Cut
from torchgspmd.fx_passes.loop_call import loop_calls

VOCABULARY, WIDTH, HEADS, ROWS = 16, 8, 2, 24
# Devices for which balancing so few tokens, and a ring, is worth it. Messages have no price: two of
# so few bytes would become one.
SLOW = {"link_flops_per_byte": 1e-3, "message_price": 0.0}


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {
        "table": (VOCABULARY, WIDTH),
        "place": (ROWS, WIDTH),
        "q": (3, WIDTH, HEADS, 4),
        "kv": (3, WIDTH, 2, 1, 4),
        "out": (3, HEADS, 4, WIDTH),
    }
    return {k: torch.randn(s, dtype=torch.float64) / 3 for k, s in sizes.items()}


def layer(x: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> Tensor:
    """x [b, s, m], 2 heads of queries, 1 of keys and values."""
    y = F.layer_norm(x, x.shape[-1:])
    queries = torch.einsum("bsm,mnd->bnsd", y, q)
    keys, values = torch.einsum("bsm,mcnd->cbnsd", y, kv)
    y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return F.gelu(x + torch.einsum("bnsd,ndm->bsm", y, out))


def loss_of(x: Tensor, w: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ w["table"].T).flatten(0, 1), targets.flatten())


def unrolled(w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = F.embedding(mark_sharding(tokens, MESH, "_ seq"), w["table"]) + w["place"]
    for each in zip(w["q"], w["kv"], w["out"]):
        x = layer(x, *each)
    return loss_of(x, w, targets)


def looped(w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = F.embedding(mark_sharding(tokens, MESH, "_ seq"), w["table"]) + w["place"]
    x, _ = scan(lambda x, each: (layer(x, *each), x.sum()), x, (w["q"], w["kv"], w["out"]))
    return loss_of(x, w, targets)


def with_dropout(w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = F.embedding(mark_sharding(tokens, MESH, "_ seq"), w["table"]) + w["place"]
    return loss_of(F.dropout(layer(x, w["q"][0], w["kv"][0], w["out"][0]), 0.5), w, targets)


MESH = Mesh(seq=3)
RINGS = {unrolled: 6, looped: 2}  # forward and backward, for each layer or once


def step(model, w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> tuple:
    leaves = {k: x.detach().requires_grad_() for k, x in w.items()}
    loss = model(leaves, tokens, targets)
    return loss, *torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)


def inputs() -> tuple:
    torch.manual_seed(1)
    return weights(), *(torch.randint(VOCABULARY, (2, ROWS)) for _ in range(2))


def planned(model, **options):
    return plan(lambda *args: step(model, *args), *inputs(), mesh=MESH, **options)


@pytest.mark.parametrize("model", [unrolled, looped])
def test_tokens_are_exchanged_and_nothing_else(model) -> None:
    """But the gradient of the table of positions. Targets are whole on every device."""
    result, args = planned(model, advanced={"costs": SLOW}), inputs()
    for got, want in zip(result.simulate(*args, _poison=True), step(unrolled, *args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert "zigzag_attention" in result.text(full=True)
    assert (
        sum("ring_attention" in str(n.target) for n in nodes_of(result.program.graph))
        == RINGS[model]
    )
    sent = {c.dtype: c.sent_bytes for c in result.collectives if c.kind == "permute"}
    half = ROWS / 3 / 2 * 8  # bytes that a device exchanges of a number for each token
    assert sent == {"i64": 2 * half, "f64": WIDTH * half}


def nodes_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of a program and of the bodies of its loops."""
    yield from graph.nodes
    for _, call in loop_calls(graph):
        yield from nodes_of(call.graph)


def test_positions_stay_with_their_tokens() -> None:
    """Dropout has the numbers of each token's own position, wherever the token is."""

    def loss(costs: dict[str, float] | None) -> tuple[Tensor, bool]:
        args = inputs()
        result = plan(with_dropout, *args, mesh=MESH, advanced={"costs": costs})
        torch.manual_seed(2)
        return result.simulate(*args), "zigzag_attention" in result.text(full=True)

    # A ring would not hide its messages, so late devices cannot lend queries instead.
    costs = {**SLOW, "link_flops_per_byte": 2.1}
    (balanced, is_balanced), (other, is_too) = loss(costs), loss(None)
    assert is_balanced and not is_too
    torch.testing.assert_close(balanced, other)


def cost_of(side: set, costs: list[list[int]]) -> int:
    return sum(
        row[j] for i, row in enumerate(costs) for j in range(6) if i in side and j not in side
    )


def test_the_cheapest_cut() -> None:
    """Compared with all cuts."""
    torch.manual_seed(0)
    for _ in range(20):
        costs = torch.where(torch.rand(6, 6) < 0.4, torch.randint(1, 9, (6, 6)), 0).tolist()
        cut = Cut()
        for i, j in itertools.product(range(6), repeat=2):
            cut.add(i, j, costs[i][j] if i != j else 0)
        cut.tie(1, 2)

        sides = [{0, *some} for n in range(5) for some in itertools.combinations(range(1, 5), n)]
        least = min(cost_of(side, costs) for side in sides if (1 in side) == (2 in side))
        side = cut.first_side(0, 5)
        assert cost_of(side, costs) == least and (1 in side) == (2 in side)
