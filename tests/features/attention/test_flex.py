"""flex_attention as one operation: numbers against eager PyTorch, positions on every shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgspmd import Mesh, ShardingError, plan
from torchgspmd.compiler.plan import Plan
from torchgspmd.features.attention import tiles as attention_tiles

LENGTH = 24
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
DOCUMENTS = torch.tensor([0] * 7 + [1] * 12 + [2] * 5)
MESHES = {
    "seq": (Mesh(seq=4), "_ _ seq _"),
    "uneven": (Mesh(seq=5), "_ _ seq _"),
    "model_seq": (Mesh(model=2, seq=3), "_ model seq _"),
    "three": (Mesh(data=2, seq=2, model=2), "data model seq _"),
}


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 5)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)


def of_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((h + b) % 2 == 0, q >= k, q - k < 3)


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q) + (b == 1) * 0.5


def squared(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q == k, score, score * score - score)


def tensors(kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (LENGTH, 8)
    return [torch.randn(2, h, *shape, dtype=torch.float64) for h in (4, kv_heads, kv_heads, 4)]


def step(mask_mod: Callable | None, score_mod: Callable | None, gqa: bool = True) -> Callable:
    blocks = None
    if mask_mod is not None:
        blocks = create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flex_attention(*leaves, score_mod, blocks, enable_gqa=gqa)
        return out, *torch.autograd.grad(out, leaves, grad)

    return attend


def by_hand(mask_mod: Callable | None, score_mod: Callable | None) -> Callable:
    """Compute all scores, with positions that broadcast."""
    at = torch.arange(LENGTH)
    places = torch.arange(2).view(-1, 1, 1, 1), torch.arange(4).view(-1, 1, 1), at.view(-1, 1), at

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in leaves[1:])
        scores = leaves[0] @ keys.mT / 8**0.5
        scores = scores if score_mod is None else score_mod(scores, *places)
        if mask_mod is not None:
            scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
        out = scores.softmax(-1) @ values
        return out, *torch.autograd.grad(out, leaves, grad)

    return attend


CASES = [
    ("seq", causal, None),
    ("uneven", documents, capped),
    ("model_seq", window, biased),
    ("three", of_head, squared),
    ("uneven", None, biased),
    ("three", documents, None),
]


@pytest.mark.parametrize("mesh, mask_mod, score_mod", CASES)
def test_numbers(mesh: str, mask_mod, score_mod, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles of a few queries and keys, so that some are empty."""
    monkeypatch.setattr(attention_tiles, "TILE_KEYS", 5)
    monkeypatch.setattr(attention_tiles, "TILE", 8 * 4 * 5)
    devices, spec = MESHES[mesh]
    inputs, run = tensors(), step(mask_mod, score_mod)
    result = plan(run, *inputs, mesh=devices, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    assert [n.name for n in result.sharded.nodes if n.name.startswith("flex_attention")]
    assert not result.replicated_ops
    compare(result, inputs, mask_mod, score_mod)


@pytest.mark.parametrize("mask_mod, score_mod", [(documents, biased), (window, None)])
def test_keys_travel_round_a_ring(mask_mod, score_mod) -> None:
    """One head of keys, and lengths that do not divide."""
    inputs, spec, run = tensors(1), "_ _ seq _", step(mask_mod, score_mod)
    result = plan(
        run,
        *inputs,
        mesh=Mesh(seq=5),
        in_specs=(spec,) * 4,
        out_specs=(spec,) * 4,
        advanced={"costs": {"link_flops_per_byte": 1e-6}},
    )
    targets = [str(n.target) for n in result.program.graph.nodes]
    assert {"ring_attention", "ring_attention_backward"} <= {*targets}
    compare(result, inputs, mask_mod, score_mod)


def compare(result: Plan, inputs: list[Tensor], mask_mod, score_mod) -> None:
    got, want = result.simulate(*inputs, _poison=True), by_hand(mask_mod, score_mod)(*inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_eager_flex_attention_has_the_same_numbers() -> None:
    """Forward: it has no backward on CPUs."""
    q, k, v, grad = tensors()
    blocks = create_block_mask(documents, None, None, LENGTH, LENGTH, device="cpu")
    got = flex_attention(q, k, v, biased, blocks, enable_gqa=True)
    want = by_hand(documents, biased)(q, k, v, grad)[0]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_empty_tiles_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 5 of 24 keys meets 9 of 24 tiles of 4 queries and 6 keys."""
    monkeypatch.setattr(attention_tiles, "TILE_KEYS", 6)
    monkeypatch.setattr(attention_tiles, "TILE", 8 * 4 * 6)
    products = []
    einsum = attention_tiles.einsum
    monkeypatch.setattr(
        attention_tiles, "einsum", lambda *args: products.append(args[0]) or einsum(*args)
    )
    q, k, v, _ = tensors()
    blocks = create_block_mask(window, None, None, LENGTH, LENGTH, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    plan(attend, q, k, v, mesh=Mesh(seq=1)).simulate(q, k, v)
    at = torch.arange(LENGTH)
    seen = window(at, at, at.view(-1, 1), at).view(6, 4, 4, 6).any(1).any(-1)
    assert len(products) == 2 * int(seen.sum()) < 2 * seen.numel()


def test_what_is_read_may_be_of_the_program() -> None:
    q, k, v, _ = tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        doubled = 2 * slopes
        return flex_attention(
            q, k, v, lambda s, b, h, i, j: s + doubled[h] * (j - i), enable_gqa=True
        )

    spec = "_ _ seq _"
    inputs = (q, k, v, SLOPES)
    result = plan(attend, *inputs, mesh=Mesh(seq=4), in_specs=(spec,) * 3 + ("_",), out_specs=spec)
    assert "aten.index.Tensor(u0, [h])" in result.text(full=True)
    at = torch.arange(LENGTH)
    bias = 2 * SLOPES.view(4, 1, 1) * (at - at.view(-1, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    torch.testing.assert_close(result.simulate(*inputs), want, rtol=1e-10, atol=1e-10)


def test_gradients_of_what_is_read_and_statistics_are_pytorchs() -> None:
    """Then all scores are computed, as before."""
    q, k, v, _ = tensors(4)

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple:
        slopes = slopes.detach().requires_grad_()
        out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: s * slopes[h], return_lse=True)
        (grad,) = torch.autograd.grad((out.sum() + lse.sum()), slopes)
        return out, lse, grad

    inputs = (q, k, v, SLOPES)
    result = plan(attend, *inputs, mesh=Mesh(model=2), in_specs=("_ model _ _",) * 3 + ("_",))
    scores = (q @ k.mT / 8**0.5).requires_grad_()
    slopes = SLOPES.clone().requires_grad_()
    changed = scores * slopes.view(4, 1, 1)
    out, lse = changed.softmax(-1) @ v, changed.logsumexp(-1)
    want = out, lse, *torch.autograd.grad(out.sum() + lse.sum(), slopes)
    for a, b in zip(result.simulate(*inputs), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


NO_EXPRESSIONS = (
    "__import__('os').abort()",
    "aten.add.Tensor(q, (lambda: k)())",
    "aten.from_file.default('/etc/passwd', None, 8)",
    "aten.add_.Tensor(q, k)",
    "torch.load('file')",
    "aten.__class__",
    "q.__class__",
    "[q for q in k]",
    "aten.ge.Tensor(*q)",
    "aten.ge.Tensor(q, k, **{})",
    "(open := q)",
    "f'{q}'",
    "q if k else b",
    "-" * 5000 + "q",
    "q, ; k",
)


@pytest.mark.parametrize("text", NO_EXPRESSIONS, ids=lambda text: text[:20])
def test_a_text_that_is_no_expression_is_not_evaluated(text):
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ShardingError, match="no expression of elementwise operations"):
        torch.ops.torchgspmd.flex_attention(q, q, q, [], text, "", "", 1.0)
