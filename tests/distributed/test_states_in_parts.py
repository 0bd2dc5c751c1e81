"""States of whole matrices that are stored in parts without a mark: numbers and checkpoints."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from matrix_optimizers import Parts
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

DTYPE = torch.float64


class Muon(Parts):
    """Its results travel in float32, the gradients in float64."""

    parts, narrow = 1, torch.float32


class Net(nn.Module):
    """Four matrices of one shape, two that are alone, biases."""

    def __init__(self, rows=41, columns=30):
        super().__init__()
        torch.manual_seed(1)
        self.square = nn.ModuleList(nn.Linear(rows, rows) for _ in range(4))
        self.up, self.down = nn.Linear(rows, columns), nn.Linear(columns, rows)
        self.to(DTYPE)

    def forward(self, x):
        for layer in self.square:
            x = x + layer(x).tanh()
        return (x + self.down(self.up(x).tanh())).square().mean()


def optimizers_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [Muon(matrices, lr=0.05), torch.optim.AdamW(others, 1e-2, foreach=False)]


def step_on(mesh, marks=None, **options):
    model = Net()
    if marks:
        gspmd.annotate(model, mesh, marks)
    optimizers = optimizers_of(model)
    step = gspmd.train_step(model, optimizers, clip=0.5)
    return gspmd.parallelize(step, mesh, in_specs="data _", **options), optimizers


def losses_on_one_device(batches):
    model = Net()
    optimizers = optimizers_of(model)
    losses = []
    for x in batches:
        loss = model(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    states = [copy.deepcopy(s) for o in optimizers[:1] for s in o.state.values()]
    return losses, model.state_dict(), states


def in_parts(step):
    """Return the names of the states that a device has no whole of."""
    return {
        name
        for name, t in step.named_buffers()
        if isinstance(t, DTensor) and t._local_tensor.numel() < t.numel()
    }


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def check(step, optimizers, model, states):
    for name, want in model.items():
        got = whole(step.state_dict()[f"model.{name}"])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=name)
    for got, wanted in zip(optimizers[0].state.values(), states):
        for key, want in wanted.items():
            torch.testing.assert_close(whole(got[key]), want, rtol=1e-5, atol=1e-5, msg=key)


@distributed("data=2")
def test_a_plan_says_how_states_are_stored(mesh):
    x = torch.randn(512, 41, dtype=DTYPE)
    model = Net()
    step = gspmd.train_step(model, optimizers_of(model), clip=0.5)
    plan = gspmd.plan(step, x, mesh=mesh, in_specs="data _")
    step = gspmd.parallelize(step, mesh, in_specs="data _", plan=plan)
    assert in_parts(step) == {n for n, _ in step.named_buffers() if n.startswith("momentum.")}
    whole_states, _ = step_on(mesh, shard_updates=False)
    torch.testing.assert_close(step(x), whole_states(x), rtol=1e-9, atol=1e-9)
    assert not in_parts(whole_states)


MARKS = {"square.*.weight": "_ model"}


@distributed("data=2", "data=2,model=2")
def test_a_run_goes_on_from_each_kind_of_checkpoint(mesh):
    batches = torch.randn(4, 512, 41, dtype=DTYPE, generator=torch.Generator().manual_seed(2))
    losses, model, states = losses_on_one_device(batches)
    before = gspmd.Mesh(data=mesh.size)  # a run on another mesh goes on on this one
    step, optimizers = step_on(before)
    assert not in_parts(step)
    for x, want in zip(batches[:2], losses):
        torch.testing.assert_close(step(x), want, rtol=1e-5, atol=1e-5)
    assert in_parts(step) == {n for n, _ in step.named_buffers() if n.startswith("momentum.")}
    full = gspmd.full_state_dict(step, rank0_only=False)
    kept = copy.deepcopy(step.state_dict()), [copy.deepcopy(o.state_dict()) for o in optimizers]
    other, others = step_on(mesh, MARKS if "model" in mesh.names else None)
    with shared_folder() as folder:
        gspmd.save(folder / "ours", step, step=2)
        dcp.save({"step": step.state_dict()}, checkpoint_id=str(folder / "torch"))
        for way in ("on", "state_dict", "optimizers", "full", "ours", "torch"):
            if way in ("full", "ours"):
                step, optimizers = other, others  # at first its states are whole
            if way == "full":
                gspmd.load_full_state_dict(step, full)
            elif way == "state_dict":
                step.load_state_dict(kept[0])
            elif way == "optimizers":
                step.model.load_state_dict({k[6:]: v for k, v in kept[0].items() if "model." in k})
                for optimizer, state in zip(optimizers, kept[1]):
                    optimizer.load_state_dict(state)
            elif way == "ours":
                assert gspmd.load(folder / "ours", step) == 2
            elif way == "torch":
                read = {"step": step.state_dict()}
                dcp.load(read, checkpoint_id=str(folder / "torch"))
                step.load_state_dict(read["step"])
            for x, want in zip(batches[2:], losses[2:]):
                torch.testing.assert_close(step(x), want, rtol=1e-5, atol=1e-5, msg=way)
            check(step, optimizers, model, states)


class shared_folder:
    """A folder that rank 0 makes, and all ranks know."""

    def __enter__(self):
        names = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(names)
        return Path(names[0])

    def __exit__(self, *_):
        torch.distributed.barrier()
