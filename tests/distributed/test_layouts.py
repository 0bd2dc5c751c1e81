"""Layouts of arguments, weights and results, and the ways between them, on processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from language_model import whole
from ranks import distributed
from tied_model import WIDTH, close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd.comm.process_groups import groups_of

MESHES = ("data=2", "model=3", "data=2,model=2")


@distributed(*MESHES)
def test_layouts_of_results(mesh):
    """out_specs, DTensor arguments, gradients of arguments, shard_batch."""
    torch.manual_seed(0)
    reference = nn.Linear(WIDTH, 12)
    axis = mesh.names[0]
    count = mesh.count((axis,))
    model = gspmd.parallelize(copy.deepcopy(reference), mesh, out_specs=f"{axis} _")
    x = torch.randn(4 * count, WIDTH, requires_grad=True)
    y = model(x)
    assert isinstance(y, DTensor) and y.to_local().shape == (4, 12)
    close(y, reference(x))
    (grad,) = torch.autograd.grad(whole(y).square().sum(), x)
    close(grad, torch.autograd.grad(reference(x).square().sum(), x)[0])
    index = mesh.coordinates(dist.get_rank())[axis]
    part, again = (
        gspmd.shard_batch(x.detach()[4 * index : 4 * index + 4], mesh, f"{axis} _")
        for _ in range(2)
    )
    assert part.device_mesh is again.device_mesh  # no process groups a step
    close(part, x)
    close(model(part), reference(x))


@distributed("data=2,model=2")
def test_a_device_mesh_is_a_mesh(mesh):
    """In marks outside and inside of forward, annotate, plan, parallelize and shard_batch."""
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(gspmd.mark_sharding(self.up(x), devices, "data model").relu())

    torch.manual_seed(0)
    reference, x = Marked(), torch.randn(4, 8)
    model = gspmd.annotate(
        copy.deepcopy(reference), devices, {"up.weight": "model _", "down": "data _"}
    )
    gspmd.mark_sharding(model.down.weight, devices, "_ model")
    text = str(gspmd.plan(model, x, mesh=devices))
    assert text == str(gspmd.plan(model, x, mesh=mesh))
    model, row = gspmd.parallelize(model, devices), 2 * mesh.coordinates(dist.get_rank())["data"]
    close(model(gspmd.shard_batch(x[row : row + 2], devices, "data _")), reference(x))
    assert model.up.weight.to_local().shape == (6, 8)


@distributed(*MESHES)
def test_uneven_weights(mesh):
    """Weights stored along dimensions that the axis does not divide: gathered together, their
    gradients scattered.
    """
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 17))
    model, axis = copy.deepcopy(reference), mesh.names[0]
    for parameter in model.parameters():
        gspmd.mark_sharding(parameter, mesh, " ".join([axis] + ["_"] * (parameter.dim() - 1)))
    model = gspmd.parallelize(model, mesh, in_specs=f"{axis} _")
    x = torch.randn(301, 16)
    for m in (model, reference):
        m(x).square().mean().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad)


class Moves(nn.Module):
    """Every value in another layout than the one before it."""

    def __init__(self, mesh, layouts):
        super().__init__()
        self.mesh, self.layouts = mesh, layouts

    def forward(self, x):
        for layout in self.layouts:
            x = gspmd.mark_sharding(torch.sin(x), self.mesh, layout)
        return x


@distributed("data=2,model=2")
def test_exchanges(mesh):
    """From layouts to others whose blocks do not nest, forward and backward, sizes that do not
    divide; one device may have nothing.
    """
    torch.manual_seed(0)
    a, b = mesh.names[:2]
    model = gspmd.parallelize(
        Moves(mesh, (f"{a} {b}", f"{b} {a}", f"{a}+{b} _", f"_ {b}+{a}", f"{b} _", f"{a} _")), mesh
    )
    for shape in ((8, 8), (5, 7), (9, 16), (13, 3)):
        x = torch.randn(shape, requires_grad=True)
        want = x
        for _ in range(6):
            want = torch.sin(want)
        y = model(x)
        close(y, want)
        close(
            torch.autograd.grad(whole(y).square().sum(), x)[0],
            torch.autograd.grad(want.square().sum(), x)[0],
        )
        assert [c.kind for c in model.plan.collectives].count("permute") >= 2, (
            model.plan.collectives
        )


class Grouped(nn.Module):
    """Two key heads for four query heads: on an axis of four, each is held by two devices."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):  # [b, s, 16]
        q, k = self.q(x).unflatten(-1, (2, 2, 4)), self.k(x).unflatten(-1, (2, 4))
        p = torch.einsum("bskgd,btkd->bkgst", q, k).softmax(-1)
        return self.o(torch.einsum("bkgst,btkd->bskgd", p, k).flatten(2))


@distributed(*MESHES)
def test_parts_of_axes(mesh):
    """On all processes as one axis: groups over a part of it."""
    whole_mesh = gspmd.Mesh(model=mesh.size)
    torch.manual_seed(0)
    reference, x = Grouped(), torch.randn(2, 5, 16)
    model = copy.deepcopy(reference)
    for tensor, spec in (
        (model.q.weight, "model _"),
        (model.q.bias, "model"),
        (model.o.weight, "_ model"),
    ):
        gspmd.mark_sharding(tensor, whole_mesh, spec)
    model = gspmd.parallelize(model, whole_mesh)
    close(model(x), reference(x))
    for m in (model, reference):
        m(x).square().mean().backward()
    for name, parameter in reference.named_parameters():
        close(model.get_parameter(name).grad, parameter.grad, 1e-4)
    assert mesh.size != 4 or any(
        a.startswith("model:") for c in model.plan.collectives for a in c.axes
    ), model.plan.collectives


class Kinds(nn.Module):
    """Every way that values go: from part to part, from parts to the whole, sums and other
    reductions of parts to both.
    """

    def __init__(self, mesh, computes):
        super().__init__()
        self.mesh, self.computes = mesh, computes

    def forward(self, x):  # [6, 9]
        axis = self.mesh.names[-1]
        x = gspmd.mark_sharding(x.clone(), self.mesh, f"{axis} _")
        results = [
            gspmd.mark_sharding(x.clone(), self.mesh, f"_ {axis}").clone(),
            gspmd.mark_sharding(x.clone(), self.mesh, "_ _"),
        ]
        for reduced in (op(x) for op in self.computes):
            results += [
                gspmd.mark_sharding(reduced.clone(), self.mesh, spec) for spec in ("_", axis)
            ]
        return results


TYPES = (
    torch.bfloat16,  # the first and the last guard
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", TYPES)
@distributed(*MESHES[1:])
def test_types(mesh, dtype):
    """Numbers of all types, gloo's and others."""
    reductions = [lambda x: x.sum(0, dtype=x.dtype), lambda x: x.prod(0, dtype=x.dtype)]
    ordered = [lambda x: x.amax(0), lambda x: x.amin(0)]
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (6, 9)).to(dtype)
    x = x * (1 + 1j) if dtype.is_complex else x
    computes = {torch.bool: ordered, torch.float8_e4m3fn: []}.get(
        dtype, reductions if dtype.is_complex else reductions + ordered
    )
    for many in (1, 60000):  # a small all_reduce takes another way than a large one
        given = x if many == 1 else x.repeat(1, many)
        want = Kinds(gspmd.Mesh(**dict.fromkeys(mesh.names, 1)), computes)(given)
        got = gspmd.parallelize(Kinds(mesh, computes), mesh, strict="warn")(given)
        for mine, theirs in zip(got, want):
            assert mine.dtype == dtype and torch.equal(
                *(t.float() if dtype.itemsize == 1 else t for t in (whole(mine), theirs))
            ), many


@distributed("data=2", "data=2,model=2")
def test_the_same_batch_on_all_ranks(mesh):
    """The first shard_batch compares a checksum; rank 0 warns of a global batch."""
    own = torch.Generator().manual_seed(dist.get_rank())
    same = torch.Generator().manual_seed(0)
    batches = {"same": same, "own": own, "ones": None}
    for name, generator in batches.items():
        rows = torch.ones(4, 3) if generator is None else torch.randn(4, 3, generator=generator)
        groups_of(mesh, "cpu").has_compared_batch = False
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                gspmd.shard_batch(rows, mesh, "data _")
        count = sum("the same [4, 3] rows on all ranks" in str(each.message) for each in said)
        assert count == (name == "same" and dist.get_rank() == 0), name
