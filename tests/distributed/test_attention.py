"""Attention with sharded queries, and with sharded keys, against one process on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_cases import by_hand, fused
from ranks import distributed
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchgspmd as gspmd
from torchgspmd.features.attention.ring import ring_attention, ring_attention_backward


class Attention(nn.Module):
    """Grouped heads. keys: whether x is marked along them, and a single query attends to them."""

    def __init__(self, mesh: gspmd.Mesh, kind: str, kv_heads: int = 2) -> None:
        super().__init__()
        self.mesh, self.kind = mesh, kind
        self.q, self.kv, self.out = (nn.Linear(32, n) for n in (32, 16 * kv_heads, 32))

    def forward(self, x: Tensor) -> Tensor:  # [b, s, m]
        x = gspmd.mark_sharding(x.sin(), self.mesh, "_ seq _")
        token = self.kind == "token"
        q = self.q(x.mean(1, True) if token else x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, 1)
        mask = (torch.arange(x.shape[1]) < x.shape[1] - 2)[None] if self.kind == "padding" else None
        causal = self.kind == "causal"
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["causal", "padding", "token"])
@distributed("seq=4")
def test_numbers(mesh: gspmd.Mesh, kind: str) -> None:
    compare(mesh, Attention(mesh, kind), 14)


@pytest.mark.parametrize("kind, length", [("causal", 14), ("padding", 14)])
@distributed("seq=4")
def test_rings(mesh: gspmd.Mesh, kind: str, length: int) -> None:
    """One head of keys, so that nothing but queries is sharded."""
    plan = compare(
        mesh,
        Attention(mesh, kind, 1),
        length,
        advanced={"regather": "all", "costs": {"message_price": 0}},
    ).plan
    targets = {n.target for n in plan.program.graph.nodes}
    assert {ring_attention, ring_attention_backward} <= targets, plan


class Dropout(Attention):
    """alone: computes all scores, and draws for all of them at once."""

    alone = False

    def forward(self, x: Tensor) -> Tensor:
        x = gspmd.mark_sharding(x.sin(), self.mesh, "_ seq _")
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, 1)
        y = (by_hand if self.alone else fused)(q, k, v, None, self.kind == "causal", 0.3)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("regather", ["never", "all"])
@distributed("seq=4")
def test_dropout(mesh: gspmd.Mesh, regather: str) -> None:
    """Of whole keys, and in a ring."""
    alone = Dropout(mesh, "causal", 1)
    alone.alone = True
    compare(mesh, alone, 14, advanced={"regather": regather})


def documents(length: int):
    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // length == k // length) & (q >= k)

    return seen


class Documents(Attention):
    length = 5

    def forward(self, x: Tensor) -> Tensor:
        x = gspmd.mark_sharding(x.sin(), self.mesh, "_ seq _")
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, 1)
        at = torch.arange(x.shape[1])
        if self.kind == "by hand":
            mask = documents(self.length)(at, at, at.unsqueeze(1), at)
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        else:
            sizes = None, None, len(at), len(at)
            blocks = create_block_mask(documents(self.length), *sizes, device="cpu")
            y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@distributed("seq=4")
def test_functions_of_positions(mesh: gspmd.Mesh) -> None:
    compare(mesh, Documents(mesh, "by hand"), 14, kind="flex")


@distributed("seq=2")
def test_blocks_of_tokens_in_another_order(mesh: gspmd.Mesh) -> None:
    """Planning knows the documents; devices that compute little are worth an exchange."""
    options = {"costs": {"link_flops_per_byte": 1e-4}, "regather": "all"}
    alone = Documents(mesh, "by hand", 1)
    alone.length = 24
    model = compare(mesh, alone, 32, kind="flex", advanced=options)
    assert "blocks of tokens ordered by their work" in model.plan.summary()


def compare(
    mesh: gspmd.Mesh, alone: nn.Module, length: int, kind: str = "", **options
) -> nn.Module:
    torch.manual_seed(0)
    alone = alone.double()
    other = copy.deepcopy(alone)
    other.kind, other.alone = kind or alone.kind, False
    sharded = gspmd.parallelize(other, mesh, **options)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    torch.manual_seed(1)
    want = alone(x)
    torch.manual_seed(1)
    got = sharded(x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-10, atol=1e-10)
    return sharded
