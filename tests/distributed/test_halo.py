"""A network sharded in space, compared with one process on every rank."""

import copy

import torch
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd


class Net(nn.Module):
    """Strides, dilation, a transposed convolution, and 19 rows, which 2 and 3 do not divide."""

    def __init__(self):
        super().__init__()
        self.same, self.halved = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 6, 5, stride=2, padding=2),
        )
        self.doubled, self.wide = (
            nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1),
            nn.Conv2d(4, 2, 3, dilation=2),
        )

    def forward(self, x):
        return self.wide(F.relu(self.doubled(F.relu(self.halved(F.relu(self.same(x)))))))


class Small(nn.Module):
    """Fewer operations: Inductor compiles each kernel of a program in 1.5 s."""

    def __init__(self):
        super().__init__()
        self.halved = nn.Conv2d(3, 4, 5, stride=2, padding=2)
        self.doubled = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)

    def forward(self, x):
        return self.doubled(F.relu(self.halved(x)))


def check(mesh, spec, backend, kind, permutes):
    torch.set_default_dtype(torch.float64)
    one, x = kind(), torch.randn(2, 3, 19, 10)
    many = gspmd.parallelize(copy.deepcopy(one), mesh, backend=backend, in_specs=spec)
    for model in (one, many):
        y = model(x)
        y.pow(2).sum().backward()
    torch.testing.assert_close(y, one(x))
    for (name, p), q in zip(many.named_parameters(), one.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(c.kind == "permute" for c in many.plan.collectives) >= permutes


@distributed("s=3", "a=2,s=2")
def test_halos_are_exchanged(mesh):
    check(mesh, "_ _ s a" if "a" in mesh.names else "_ _ s _", "torch", Net, 6)


@distributed("s=2")
def test_halos_are_exchanged_in_compiled_programs(mesh):
    check(mesh, "_ _ s _", "inductor", Small, 2)


class Moves(nn.Module):
    """Rows of two dimensions change places, and a shift has fewer rows than devices."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 36.0).reshape(5, 7).double())

    def forward(self, x):
        x = (x * self.scale).flip(0, 1)
        return torch.cat([x[:1] * 2, x[:-1]]).roll((1, 1), (0, 1))


@distributed("a=2,b=2", "a=4")
def test_rows_of_two_dimensions_move(mesh):
    one, x = Moves(), torch.randn(5, 7, dtype=torch.float64)
    spec = "a b" if "b" in mesh.names else "a _"
    many = gspmd.parallelize(copy.deepcopy(one), mesh, in_specs=spec, out_specs=spec)
    for model in (one, many):
        model(x).pow(2).sum().backward()
    torch.testing.assert_close(many(x).full_tensor(), one(x))
    grad = many.scale.grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    torch.testing.assert_close(grad, one.scale.grad)
