"""A training step under the layouts of ZeRO (arXiv 1910.02054), and the bytes that each sends.

1   weights on all devices, states sharded: gradients are reduce-scattered, new weights gathered
2   weights stored sharded, gathered once and used by the backward, too: the same bytes
3   weights stored sharded, gathered in the forward and again in the backward
"""

import torch
from torch import nn

import torchgspmd as gspmd

LAYOUT = gspmd.Layout({"batch": "data", "embed": "data"})
STAGES = ("1", "2", "3")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
WIDTH, BATCH = 64, 4096


def case(stage, layers, dtype=None, optimizer=torch.optim.AdamW):
    """Return (step, batch, options of plan and parallelize)."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    gspmd.annotate(model, {"*.weight": "_ _" if stage == "1" else "embed _"})
    step = gspmd.train_step(model, optimizer(model.parameters()), _loss, param_dtype=dtype)
    if stage == "1":
        gspmd.annotate(step, {"exp_avg*.**": "embed _"})
    regather = "always" if stage == "3" else "never"
    return (
        step,
        torch.ones(BATCH, WIDTH),
        {"in_specs": "batch _", "advanced": {"regather": regather}},
    )


def expected_bytes(stage, layers, n, dtype=None):
    """Return what one of n devices sends."""
    once = (n - 1) / n * layers * WIDTH * WIDTH
    computed = (dtype or torch.float32).itemsize
    scattered, stored = once * computed, once * torch.float32.itemsize
    if stage == "1":
        return scattered + stored
    gathers = 1 if stage == "2" else (2 * layers - 1) / layers
    return scattered + gathers * once * computed


def _loss(model, x):
    return model(x).square().mean()
