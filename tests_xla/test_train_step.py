"""train_step on XLA: the losses of a loop of torch on one device."""

import pytest
import torch
from step_cases import loop, pair

import torchgspmd as gspmd


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb"])
def test_a_step(name, microbatches):
    model, reference, optimizer, other, x = pair(name)
    layout = gspmd.Layout({"batch": "data", "hidden": None, "embed": "data"})
    layout = layout.on(gspmd.Mesh(data=8))
    step = gspmd.train_step(model, optimizer, clip=0.1, microbatches=microbatches)
    step = gspmd.parallelize(step, layout, in_specs="batch _", backend="xla")
    for _ in range(3):
        got = step(x).cpu()
        torch.testing.assert_close(got, loop(reference, other, x), rtol=1e-8, atol=1e-8)
