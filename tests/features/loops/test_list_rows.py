"""What loops stack for others is a list of rows; what anybody else takes is a tensor."""

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops import scan

import torchgspmd as gspmd
from torchgspmd.comm.local_ops import stack_rows
from torchgspmd.features.loops.list_rows import list_rows
from torchgspmd.fx_passes.loop_call import copy_loops, loop_calls
from torchgspmd.fx_passes.simulator import Simulator


class Layers(nn.Module):
    """Layers of weights [2, 3, 3] in microbatches [m, b, 3]; returns what leaves them, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 3).double())

    def forward(self, xs):
        def layer(h, w):
            return torch.tanh(h @ w), h.new_zeros(())

        def microbatch(total, x):
            y = scan(layer, x, self.weight)[0]
            return total + y.square().sum(), y

        return scan(microbatch, xs.new_zeros(()), xs)


@pytest.mark.filterwarnings("ignore")
def test_lists_of_lists():
    """The program of one device computes the same, and copies no activation into a stack."""
    torch.manual_seed(0)
    model, xs = Layers(), torch.randn(4, 5, 3).double()
    plan = gspmd.plan(model, xs, mesh=gspmd.Mesh(data=1), grad=True)
    graph, before = plan.local_graph(), plan.local_graph()
    copy_loops(graph)
    list_rows(graph)
    tangents = torch.tensor(2.0).double(), torch.randn(4, 5, 3).double()
    inputs = [[x] for x in (model.weight.detach(), xs, *tangents)]
    expected, found = (
        Simulator(fx.GraphModule(nn.Module(), g), plan.mesh).run_devices(inputs)
        for g in (before, graph)
    )
    for (a,), (b,) in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    (_, forward), (_, backward) = loop_calls(graph)
    (_, layers), (_, layers_back) = (*loop_calls(forward.graph), *loop_calls(backward.graph))
    assert forward.listed == {0, 1, 2} and forward.stacks == 4  # the last one is returned
    assert layers.listed == {0, 1} and layers.stacks == 2
    assert layers_back.listed == {0}  # gradients, which the loop around adds up
    assert sum(node.target is stack_rows for node in graph.nodes) == 1
