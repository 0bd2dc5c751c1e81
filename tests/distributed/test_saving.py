"""What is saved on one rank is whole, or refused; full_state_dict gathers what one device has."""

import copy
import gc
import io
import pickle
import re

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.dtensor.op_handlers import is_sharded

MESHES = ("data=2", "model=2", "data=2,model=2", "model=3")


class Net(nn.Module):
    """Tied weights, uneven sizes, buffers of all kinds, a 0-d parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.up, self.head = nn.Linear(6, 13), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("counts", torch.arange(7, dtype=torch.int16))
        self.register_buffer("wave", torch.randn(5, 3, dtype=torch.complex64))
        self.register_buffer("low", torch.randn(5).bfloat16())
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        self.calls = 3

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, tokens):
        h = self.norm(self.embed(tokens).flatten(0, 1))
        y = self.head(h * self.gain).logsumexp(-1).mean() + self.up(h).square().mean()
        return y + self.wide.square().sum().float() + self.conv.weight.square().sum()


MARKS = {
    "embed.weight": "{0} _",
    "conv.weight": "_ {0} _ _",
    "up.weight": "{1} {0}",
    "up.bias": "{0}",
    "wide": "{0}",
    "mask": "{0}",
    "counts": "{0}",
    "wave": "_ {0}",
    "low": "{0}",
}


def trained(mesh, net=None, **options):
    """Return a model and its optimizer after two steps, and the same of one device."""
    net = Net() if net is None else net
    reference = copy.deepcopy(net)
    first, last = mesh.names[-1], mesh.names[0] if len(mesh.names) > 1 else "_"
    if mesh.names != ("data",):
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        for name, spec in MARKS.items():
            gspmd.mark_sharding(tensors[name], mesh, spec.format(first, last))
    model = gspmd.parallelize(net, mesh, **options)
    pairs = []
    for module in (model, reference):
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        for step in range(2):
            optimizer.zero_grad()
            module(torch.arange(12).view(3, 4).add(step) % 11).backward()
            optimizer.step()
        pairs += [module, optimizer]
    return pairs


def close(state, expected):
    """Compare state_dicts, to their types."""
    assert [*state] == [*expected]
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            mine = state[name]
            assert type(mine) is torch.Tensor and mine.is_contiguous(), name
            assert mine.device.type == "cpu" and mine.untyped_storage().nbytes() == mine.nbytes
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)
        else:
            assert state[name] == value, name


@distributed(*MESHES)
def test_full_state_dict(mesh):
    """One device's model and optimizer load it and go on alike."""
    model, optimizer, reference, other = trained(mesh)
    sends, send = [], dist.send
    dist.send = lambda x, *args, **options: sends.append(x.nbytes) or send(x, *args, **options)
    try:
        states = gspmd.full_state_dict(model, optimizer)
    finally:
        dist.send = send
    largest = max(t.to_local().nbytes for t in model.state_dict().values() if hasattr(t, "nbytes"))
    assert all(n <= largest for n in sends)
    everywhere = gspmd.full_state_dict(model, rank0_only=False)
    close(everywhere, reference.state_dict())
    if dist.get_rank():
        assert states == {} and gspmd.full_state_dict(model) == {}
        return
    before = {k: v.clone() for k, v in everywhere.items() if isinstance(v, torch.Tensor)}
    assert [*states] == ["model", "optimizer"]
    assert gspmd.full_state_dict(model).keys() == everywhere.keys()
    close(states["model"], reference.state_dict())
    head, embed = states["model"]["head.weight"], states["model"]["embed.weight"]
    assert head.data_ptr() == embed.data_ptr()
    file = io.BytesIO()
    torch.save(states, file)
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    fresh = Net()
    fresh.load_state_dict(states["model"], strict=True)
    again = torch.optim.AdamW(fresh.parameters(), 1e-2)
    again.load_state_dict(states["optimizer"])
    for module, steps in ((fresh, again), (reference, other)):
        steps.zero_grad()
        module(torch.arange(12).view(3, 4) % 7).backward()
        steps.step()
    for one, two in zip(fresh.parameters(), reference.parameters()):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(everywhere[name], x) for name, x in before.items())


@distributed("data=2,model=2")
def test_shard_updates_param_dtype_and_stacks(mesh):
    model, optimizer, reference, _ = trained(mesh, shard_updates="data", param_dtype=torch.float32)
    state = gspmd.full_state_dict(model, optimizer, rank0_only=False)
    close(state["model"], reference.state_dict())
    blocks = [nn.Linear(6, 6) for _ in range(3)]
    expected = nn.ModuleList(copy.deepcopy(blocks)).state_dict()
    stacked = gspmd.stack(blocks)
    outer = nn.ModuleDict({"blocks": gspmd.parallelize(stacked, mesh)})
    state = gspmd.full_state_dict(outer, rank0_only=False)
    close({k.removeprefix("blocks."): v for k, v in state.items()}, dict(expected))


@distributed("model=2")
def test_errors_of_full_state_dict(mesh):
    model = gspmd.parallelize(nn.Linear(4, 4), mesh)
    with pytest.raises(
        gspmd.ShardingError, match="takes a model and an optimizer, and got OrderedDict"
    ):
        gspmd.full_state_dict(model.state_dict())
    with pytest.raises(gspmd.ShardingError, match="no tensor of the model is on a mesh"):
        gspmd.full_state_dict(nn.Linear(4, 4))
    other = gspmd.parallelize(nn.Linear(4, 4 + dist.get_rank() * 0, bias=False), mesh)
    with pytest.raises(gspmd.ShardingError):
        gspmd.full_state_dict(other if dist.get_rank() else model)


def refused(save, *args):
    with pytest.raises(gspmd.ShardingError) as caught:
        save(*args)
    text = str(caught.value)
    for way in ("gspmd.full_state_dict(model)", "torch.distributed.checkpoint.save(", "full_tens"):
        assert way in text, text


REFUSAL = """\
one process saves or pickles a tensor of shape [13, 6], which is sharded over model=2
  where FILE
  why   this process has 42 of its 78 elements, and torch.save, pickle or safetensors would write \
these alone
  fix   run `state = gspmd.full_state_dict(model)` on every rank, and `torch.save(state, path)` \
on rank 0; or run `torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=path)` on \
every rank; for one tensor, call `tensor.full_tensor()` on every rank"""


@distributed("model=2")
def test_refusal_of_saving_on_one_rank(mesh):
    net = nn.Linear(6, 13)
    gspmd.annotate(net, mesh, {"weight": "model _"})
    model = gspmd.parallelize(net, mesh)
    if dist.get_rank() == 0:
        with pytest.raises(gspmd.ShardingError) as caught:
            torch.save({"weight": model.state_dict()["weight"]}, io.BytesIO())
        text = re.sub(r"(where ).*", r"\1FILE", str(caught.value))
        assert text == REFUSAL, text


@distributed("model=2")
def test_state_of_an_optimizer_that_outlives_its_model(mesh):
    net = nn.Linear(6, 13)
    gspmd.annotate(net, mesh, {"weight": "model _"})
    model = gspmd.parallelize(net, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    del net, model, optimizer
    gc.collect()
    refused(torch.save, states, io.BytesIO())


@distributed("data=2", "model=2", "data=2,model=2")
def test_pickling(mesh):
    """A tensor that every device has whole is an ordinary one; others are refused."""
    model, optimizer, reference, _ = trained(mesh)
    state, states = model.state_dict(), optimizer.state_dict()
    sharded = {name for name, t in state.items() if hasattr(t, "placements") and is_sharded(t)}
    assert sharded == ({*MARKS, "head.weight"} if mesh.names != ("data",) else set())
    for name in sharded:
        for dump in (pickle.dumps, lambda x: torch.save({"x": [x]}, io.BytesIO())):
            refused(dump, state[name])
    plain = {k: t for k, t in state.items() if k not in ("_extra_state", "head.weight")}
    if sharded:
        refused(safetensors.torch.save, plain)
        refused(torch.save, state, io.BytesIO())
        refused(torch.save, states, io.BytesIO())
        refused(pickle.dumps, model.up.weight.grad)
    whole = {name: t for name, t in state.items() if name not in sharded}
    file = io.BytesIO()
    torch.save(whole, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            assert type(value) is torch.Tensor, name
            torch.testing.assert_close(
                value, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name
            )
    written = safetensors.torch.load(
        safetensors.torch.save({k: t.contiguous() for k, t in plain.items() if k not in sharded})
    )
    for name, value in written.items():
        assert torch.equal(value, loaded[name]), name
    if not sharded:
        Net().load_state_dict(loaded, strict=True)
        torch.save(states, io.BytesIO())
    parameter = pickle.loads(pickle.dumps(model.gain))
    assert type(parameter) is nn.Parameter and parameter.requires_grad
    assert parameter.item() == model.gain.item()
    for copied in (copy.deepcopy(state), {k: copy.copy(v) for k, v in state.items()}):
        assert all(type(copied[name]) is type(t) for name, t in state.items())
        assert torch.equal(copied["up.weight"].full_tensor(), state["up.weight"].full_tensor())
    copy.deepcopy(model), copy.deepcopy(states)


@distributed("model=2")
def test_checkpoints_of_parts_go_on(mesh, tmp_path):
    model, optimizer, reference, _ = trained(mesh)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "one")
    own = dist.new_group(backend="gloo")
    dcp.async_save(content, checkpoint_id=tmp_path / "two", process_group=own).result()
    expected = {k: v.clone() for k, v in model.state_dict().items() if hasattr(v, "clone")}
    for name in ("one", "two"):
        with torch.no_grad():
            model.up.weight.zero_()
        dcp.load(content, checkpoint_id=tmp_path / name)
        assert torch.equal(model.up.weight.full_tensor(), expected["up.weight"].full_tensor())
