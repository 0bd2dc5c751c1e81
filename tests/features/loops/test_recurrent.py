"""LSTM, GRU and RNN, divided by the batch."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, eager, message
from torch import nn

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


@pytest.mark.parametrize(
    "module, options",
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 3, "bias": False}),
        (nn.GRU, {"batch_first": True}),
        (nn.GRU, {"num_layers": 2, "bias": False}),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
        (nn.RNN, {"batch_first": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [4, 3, None])
def test_numbers(module, options, batch):
    torch.manual_seed(0)
    model = module(6, 5, **options)
    for parameter in model.parameters():
        gspmd.mark_sharding(parameter, MESH, "model _" if parameter.dim() > 1 else "model")
    shape = (
        (2, 6) if batch is None else (batch, 2, 6) if options.get("batch_first") else (2, batch, 6)
    )
    spec = "_ _" if batch is None else "data _ _" if options.get("batch_first") else "_ data _"
    x = torch.randn(shape)
    plan = gspmd.plan(model, x, mesh=MESH, in_specs=spec, grad=True)
    assert_same(plan.simulate(x), eager(model, x), terms=256)
    assert plan.captured.holds([x])


def test_the_batch_stays_divided():
    model, x = nn.LSTM(6, 8, batch_first=True), torch.randn(8, 3, 6)
    plan = gspmd.plan(
        model,
        x,
        mesh=gspmd.Mesh(data=4),
        in_specs="data _ _",
        out_specs=("data _ _", "_ data _"),
        grad=True,
        strict=True,
    )
    assert {c.kind for c in plan.collectives} == {"all_reduce"}  # of gradients


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_sequences_are_an_error(layer):
    model, x = layer(6, 8), torch.randn(4, 3, 6)
    packed = nn.utils.rnn.pack_padded_sequence(x, [4, 2, 1])

    def last(data, sizes):
        return model(nn.utils.rnn.PackedSequence(data, sizes))[1]

    assert "the program depends on values" in message(
        lambda: gspmd.plan(last, packed.data, packed.batch_sizes, mesh=MESH)
    )
