"""Models whose programs are unlike a Transformer's, against one process on every rank."""

import copy

import torch
from language_model import whole
from ranks import distributed
from tied_model import close
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

MESHES = ("data=2", "model=3", "data=2,model=2")


class ByValues(nn.Module):
    """Sizes and numbers that depend on values, in the forward and in the backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x):
        y = self.inner(x).sin()
        positive = y[y > 0]
        return (positive * 2).mean() + (y * y.detach().abs().max().item()).sum(), positive * 3


@distributed(*MESHES)
def test_sizes_that_depend_on_values(mesh):
    torch.manual_seed(0)
    reference = ByValues()
    axis = mesh.names[0]
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, in_specs=f"{axis} _")
    for step in range(2):
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(step))
        (loss, rows), (expected, wanted) = model(x), reference(x)
        close(loss, expected)
        close(rows, wanted)
        loss.backward()
        expected.backward()
    close(model.inner.weight.grad, reference.inner.weight.grad)


@distributed(*MESHES)
def test_native_random_numbers(mesh):
    axis = mesh.names[0]
    torch.manual_seed(0)
    model = gspmd.parallelize(
        nn.Dropout(0.5),
        mesh,
        in_specs=f"{axis} _",
        out_specs=f"{axis} _",
        advanced={"rng": "native"},
    )
    x = torch.ones(8 * mesh.size, 8)
    whole_result = whole(model(x))
    rows = len(x) // dict(mesh.axes)[axis]
    parts = [part == 0 for part in whole_result.split(rows)]
    assert not any(torch.equal(p, q) for i, p in enumerate(parts) for q in parts[:i])
    assert abs(torch.stack(parts).float().mean().item() - 0.5) < 0.15


class Chain(nn.Module):
    """A conditional random field: pairs of tags read the table of transitions, whose rows are on
    several devices.
    """

    def __init__(self):
        super().__init__()
        self.emissions, self.transitions = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):  # [b, s, 6]
        emissions, (b, s) = self.emissions(x), x.shape[:2]
        scores = emissions[:, 0]
        for i in range(1, s):
            scores = torch.logsumexp(
                scores[:, :, None] + self.transitions + emissions[:, i, None], 1
            )
        tags = torch.arange(b * s).view(b, s) % 4
        path = (
            emissions.gather(2, tags[..., None]).sum()
            + self.transitions[tags[:, :-1], tags[:, 1:]].sum()
        )
        return scores.logsumexp(1).sum() - path


@distributed(*MESHES)
def test_a_coordinate_that_forward_and_backward_compare(mesh):
    torch.manual_seed(0)
    axis, reference, x = mesh.names[0], Chain(), torch.randn(2, 5, 6)
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"transitions": f"{axis} _"}),
        mesh,
        in_specs=f"{axis} _ _",
    )
    for m in (model, reference):
        m(x).backward()
    close(model(x), reference(x))
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


@distributed(*MESHES)
def test_recurrent_layers(mesh):
    """Their lists of weights hold what is stored, not the whole, and no call makes another program
    of it.
    """
    torch.manual_seed(0)
    axis, reference = mesh.names[0], nn.GRU(6, 5, batch_first=True)
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"weight_*": f"{axis} _"}),
        mesh,
        in_specs=f"{axis} _ _",
    )
    assert all(isinstance(weight, DTensor) for weight in model._flat_weights)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(step))
        losses = [m(x)[0].square().mean() for m in (model, reference)]
        close(*losses, 1e-5)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(model._all_programs()) == 1


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.near = nn.Linear(6, 5), nn.Linear(5, 3), torch.eye(7).to_sparse()

    def forward(self, x, near):
        return (self.near + near) @ self.down((near @ self.up(x)).relu())


@distributed(*MESHES)
def test_sparse_matrices(mesh):
    torch.manual_seed(0)
    axis, reference = mesh.names[0], Graph()
    model = gspmd.parallelize(
        gspmd.annotate(copy.deepcopy(reference), mesh, {"*.weight": f"{axis} _"}),
        mesh,
        in_specs=(f"{axis} _", None),
    )
    for seed in range(2):
        near = torch.sparse_coo_tensor(
            torch.randint(7, (2, 12), generator=torch.Generator().manual_seed(seed)),
            torch.ones(12),
            (7, 7),
        )
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
        for m in (model, reference):
            m.zero_grad()
            m(x, near).square().sum().backward()
        for name, parameter in reference.named_parameters():
            close(model.get_parameter(name).grad, parameter.grad)
        near.mul_(2)
        close(model(x, near), reference(x, near))
    assert len(model._all_programs()) == 1
