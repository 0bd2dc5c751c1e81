"""transfer: weights into other meshes, layouts, dtypes and names, each byte sent once."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchgspmd as gspmd
from torchgspmd.dtensor.parts import IS_EXACT
from torchgspmd.runtime import transfer as module


class Net(nn.Module):
    """Tied weights, rows that do not divide, a 0-d parameter, buffers of other dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.up = nn.Embedding(11, 6), nn.Linear(6, 13)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(()))
        self.register_buffer("low", torch.randn(5).bfloat16())
        self.register_buffer("counts", torch.arange(7) + seed)

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.gain).sum() + self.up.weight.sum()


NAMES = {"embed.weight": 2, "up.weight": 2, "up.bias": 1, "low": 1, "counts": 1}


def drawn(draw, axes, dims):
    """Return a layout of a tensor: each axis shards one dimension, or none."""
    entries = [[] for _ in range(dims)]
    for axis in axes:
        if (d := draw.randrange(dims + 1)) < dims and not entries[d]:
            entries[d].append(axis)
    return " ".join(each[0] if each else "_" for each in entries)


def wrapped(draw, model, devices):
    mesh = gspmd.Mesh.from_device_mesh(devices)
    gspmd.annotate(model, mesh, {n: drawn(draw, mesh.names, dims) for n, dims in NAMES.items()})
    return gspmd.parallelize(model, devices if devices.size() < dist.get_world_size() else mesh)


def state_of(model):
    return {
        name: value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
        for name, value in model.state_dict().items()
    }


@distributed("data=2,model=2")
@pytest.mark.parametrize("seed", range(4))
def test_between_layouts(mesh, seed, monkeypatch):
    draw = random.Random(seed)
    if draw.random() < 0.5:
        monkeypatch.setattr(module, "BUCKET", 64)  # several rounds, and pieces that are cut
    shapes = [((2, 2), ("data", "model")), ((4,), ("model",)), ((1, 4), ("a", "b"))]
    first, second = (
        init_device_mesh("cpu", s, mesh_dim_names=n) for s, n in draw.sample(shapes, 2)
    )
    source = wrapped(draw, Net(1), first)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    target = wrapped(draw, Net(2).to(dtype), second)
    done = gspmd.transfer(source, target)
    expected, found = state_of(source), state_of(target)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.to(found[name].dtype), rtol=0, atol=0)
    assert done.received_bytes <= sum(lacking(source, target, dtype))


def lacking(source, target, dtype):
    """Yield the bytes of a target's tensors that this rank lacks in the source."""
    before, after = (
        {n: (t, module._views(t)) for n, t in m.state_dict().items()} for m in (source, target)
    )
    for name, (tensor, boxes) in after.items():
        if name == "head.weight":  # tied
            continue
        own, has = before[name]
        size = min(own.dtype.itemsize, tensor.dtype.itemsize)
        common = sum(module.elements(module._overlap(box, other)) for box in has for other in boxes)
        yield (sum(map(module.elements, boxes)) - common) * size


@distributed("data=2,model=2")
def test_to_other_ranks(mesh):
    """Two ranks train; the other two get the weights, in another layout."""
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "model"))
    trains = dist.get_rank() < 2
    model = Net(1 if trains else 2)
    axis = "model"
    rules = (
        {"embed.weight": f"{axis} _"}
        if trains
        else {"embed.weight": f"_ {axis}", "up.weight": f"{axis} _"}
    )
    gspmd.annotate(model, gspmd.Mesh(model=2), rules)
    model = gspmd.parallelize(model, devices["model"])
    done = gspmd.transfer(model if trains else None, None if trains else model)
    expected = Net(1).state_dict()
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    # A rank that had nothing gets its shards once, and those that train get nothing.
    own = [t for name, t in model.state_dict().items() if name != "head.weight"]  # tied
    assert done.received_bytes == (0 if trains else sum(t.to_local().nbytes for t in own))
    assert trains == bool(done.sent_bytes)


@distributed("data=2,model=2")
def test_names_and_plain_shards(mesh):
    gspmd.annotate(source := Net(1), mesh, {"embed.weight": "model _", "up.weight": "_ data"})
    source = gspmd.parallelize(source, mesh)
    whole = Net(1).state_dict()

    def wants(rank, name, shape):
        return [slice(rank, rank + 3)] * len(shape) if name.startswith("engine.up") else None

    found = gspmd.transfer(source, wants, names=lambda name: f"engine.{name}").tensors
    rank = dist.get_rank()
    assert sorted(found) == ["engine.up.bias", "engine.up.weight"]
    for name, value in found.items():
        slices = (slice(rank, rank + 3),) * value.dim()
        torch.testing.assert_close(value, whole[name.removeprefix("engine.")][slices])
    plain = {"weight": torch.zeros(13, 6)}
    only = dict.fromkeys(whole, None) | {"up.weight": "weight"}
    gspmd.transfer(source, plain if rank == 3 else None, names=only)
    assert plain["weight"].equal(whole["up.weight"]) == (rank == 3)


@distributed("data=2")
def test_differences_are_errors_on_every_rank(mesh):
    model = gspmd.parallelize(Net(1), mesh)
    rank = dist.get_rank()
    state = {n: t.clone() for n, t in Net(2).state_dict().items()}
    for change, message in (
        ({"more": torch.ones(2)}, "the source has no 'more'"),
        ({"up.bias": torch.ones(2)}, r"'up.bias' has the shape \[13\] in the source"),
        ({"up.bias": torch.ones(13, device="meta")}, "on meta"),
    ):
        with pytest.raises(gspmd.ShardingError, match=message):
            gspmd.transfer(model, state | change if rank == 1 else None)
    with pytest.raises(gspmd.ShardingError, match="the target has no 'counts'"):
        gspmd.transfer(model, {n: t for n, t in state.items() if n != "counts"})
    with pytest.raises(gspmd.ShardingError, match="two tensors of the source have the name 'a'"):
        gspmd.transfer(model, state, names=lambda name: "a")


@distributed("model=2")
def test_weights_that_are_stored_by_parts(mesh):
    def model(seed, mark):
        torch.manual_seed(seed)
        made = Fused().double()
        gspmd.annotate(made, mesh, {"qkv.weight": mark})
        made = gspmd.parallelize(made, mesh)
        made(torch.ones(2, 4, 8, dtype=torch.float64)).backward()  # decides how weights are stored
        return made

    source, target = model(1, "model _"), model(2, "_ model")
    before = source.qkv.weight.placements
    torch.manual_seed(1)
    whole = Fused().double().qkv.weight
    gspmd.transfer(source, target)
    torch.testing.assert_close(target.qkv.weight.full_tensor(), whole, rtol=0, atol=0)
    other = model(3, "model _")
    gspmd.transfer(target, other)
    torch.testing.assert_close(other.qkv.weight.full_tensor(), whole, rtol=0, atol=0)
    assert gspmd.transfer(source, other).sent_bytes == 0
    if IS_EXACT:
        assert before == other.qkv.weight.placements != (Shard(0),)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.out(y).square().mean()
