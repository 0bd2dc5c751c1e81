"""Rings under masks: a device gets the rows that it sees. Numbers, bytes, and layouts chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchgspmd import Mesh, plan
from torchgspmd.features.attention import ring_rows

LENGTH, WIDTH = 48, 8
SPEC = "_ _ seq _"
AT = torch.arange(LENGTH)
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 7)


def documents(lengths: list[int]) -> Mask:
    """Each row of the batch begins its documents somewhere else."""
    ends = torch.tensor(lengths).cumsum(0)
    ids = torch.stack([(AT.view(-1, 1) >= ends).sum(1), (AT.view(-1, 1) + 3 >= ends).sum(1)])
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def prefix(lengths: list[int]) -> Mask:
    ends = torch.tensor(lengths)
    return lambda b, h, q, k: (k < ends[b]) | (q >= k)


def both(one: Mask, other: Mask) -> Mask:
    return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ((q - k) % 16 == 0) | (abs(q - k) < 3 + h)


def drawn() -> dict[str, Mask]:
    draw = random.Random(0)
    masks: dict[str, Mask] = {"prefix": prefix([3, 20]), "strided": strided, "window": window}
    masks |= {"one": both(documents([LENGTH]), causal), "empty": documents([0, 9, 0, 0, 39])}
    masks["both ways"] = documents([11, 30, 7])
    masks["none"] = lambda b, h, q, k: q < -1
    for i in range(6):
        lengths = [draw.choice((0, 1, 5, 14, 30)) for _ in range(5)]
        mask = both(documents(lengths), draw.choice((causal, window)))
        masks[f"documents {i}"] = both(mask, prefix([9, 2])) if i % 3 == 2 else mask
    return masks


MASKS = drawn()


def tensors(heads: int, kv_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    counts = heads, kv_heads, kv_heads, heads
    return [torch.randn(2, n, LENGTH, WIDTH, dtype=torch.float64) for n in counts]


def step(mask: Mask) -> Callable[..., tuple]:
    sizes = 2, 4, LENGTH, LENGTH

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        blocks = create_block_mask(mask, *sizes, device="cpu")
        out = flex_attention(*leaves, block_mask=blocks, enable_gqa=True)
        return out, *torch.autograd.grad(out, leaves, grad)

    return attend


def seen(mask: Mask, heads: int) -> Tensor:
    places = torch.arange(2).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    return mask(*places, AT.view(-1, 1), AT).expand(2, heads, LENGTH, LENGTH)


def by_hand(mask: Mask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT / WIDTH**0.5
    scores = scores.masked_fill(~seen(mask, q.shape[1]), -torch.inf)
    out = scores.softmax(-1).nan_to_num() @ values
    return out, *torch.autograd.grad(out, leaves, grad)


def planned(mask: Mask, n: int, inputs: list[Tensor], **advanced: Any) -> Any:
    options = {"mesh": Mesh(seq=n), "in_specs": (SPEC,) * 4, "out_specs": (SPEC,) * 4}
    return plan(step(mask), *inputs, **options, advanced=advanced)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [4, 5])
def test_numbers(name: str, n: int) -> None:
    inputs = tensors(4, 1)
    result = planned(MASKS[name], n, inputs, regather="all")
    assert "ring_attention" in str([node.target for node in result.program.graph.nodes])
    got, want = result.simulate(*inputs, _poison=True), by_hand(MASKS[name], *inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def messages(result: Any, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each message that devices send."""
    sent = []

    def packed(tensors: list[Tensor], *dtype: torch.dtype) -> Tensor:
        sent.append(sum(x.nbytes for x in tensors))
        return original(tensors, *dtype)

    original = ring_rows.packed
    monkeypatch.setattr(ring_rows, "packed", packed)
    result.simulate(*inputs)
    return sent


def test_a_window_sends_its_rows_to_the_next_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 rows the last 6: keys, values and their gradients."""
    inputs, n = tensors(4, 1), 4
    result = planned(window, n, inputs)
    rows = 2 * 2 * 6 * WIDTH * 8  # batch, keys and values, rows, width, bytes
    # Forward, and once more in the backward, whose gradients come back.
    assert messages(result, inputs, monkeypatch) == [rows] * 3 * (n - 1)
    assert result.sent_bytes == pytest.approx(3 * rows)


def test_documents_of_one_device_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(4, 4)
    lengths = torch.tensor([12] * 4).cumsum(0)
    ids = (AT.view(-1, 1) >= lengths).sum(1)
    result = planned(lambda b, h, q, k: ids[q] == ids[k], 4, inputs)
    assert result.sent_bytes == 0
    assert not messages(result, inputs, monkeypatch)


def test_masks_that_only_a_run_knows_send_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts all rows."""
    ends = torch.tensor([[5, 20, 41, 48], [9, 10, 30, 48]])

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        ids = (AT >= ends.unsqueeze(2)).sum(1)
        mask = create_block_mask(
            lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k), 2, None, LENGTH, LENGTH, "cpu"
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    inputs, n = [*tensors(4, 1)[:3], ends], 4
    specs = (SPEC,) * 3 + ("_ _",)
    result = plan(
        attend,
        *inputs,
        mesh=Mesh(seq=n),
        in_specs=specs,
        out_specs=SPEC,
        advanced={"regather": "all"},
    )
    ids = (AT >= ends.unsqueeze(2)).sum(1)
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (AT.view(-1, 1) >= AT)
    sent = messages(result, inputs, monkeypatch)
    every = 2 * 2 * (LENGTH // n) * WIDTH * 8 * (n - 1)
    assert result.sent_bytes == every
    # Keys before the first one that a device's queries see do not travel.
    needed = mask.any(0).view(n, LENGTH // n, LENGTH).any(1)
    rows = sum(
        LENGTH // n - int(here.int().argmax())
        for i in range(n)
        for j in range(i)
        if (here := needed[i].view(n, -1)[j]).any()
    )
    assert sum(sent) == 2 * 2 * rows * WIDTH * 8
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs[:3], mask.unsqueeze(1), enable_gqa=True
    )
    torch.testing.assert_close(result.simulate(*inputs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width, kind", [(4, "all_gather"), (40, "all_to_all")])
def test_the_mask_decides_between_keys_and_heads(width: int, kind: str) -> None:
    """As many heads as devices: few rows travel, or heads are exchanged."""
    result = planned(lambda b, h, q, k: (q >= k) & (q - k < width), 4, tensors(4, 4))
    assert {c.kind for c in result.collectives if c.sent_bytes} >= {kind}


def test_each_layer_of_a_model_has_its_own_way() -> None:
    """Four key heads on eight devices: a causal layer splits the axis, and a window keeps it."""
    length = 256

    def attend(x: Tensor, weights: Tensor) -> Tensor:  # [s, m], [qkv, m, n, d]
        blocks = create_block_mask(window, None, None, length, length, device=x.device)
        for layer in range(2):
            q, k, v = torch.einsum("sm,cmnd->cnsd", x, weights).unsqueeze(1).unbind(0)
            if layer:
                y = torch.nn.functional.scaled_dot_product_attention(
                    q, k[:, :4], v[:, :4], is_causal=True, enable_gqa=True
                )
            else:
                y = flex_attention(q, k[:, :4], v[:, :4], block_mask=blocks, enable_gqa=True)
            x = x + y[0].transpose(0, 1).flatten(1)
        return x.square().mean()

    torch.manual_seed(0)
    inputs = torch.randn(length, 64), torch.randn(3, 64, 8, 8) / 8
    result = plan(attend, *inputs, mesh=Mesh(seq=8), in_specs=("seq _", None))
    alone = plan(attend, *inputs, mesh=Mesh(seq=1))
    torch.testing.assert_close(result.simulate(*inputs), alone.simulate(*inputs))
    sent = {c.kind: c.sent_bytes for c in result.collectives}
    rows = 2 * 4 * 6 * 8 * 4  # keys and values, heads, rows, width, bytes
    assert sent["all_gather"] == pytest.approx(rows / 2)
    assert "all_to_all" in sent


def test_a_mask_that_hides_everything_is_not_sent() -> None:
    result = planned(MASKS["none"], 4, tensors(4, 1))
    assert result.sent_bytes == 0
    assert result.verify()


def packed_rows(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, positions: Tensor) -> tuple:
    """Attend as models in transformers do: a document begins where positions restart."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ids = (positions == 0).cumsum(-1)
    seen = ids.unsqueeze(2) == ids.unsqueeze(1)
    seen = seen & (AT.view(-1, 1) >= AT)
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, seen.unsqueeze(1), enable_gqa=True
    )
    return out, *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("dtype, kept", [(torch.float64, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("n", [4, 5])
def test_boolean_masks_send_what_is_seen(
    n: int, dtype: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [[9, 20, 1, 18], [3, 3, 42]]
    positions = torch.stack([torch.cat([*map(torch.arange, each)]) for each in lengths])
    inputs = [*(x.to(dtype) for x in tensors(4, 1)), positions]
    result = plan(
        packed_rows,
        *inputs,
        mesh=Mesh(seq=n),
        in_specs=(SPEC,) * 4 + ("_ seq",),
        out_specs=(SPEC,) * 4,
        advanced={"regather": "all", "skip_passes": ("position_masks",) * kept},
    )
    assert "ring_attention" in str([node.target for node in result.program.graph.nodes])
    got, want = result.simulate(*inputs, _poison=True), packed_rows(*inputs)
    tolerance = 1e-10 if dtype == torch.float64 else 5e-2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    ids = (positions == 0).cumsum(-1)
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (AT.view(-1, 1) >= AT)
    seen = mask.any(0)
    width = -(-LENGTH // n)
    ends = [(i, min(i + width, LENGTH)) for i in range(0, LENGTH, width)]
    rows = 0
    for device, (a, b) in enumerate(ends):
        for block, (c, d) in enumerate(ends):
            at = seen[a:b, c:d].any(0).nonzero()
            if device != block and at.numel():
                rows += int(at.max() - at.min()) + 1
    # Forward, again in the backward, and gradients. Twice a device tells which rows it sees, but
    # where all of them know the documents.
    told = 2 * n * n * 16 * kept
    expected = 3 * rows * 2 * 2 * WIDTH * inputs[0].element_size() + told
    assert sum(messages(result, inputs, monkeypatch)) == expected
