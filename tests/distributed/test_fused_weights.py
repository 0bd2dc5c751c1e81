"""Fused weights on processes: stored by parts, in the user's order for everybody else."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fused_model import MARKS, Block
from ranks import distributed
from tied_model import close
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import torchgspmd as gspmd
from torchgspmd.dtensor.parts import IS_EXACT

pytestmark = pytest.mark.skipif(not IS_EXACT, reason="torch 2.9 has no exact _StridedShard")
MESHES = "model=2", "data=2,model=2"


def made(mesh: gspmd.Mesh, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return a model for one device, and its copy on the mesh."""
    torch.manual_seed(seed)
    one = nn.Sequential(*(Block("split") for _ in range(2))).double()
    many = copy.deepcopy(one)
    gspmd.annotate(many, mesh, {f"*.{name}": spec for name, spec in MARKS.items()})
    batch = "data" if "data" in mesh.names else "_"
    return one, gspmd.parallelize(many, mesh, in_specs=(f"{batch} _ _",), out_specs=f"{batch} _ _")


def batch(step: int) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(4, 6, 24, dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
    return losses


def alike(one: nn.Module, many: nn.Module) -> None:
    whole = gspmd.full_state_dict(many, rank0_only=False)
    for name, parameter in one.named_parameters():
        close(many.get_parameter(name).full_tensor(), parameter)
        close(whole[name], parameter)


def shared_folder() -> str:
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    return name[0]


@distributed(*MESHES)
def test_training_is_that_of_one_device(mesh):
    one, many = made(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (one, many)]
    for a, b in zip(train(one, optimizers[0], range(3)), train(many, optimizers[1], range(3))):
        close(b, a)
    placements = many.get_parameter("0.c_attn.weight").placements
    assert "_StridedShard(dim=0, sf=3)" in str(placements)
    state = optimizers[1].state[many.get_parameter("0.c_attn.weight")]["exp_avg"]
    assert state.placements == placements
    sent = {(c.kind, c.axes) for c in many.plan.collectives}
    assert sent <= {("all_reduce", ("model",)), ("all_reduce", ("data",))}
    alike(one, many)


@distributed(*MESHES)
def test_resume_before_the_first_call(mesh):
    one, many = made(mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (one, many)]
    train(one, optimizers[0], range(2)), train(many, optimizers[1], range(2))
    folder = shared_folder()
    model, optimizer = get_state_dict(many, optimizers[1])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    # A model that has had no call stores its weights in the user's order.
    _, again = made(mesh, seed=1)
    resumed = torch.optim.AdamW(again.parameters(), 1e-2)
    model, optimizer = get_state_dict(again, resumed)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        again, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    alike(one, again)
    for a, b in zip(train(one, optimizers[0], range(2, 4)), train(again, resumed, range(2, 4))):
        close(b, a)
    alike(one, again)
    weight = again.get_parameter("0.c_attn.weight")
    assert resumed.state[weight]["exp_avg"].placements == weight.placements


@distributed(*MESHES)
def test_loads_into_weights_by_parts(mesh):
    one, many = made(mesh)
    other, _ = made(mesh, seed=2)
    many(batch(0))
    many.load_state_dict(other.state_dict())
    alike(other, many)
    set_model_state_dict(many, one.state_dict(), options=StateDictOptions(full_state_dict=True))
    alike(one, many)
    folder = shared_folder()
    dcp.save(many.state_dict(), checkpoint_id=folder)
    plain = {name: torch.zeros_like(t) for name, t in one.state_dict().items()}
    dcp.load(plain, checkpoint_id=folder)
    for name, value in one.state_dict().items():
        close(plain[name], value)
    many.load_state_dict(other.state_dict())
    dcp.load(many.state_dict(), checkpoint_id=folder)  # in place
    alike(one, many)


@distributed(*MESHES)
def test_writes_of_users(mesh):
    one, many = made(mesh)
    many(batch(0))
    for m in (one, many):
        weight = m.get_parameter("0.c_attn.weight")
        with torch.no_grad():
            weight[3:30] = 0.5
            weight.chunk(3)[1].mul_(2)
            torch.manual_seed(7)
            nn.init.normal_(m.get_parameter("1.c_attn.weight"), std=0.02)
            weight.view(-1)[5:200].add_(1)
            m.get_parameter("1.c_attn.bias").copy_(torch.arange(72.0))
    alike(one, many)
    weights = [m.get_parameter("0.c_attn.weight") for m in (one, many)]
    for compute in (
        lambda w: w.pow(2).sum(),
        lambda w: w.cumsum(0),
        lambda w: w.norm(dim=0),
        lambda w: w.amax(),
        lambda w: w.softmax(0),
        lambda w: w[10:40],
        lambda w: w.t() @ w,
        lambda w: w.gather(0, torch.zeros(1, 24, dtype=torch.long)),
        lambda w: w.argmax(0),
    ):
        a, b = map(compute, weights)
        close(b.full_tensor() if hasattr(b, "full_tensor") else b, a)
    close(gspmd.plan(one, batch(0), mesh=mesh).simulate(batch(0)), one(batch(0)))
    got = many(batch(0))
    close(got.full_tensor() if hasattr(got, "full_tensor") else got, one(batch(0)))
