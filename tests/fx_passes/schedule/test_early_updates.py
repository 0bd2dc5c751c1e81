"""Updates of weights that are gathered to be returned, between the gradients of the backward."""

import pytest
import torch
import zero_step

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.comm.collective import start


@pytest.mark.parametrize(
    "clip, order", [(None, "rs rs ag rs ag ag"), (1e-3, "rs rs rs ar ag ag ag")]
)
def test_a_gather_begins_after_the_next_sum(clip, order):
    """With clipping no update begins before the last sum: its scale needs all gradients."""
    step, x, options = zero_step.case("1", 3)
    alone, _, _ = zero_step.case("1", 3)
    alone.load_state_dict(step.state_dict())
    step.clip = alone.clip = clip
    mesh = zero_step.LAYOUT.on(Mesh(data=4))
    options["advanced"]["skip_passes"] = ["bucket"]
    plan = gspmd.plan(step, x, mesh=mesh, **options)
    sent = [n.args[0] for n in plan.program_graph.nodes if n.target is start]
    short = {"reduce_scatter": "rs", "all_gather": "ag", "all_reduce": "ar"}
    kinds = [short[kind] for kind in sent]
    kinds.remove("ar")  # the loss
    assert " ".join(kinds) == order
    for _ in range(2):
        torch.testing.assert_close(plan.simulate(x), alone(x))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(step.state_dict()[name], value)
