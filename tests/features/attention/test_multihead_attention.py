"""nn.MultiheadAttention and what is built on it: numbers on sharded heads and batch, and what is
sent.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, eager
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)
L, S, N, E, H = 5, 6, 4, 12, 3  # three heads: uneven over model=2
FLOATS, BOOLS = torch.randn(N * H, L, S), torch.rand(L, S) < 0.3
BOOLS[:, 0] = False  # every query sees some key
PADDING = torch.arange(S) >= torch.tensor([6, 5, 4, 6])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S)
QUERY, KEY, VALUE = torch.randn(L, N, E), torch.randn(S, N, E), torch.randn(S, N, E)
SAME = (KEY,) * 3


def attention(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(E, H, **options)
    if made.out_proj.bias is not None:
        nn.init.normal_(made.out_proj.bias)
    for name, parameter in made.named_parameters():
        if name.endswith("weight"):
            gspmd.mark_sharding(parameter, MESH, "_ model" if "out" in name else "model _")
    return made


@pytest.mark.parametrize(
    "module, tensors, call",
    [
        ({}, (QUERY, KEY, VALUE), {}),
        (
            {},
            (QUERY, KEY, VALUE),
            {"average_attn_weights": False, "attn_mask": BOOLS, "key_padding_mask": PADDING},
        ),
        ({}, (QUERY, KEY, VALUE), {"need_weights": False, "attn_mask": FLOATS}),
        ({}, (QUERY, KEY, VALUE), {"need_weights": False, "key_padding_mask": PADDING}),
        ({}, SAME, {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True}),
        ({}, SAME, {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING}),
        ({"bias": False}, SAME, {"need_weights": False}),
        (
            {"batch_first": True},
            tuple(t.transpose(0, 1) for t in (QUERY, KEY, VALUE)),
            {"need_weights": False},
        ),
        ({"kdim": 7, "vdim": 9}, (QUERY, torch.randn(S, N, 7), torch.randn(S, N, 9)), {}),
        ({}, (QUERY[:, 0], KEY[:, 0], VALUE[:, 0]), {"attn_mask": BOOLS}),
        (
            {"add_bias_kv": True, "add_zero_attn": True},
            (QUERY, KEY, VALUE),
            {"need_weights": False},
        ),
    ],
)
def test_numbers(module, tensors, call):
    model = attention(**module)
    batch = (
        "data _ _" if module.get("batch_first") else "_ data _" if tensors[0].dim() == 3 else "_ _"
    )
    plan = gspmd.plan(model, *tensors, mesh=MESH, in_specs=(batch,) * 3, grad=True, **call)
    assert not any(
        "dot_product" in str(node.target) for node in plan.program.graph.nodes
    )  # never as one kernel on flattened heads
    got, want = plan.simulate(*tensors, **call), eager(model, *tensors, **call)
    assert_same(got, want, terms=256)


class AttentionPool(nn.Module):
    """CLIP's: the mean of all positions asks, and what comes out is wider than what goes in."""

    def __init__(self, out: int):
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(E, E),
            nn.Linear(E, E),
            nn.Linear(E, E),
            nn.Linear(E, out),
        )

    def forward(self, x):
        x = torch.cat([x.mean(0, keepdim=True), x])
        y, _ = nn.functional.multi_head_attention_forward(
            x[:1],
            x,
            x,
            E,
            H,
            None,
            torch.cat([self.q.bias, self.k.bias, self.v.bias]),
            None,
            None,
            False,
            0.0,
            self.out.weight,
            self.out.bias,
            need_weights=False,
            use_separate_proj_weight=True,
            q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight,
        )
        return y.squeeze(0)


@pytest.mark.parametrize("out", [8, 20])
def test_what_comes_out_may_have_another_width(out):
    torch.manual_seed(0)
    model = AttentionPool(out)
    gspmd.annotate(model, MESH, {"*.weight": "model _", "out.weight": "_ model"})
    plan = gspmd.plan(model, KEY, mesh=MESH, in_specs="_ data _", grad=True)
    assert_same(plan.simulate(KEY), eager(model, KEY), terms=256)


@pytest.mark.parametrize("batch_first", [False, True])
def test_batch_and_heads_stay_sharded(batch_first):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
    for name, parameter in model.named_parameters():
        if name in ("linear1.weight", "linear1.bias"):
            gspmd.mark_sharding(parameter, MESH, "model" + " _" * (parameter.dim() - 1))
        if name in ("linear2.weight", "self_attn.out_proj.weight"):
            gspmd.mark_sharding(parameter, MESH, "_ model")
    x = torch.randn(4, 8, 16)
    spec = "data _ _" if batch_first else "_ data _"
    plan = gspmd.plan(model, x, mesh=MESH, in_specs=spec, out_specs=spec, grad=True)
    assert_same(plan.simulate(x), eager(model, x), terms=256)
    over_data = {c.kind for c in plan.collectives if c.axes == ("data",)}
    assert over_data == {"all_reduce"}  # gradients
    assert all(
        "in_proj" in op.why or "stack" in op.why for op in plan.replicated_ops
    )  # heads of the packed weight do not line up
