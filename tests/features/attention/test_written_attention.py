"""Attention that is written by hand, as the operation that keeps no scores."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchgspmd import Mesh, plan

B, H, S, D = 2, 4, 40, 8
AT = torch.arange(S)
CAUSAL = AT <= AT.unsqueeze(1)
BIAS = torch.randn(H, S, S, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def of_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(CAUSAL[None, None] == 0, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def of_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, d]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 3 + BIAS
    weights = torch.softmax(scores, 3)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def of_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(F.dropout(weights, 0.3, training=False), v).unflatten(0, (B, H))


def of_repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, ::2].repeat_interleave(2, 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = torch.where(CAUSAL, scores, -math.inf) + BIAS
    return torch.matmul(scores.softmax(-1, dtype=torch.float64), v)


def of_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(of_matrices, q, k, v, use_reentrant=False)


def tensors(length: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, length, D, dtype=torch.float64) for _ in range(4)]


def step(attend):
    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    return run


def planned(attend, *inputs: Tensor, mesh: Mesh = Mesh(seq=4), spec: str = "_ _ seq _"):
    specs = (spec,) * len(inputs)
    result = plan(attend, *inputs, mesh=mesh, in_specs=specs)
    names = [n.name for n in result.sharded.nodes]
    return result, [n for n in names if n.startswith(("attention", "_softmax", "softmax"))]


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "attend", [of_matrices, of_letters, of_three_dimensions, of_repeated_heads, of_a_checkpoint]
)
def test_no_scores_are_kept(attend) -> None:
    inputs = tensors()
    result, names = planned(step(attend), *inputs)
    assert names[0] == "attention" and names[-1] == "attention_backward"
    assert not [n for n in names if "softmax" in n]
    same(result.simulate(*inputs, _poison=True), step(attend)(*inputs))
    assert (
        max(n.meta["val"].numel() for n in result.sharded.nodes if "spec" in n.meta) < B * H * S * S
    )


def test_keys_that_are_repeated_are_not() -> None:
    result, _ = planned(of_repeated_heads, *tensors()[:3])
    (node,) = (n for n in result.sharded.nodes if n.name == "attention")
    assert node.args[1].meta["val"].shape == (B, 2, S, D)


def test_dropout_is_what_it_was() -> None:
    """The same numbers are drawn as for all weights at once."""

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT).softmax(-1), 0.4) @ v

    def needed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.dropout((q @ k.mT).softmax(-1), 0.4)
        return weights @ v, weights

    inputs, values = tensors()[:3], []
    for attend in (dropped, needed):
        result, names = planned(attend, *inputs)
        assert ("attention" in names) == (attend is dropped)
        torch.manual_seed(5)
        values.append(result.simulate(*inputs))
    torch.testing.assert_close(values[0], values[1][0], rtol=1e-10, atol=1e-10)


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def of_another_dtype(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.bfloat16() @ k.bfloat16().mT).softmax(
        -1, dtype=torch.float32
    ).bfloat16() @ v.bfloat16()


def scaled_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + BIAS) * 0.5).softmax(-1) @ v


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., 0] = 0
    return scores.softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).mT @ v


@pytest.mark.parametrize(
    "attend",
    [returned, of_another_dtype, scaled_late, changed_in_place, over_queries, of_queries],
)
def test_what_is_left_as_it_is(attend) -> None:
    inputs = tensors()[:3]
    result, names = planned(attend, *inputs)
    assert "attention" not in names
    got, want = result.simulate(*inputs), attend(*inputs)
    if attend is of_another_dtype:
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    else:
        same(
            got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)
        )


def test_few_scores_are_left_as_they_are() -> None:
    assert (
        "attention" not in planned(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *tensors(8)[:3])[1]
    )


def test_a_bias_that_needs_a_gradient() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple:
        bias = bias.detach().requires_grad_()
        out = (q @ k.mT + bias).softmax(-1) @ v
        return out, *torch.autograd.grad(out.sum(), bias)

    inputs = [*tensors()[:3], BIAS.expand(B, H, S, S).contiguous()]
    result, names = planned(attend, *inputs)
    assert "attention" not in names
    same(result.simulate(*inputs), attend(*inputs))
