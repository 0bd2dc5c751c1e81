"""Torch is patched while a wrapped module lives, and only for its tensors."""

import copy
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils import _pytree as pytree

import torchgspmd as gspmd
from torchgspmd.dtensor.install import MEETINGS, PATCHES

MESHES = ("data=2,model=2", "model=3")
NEEDED = [patch for patch in PATCHES if patch.is_needed()]


def values() -> list:
    """What every owner in the table has itself."""
    gc.collect()
    return [patch.value() for patch in NEEDED]


def wrapped(mesh, width=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width))
    gspmd.annotate(model, mesh, {"0.weight": f"{mesh.names[-1]} _"})
    return gspmd.parallelize(model, mesh)


@distributed(*MESHES, alone=True)
def test_patches_last_as_long_as_what_needs_them(mesh):
    before = values()

    def applied() -> bool:
        now = values()
        same = [a is b for a, b in zip(now, before)]
        assert all(same) or not any(same), "all of them are applied, or none is"
        return not any(same)

    assert not applied()
    model = wrapped(mesh)
    assert applied()
    model(torch.ones(3, 6)).sum().backward()
    model[0](torch.ones(3, 6))  # a submodule, which is a program of its own
    other = wrapped(mesh)
    del model
    assert applied()
    copied = copy.deepcopy(other)
    del other
    assert applied()
    optimizer = torch.optim.AdamW(copied.double().parameters())
    del copied
    assert applied(), "the optimizer has its parameters"
    optimizer.step()
    del optimizer
    assert not applied()
    state = wrapped(mesh).state_dict()
    assert applied()
    state.popitem()
    assert applied(), "the others live"
    del state
    assert not applied()
    results = wrapped(mesh)(torch.ones(3, 6))
    assert applied(), "the backward has the parameters"
    del results
    assert not applied()
    for wrong in (gspmd.Mesh(data=99), mesh):
        model = nn.Linear(2, 2)
        gspmd.annotate(model, gspmd.Mesh(other=99), {"weight": "_ _"})
        try:
            gspmd.parallelize(model, wrong)
        except gspmd.ShardingError:
            pass
        else:
            raise AssertionError("it is no mesh of these processes, or not the one of the mark")
        assert not applied()


@distributed("data=2", alone=True)
def test_ranks_that_collect_a_model_at_other_times_meet(mesh):
    model = wrapped(mesh)
    if dist.get_rank() == 1:
        cycle = [model]
        cycle.append(cycle)
        gc.disable()
        del cycle
    kept = model[0].weight * 2
    del model
    gc.collect() if dist.get_rank() == 0 else None
    dist.barrier()
    kept.redistribute(placements=[Replicate()])
    assert kept.full_tensor().shape == (4, 6)
    gc.enable()
    wrapper = dist.barrier
    assert {p.name for p in MEETINGS if p.owner is dist} >= {"barrier", "destroy_process_group"}
    assert wrapper.__wrapped__ is not None, "the meetings end with the process group"


def _optimized(x, kind, **options):
    parameter = nn.Parameter(x)
    optimizer = kind([parameter], 0.1, **options)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach()


def _changed(x, change):
    with torch.no_grad():
        change(x)
    return x


def _set_data(x, value):
    x.data = value
    return x


def _gradient(x, loss):
    x.requires_grad_()
    value = loss(x)
    value.backward()
    return value.detach(), x.grad


def _replicated_beside(x):
    with implicit_replication():
        return x + torch.ones(7, 6)


OPERATIONS = {  # of a DTensor of shape [7, 6]
    "add_": lambda x: x.add_(1),
    "add_ of a DTensor": lambda x: x.add_(x),
    "add_ to a plain tensor": lambda x: torch.zeros(7, 6).add_(x),
    "a plain tensor beside it": lambda x: x + torch.ones(7, 6),
    "implicit replication": _replicated_beside,
    "and after it": lambda x: x + torch.ones(7, 6),
    "sqrt_ of a norm": lambda x: x.norm().sqrt_(),
    "pow_": lambda x: x.abs_().pow_(2),
    "item of a sum": lambda x: x.sum().item(),
    "format": lambda x: f"{x.sum()}",
    "format with digits": lambda x: f"{x.sum():.2f}",
    "numpy": lambda x: x.numpy().tolist(),
    "tolist": lambda x: x.tolist(),
    "out": lambda x: torch.mul(torch.ones(7, 6), 2.0, out=x),
    "foreach add_": lambda x: _changed([x], lambda xs: torch._foreach_add_(xs, 0.5)),
    "foreach sqrt_ of norms": lambda x: _changed([x.abs().sum(0)], torch._foreach_sqrt_),
    "foreach copy_": lambda x: torch._foreach_copy_([x], [torch.ones_like(x)]),
    "foreach SGD": lambda x: _optimized(x, torch.optim.SGD, foreach=True, momentum=0.9),
    "fused AdamW": lambda x: _optimized(x, torch.optim.AdamW, fused=True),
    "fused SGD": lambda x: _optimized(x, torch.optim.SGD, fused=True),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(7, 3, 2),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x: (x.t(), x.T, x.mT, x.permute(1, 0), x.unsqueeze(0)),
    "t_": lambda x: x.t_(),
    "slices": lambda x: (x[3], x[1:4], *x.split(3), *x.unbind(1), x.diagonal()),
    "zero_ of a row": lambda x: _changed(x, lambda x: x[3].zero_()),
    "zero_ of a part": lambda x: _changed(x, lambda x: x.chunk(3)[0].zero_()),
    "zero_ of a view": lambda x: _changed(x, lambda x: x.T[:2].zero_()),
    "row = 0": lambda x: _changed(x, lambda x: x.__setitem__(3, 0)),
    "mask = 0": lambda x: _changed(x, lambda x: x.__setitem__(x > 0, 0)),
    "data": lambda x: _set_data(x, x * 2),
    "data of another shape": lambda x: _set_data(x, torch.ones(2)),
    "normal_": lambda x: x.normal_(),
    "randn_like": lambda x: torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "mean": lambda x: (x.mean(), x.mean(0), x.max(0), x.min(1)),
    "cumsum": lambda x: (x.cumsum(-1), x.cumsum(0)),
    "gather": lambda x: x.gather(0, distribute_tensor(torch.zeros(1, 6, dtype=int), x.device_mesh)),
    "convolution": lambda x: F.conv1d(
        x.reshape(7, 1, 6), distribute_tensor(torch.ones(2, 1, 3), x.device_mesh)
    ),
    "mean loss": lambda x: _gradient(x, lambda x: F.mse_loss(x, torch.zeros_like(x))),
    "summed loss": lambda x: _gradient(x, lambda x: F.huber_loss(x, x * 0, reduction="sum")),
    "qr": lambda x: torch.linalg.qr(x),
    "masked": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
}


MIXED = (
    "add_ to a plain tensor",
    "a plain tensor beside it",
    "and after it",
    "implicit replication",
    "out",
)


def described(operation, layout, device_mesh) -> object:
    """The layouts and local values that an operation returns, or its error."""
    x = torch.arange(42.0).view(7, 6) - 20
    torch.manual_seed(1)
    if layout == [Partial()]:
        x = DTensor.from_local(x, device_mesh, layout)
    else:
        x = distribute_tensor(x, device_mesh, layout)
    try:
        result = operation(x)
    except Exception as error:
        return type(error), str(error).partition("\n")[0].replace(": got mixed", " got mixed")[:60]
    return pytree.tree_map(
        lambda v: (
            (v.placements, v.shape, v.to_local().tolist())
            if isinstance(v, DTensor)
            else v.tolist()
            if isinstance(v, torch.Tensor)
            else v
        ),
        (result, x),
    )


@distributed(*MESHES)
def test_dtensors_of_the_user_are_torch_s(mesh):
    device_mesh = init_device_mesh("cpu", (mesh.size,), mesh_dim_names=("mine",))
    layouts = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]

    def everything() -> dict:
        return {
            (name, str(layout)): str(described(operation, layout, device_mesh))
            for name, operation in OPERATIONS.items()
            for layout in layouts
            if not (layout == [Replicate()] and name in MIXED)  # see UsersFlag
        }

    before = everything()
    model = wrapped(mesh)
    for key, result in everything().items():
        assert result == before[key], (key, before[key], result)
    model(torch.ones(3, 6)).sum().backward()
    assert model[0].weight.grad.add(torch.ones(4, 6)).shape == (4, 6)  # a plain one beside ours
    del model
    values()  # collects
    assert everything() == before
