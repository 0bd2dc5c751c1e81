"""Attention that is sharded by batch, heads, queries and keys: its numbers, and what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import KINDS, MESHES, Case, check, mask_of
from torch import Tensor

from torchgspmd import Mesh, plan
from torchgspmd.features.attention import tiles as attention_tiles
from torchgspmd.features.attention.op import zigzag as zigzag_order

HEADS = ((4, 4), (8, 2), (4, 1))  # of queries, of keys
# Every pair of values of two columns occurs, and every kind on every mesh.
CASES = [
    Case(
        kind,
        mesh,
        heads=(i + j) % 3,
        even=(i + j // 2) % 2 == 0,
        dropout=0.1 * ((i // 2 + j) % 2),
        dtype=(torch.float64, torch.float32, torch.float64, torch.bfloat16)[(i + 2 * j) % 4],
    )
    for (i, kind), (j, mesh) in itertools.product(enumerate(KINDS), enumerate(MESHES))
]


def tensors(heads: int, kv_heads: int, s: int, t: int, batch: int = 2) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    torch.manual_seed(0)
    shapes = ((heads, s), (kv_heads, t), (kv_heads, t), (heads, s))
    return [torch.randn(batch, *shape, 8, dtype=torch.float64) for shape in shapes]


def step(kind: str):
    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, is_causal=kind == "causal", enable_gqa=gqa
        )
        return out, *torch.autograd.grad(out, leaves, grad)

    return attend


def compare(found, want) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_and_keys_are_sharded(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_dropout_by_tiles_of_the_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two queries and five keys have the weights, and the dropout, of all at once."""
    monkeypatch.setattr(attention_tiles, "TILE_KEYS", 5)
    monkeypatch.setattr(attention_tiles, "TILE", 2 * 12 * 2 * 5)
    check(Case(kind, "seq", 1, even=False, dropout=0.3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_results_for_parts_of_the_keys_are_merged(kind: str, heads: tuple[int, int]) -> None:
    """Few queries and many keys, as for a token with its cache."""
    keys, devices = "_ _ seq _", Mesh(seq=4)
    inputs = [*tensors(*heads, 3, 62), mask_of(kind, 2, heads[0], 3, 62)]
    attend = step(kind)
    result = plan(
        attend,
        *inputs,
        mesh=devices,
        in_specs=("_ _ _ _", keys, keys, "_ _ _ _", None),
        out_specs=("_ _ _ _", "_ _ _ _", keys, keys),
    )
    compare(result.simulate(*inputs), attend(*inputs))
    moved = {c.kind for c in result.collectives if c.payload_bytes > 4096}
    assert not moved, "keys or values have moved"


def test_a_token_sends_its_result_and_its_logsumexp_alone() -> None:
    q, k, v, _ = tensors(4, 4, 1, 256)
    result = plan(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        mesh=Mesh(seq=4),
        in_specs=("_ _ _ _", "_ _ seq _", "_ _ seq _"),
        out_specs="_ _ _ _",
    )
    lse, out = 4 * 2 * 4 * 8, 2 * 4 * 8 * 8  # bytes of all parts, and of the result
    assert result.sent_bytes <= 3 / 4 * (lse + 2 * out)


def expanded(x: Tensor, groups: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, groups, s, d).reshape(b, h * groups, s, d)


def expanded_before_transpose(x: Tensor, groups: int) -> Tensor:
    b, h, s, d = x.shape
    x = x.transpose(1, 2).unsqueeze(3).expand(b, s, h, groups, d)
    return x.reshape((b, s, h * groups, d)).transpose(1, 2)


def interleaved(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=1)


@pytest.mark.parametrize("repeat", [expanded, expanded_before_transpose, interleaved])
@pytest.mark.parametrize("kind", ["causal", "bias"])
def test_keys_that_a_program_repeats_are_not_repeated(kind: str, repeat) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        keys, values = (repeat(x, 4) for x in leaves[1:])
        out = F.scaled_dot_product_attention(
            leaves[0], keys, values, mask, is_causal=kind == "causal"
        )
        return out, *torch.autograd.grad(out, leaves, grad)

    inputs = [*tensors(8, 2, 16, 16), mask_of(kind, 2, 8, 16, 16)]
    spec = "_ _ seq _"
    result = plan(
        attend, *inputs, mesh=Mesh(seq=4), in_specs=(spec,) * 4 + (None,), out_specs=(spec,) * 4
    )
    compare(result.simulate(*inputs), attend(*inputs))
    assert max(c.payload_bytes for c in result.collectives) == 2 * 2 * 16 * 8 * 8


def changed_after(k: Tensor) -> Tensor:
    repeated = interleaved(k, 2)
    repeated *= 2
    return repeated


def changed_before(k: Tensor) -> Tensor:
    k = k * 1
    repeated = interleaved(k, 2)
    k *= 2
    return repeated


def changed_within(k: Tensor) -> Tensor:
    k = k * 1
    wide = k[:, :, None].expand(*k.shape[:2], 2, *k.shape[2:])
    k.mul_(2)
    repeated = wide.reshape(k.shape[0], -1, *k.shape[2:])
    repeated[:, 0] = 3
    return repeated


@pytest.mark.parametrize("change", [changed_after, changed_before, changed_within])
def test_keys_that_are_changed_in_place(change) -> None:
    q, k, v, _ = tensors(4, 2, 8, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, change(k), interleaved(v, 2))

    spec = "_ _ seq _"
    result = plan(attend, q, k, v, mesh=Mesh(seq=2), in_specs=(spec,) * 3, out_specs=spec)
    compare([result.simulate(q, k, v)], [attend(q, k, v)])


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_forward_sends_no_more_than_the_cheapest_way(devices: int, kv_heads: int) -> None:
    s, heads, d = 512, 8, 8
    q, k, v, _ = tensors(heads, kv_heads, s, s, batch=1)
    spec = "_ _ seq _"
    result = plan(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads < heads),
        *(q, k, v),
        mesh=Mesh(seq=devices),
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    n, row = devices, s * d * 8
    ways = [(n - 1) / n * 2 * kv_heads * row]
    if kv_heads % n == 0:
        ways.append((n - 1) / n**2 * (2 * heads + 2 * kv_heads) * row)
    assert result.sent_bytes <= min(ways)


@pytest.mark.parametrize("kind", ["causal", "none"])
def test_heads_take_a_part_of_an_axis(kind: str) -> None:
    """4 of 8 devices by heads, 2 by queries. Keys of 4 heads would be sent whole otherwise."""
    heads, s, d = 4, 32, 8
    inputs, spec, attend = [*tensors(heads, heads, s, s), None], "_ _ seq _", step(kind)
    result = plan(
        attend,
        *inputs,
        mesh=Mesh(seq=8),
        in_specs=(spec,) * 4 + (None,),
        out_specs=(spec,) * 4,
        advanced={"costs": {"link_flops_per_byte": 1}},  # slow devices, worth balancing
    )
    compare(result.simulate(*inputs), attend(*inputs))
    gather = 7 / 8 * 2 * heads * 2 * s * d * 8  # of keys and values; backward, it is as much
    assert result.sent_bytes < 2 * gather


@pytest.mark.parametrize("devices", [2, 4])
def test_causal_work_is_balanced(devices: int) -> None:
    """Counted by the blocks that a device computes; numbers are those of one device."""
    inputs, spec, attend = [*tensors(2, 1, 48, 48), None], "_ _ seq _", step("causal")
    result = plan(
        attend,
        *inputs,
        mesh=Mesh(seq=devices),
        in_specs=(spec,) * 4 + (None,),
        out_specs=(spec,) * 4,
        # Slow devices, worth balancing; in a ring late ones lend queries (test_lending.py).
        advanced={"costs": {"link_flops_per_byte": 1}, "regather": "never"},
    )
    compare(result.simulate(*inputs), attend(*inputs))
    zigzag = [n for n in result.sharded.nodes if "zigzag" in str(n.target)]
    assert [n.args[-2] for n in zigzag] == [devices] * 2
    positions = zigzag_order(torch.arange(48), 0, devices)
    visible = [part.add(1).sum().item() for part in positions.chunk(devices)]
    assert visible == [48 * 49 / 2 / devices] * devices


def stage(x: Tensor, qkv: Tensor, out: Tensor, mask: Tensor | None) -> Tensor:
    """x [b, s, m]: one block of a Transformer, but for its feed-forward layer."""
    q, k, v = torch.einsum("bsm,mcnd->cbnsd", F.layer_norm(x, x.shape[-1:]), qkv)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return x + torch.einsum("bnsd,ndm->bsm", y, out)


@pytest.mark.parametrize("masked", [False, True])
def test_stages_under_vmap_send_nothing(masked: bool) -> None:
    torch.manual_seed(0)
    sizes = ((4, 2, 6, 8), (4, 8, 3, 2, 4), (4, 2, 4, 8), (4, 2, 6, 8))
    inputs = [torch.randn(size, dtype=torch.float64) for size in sizes]
    specs = ["stage" + " _" * (x.dim() - 1) for x in inputs]
    mask = (torch.arange(6) < 5).repeat(6, 1) if masked else None

    def attend(*args: Any) -> tuple:
        *leaves, grad = (x.detach().requires_grad_() for x in args[:4])
        out = torch.vmap(lambda *x: stage(*x, args[4]))(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    result = plan(
        attend,
        *inputs,
        mask,
        mesh=Mesh(stage=4),
        in_specs=(*specs, None),
        out_specs=(specs[0], *specs[:3]),
    )
    assert not result.collectives
    compare(result.simulate(*inputs, mask), attend(*inputs, mask))


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "bias"])
@pytest.mark.parametrize("lead", [(), (2, 1, 3)], ids=["no batch", "three batches"])
def test_any_leading_dimensions(kind: str, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(*lead, 4, 7, 8, dtype=torch.float64) for _ in range(4))
    mask = {"padding": torch.arange(7) < 5, "bias": torch.randn(4, 7, 7, dtype=torch.float64)}
    spec = f"{'_ ' * len(lead)}_ seq _"
    inputs = [q, k, v, grad, mask.get(kind)]
    attend = step(kind)
    result = plan(
        attend, *inputs, mesh=Mesh(seq=2), in_specs=(spec,) * 4 + (None,), out_specs=(spec,) * 4
    )
    compare(result.simulate(*inputs), attend(*inputs))
