"""Products in parts that travel round a ring, against one process on every rank."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed
from tied_model import close
from torch import nn
from torch.library import Library

import torchgspmd as gspmd
from torchgspmd.comm import collective, hardware
from torchgspmd.comm.carriers import fused_einsum_scatter, fused_gather_einsum
from torchgspmd.comm.kinds import ring_einsum
from torchgspmd.compat import private_apis
from torchgspmd.fx_passes.schedule import collective_matmul


class Sequence(nn.Module):
    """Its stream is laid out along the sequence: gathered before `up` and `gate`, scattered behind
    `down`.
    """

    def __init__(self, mesh):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(48, 96),
            nn.Linear(48, 96, bias=False),
            nn.Linear(96, 48),
        )
        self.mesh = mesh

    def forward(self, x):  # [b, s, m]
        h = gspmd.mark_sharding(x.sin(), self.mesh, "_ model _")
        return gspmd.mark_sharding(
            self.down(F.gelu(self.up(h)) * self.gate(h)), self.mesh, "_ model _"
        )


@distributed("model=3", "model=2")
@pytest.mark.parametrize("backend", ["torch", "inductor"])
@patch.object(hardware, "CPU", hardware.GPU)
@patch.object(collective_matmul, "GAIN", float("inf"))
def test_rings(mesh, backend):
    """Rings are made to pay here."""
    model = trained_as_one_device(mesh, backend=backend)
    targets = [n.target for n in model.plan.program.graph.nodes]
    assert ring_einsum.gather_einsum in targets and ring_einsum.einsum_scatter in targets, (
        model.plan
    )


@distributed("model=2")
@patch.object(hardware, "CPU", hardware.GPU)
@patch.object(collective_matmul, "GAIN", float("inf"))
def test_symmetric_memory(mesh):
    """PyTorch's fused products take the rings' place; on the CPU its fallbacks compute them."""
    library, torch_own = Library("symm_mem", "IMPL"), private_apis._symmetric_memory
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(torch_own, f"_{name}_fallback"), "CPU")
    with patch.object(collective, "is_connected", lambda groups, axes: True):
        model = trained_as_one_device(mesh, advanced={"carriers": ["symmetric_memory"]})
    (program,) = model._all_programs()
    targets = {node.target for node in program.forward.__self__.graph.nodes}
    assert {fused_gather_einsum, fused_einsum_scatter} <= targets, targets
    assert not targets & {ring_einsum.ring_gather_einsum, ring_einsum.ring_einsum_scatter}


def trained_as_one_device(mesh, **options):
    """Return the model after a step whose result and gradients are those of one device."""
    torch.manual_seed(0)
    reference, x = Sequence(mesh), torch.randn(2, 12, 48)
    marks = {
        "up.weight": "model _",
        "up.bias": "model",
        "gate.weight": "model _",
        "down.weight": "_ model",
    }
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, marks), mesh, **options
    )
    close(model(x), reference(x))
    for m in (model, reference):
        m(x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)
    return model
