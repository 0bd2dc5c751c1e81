"""gspmd.save, load and load_full_state_dict: what was saved goes on on any mesh."""

import copy
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import distributed
from torch import nn

import torchgspmd as gspmd
from torchgspmd.runtime import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 5)
        self.norm = nn.BatchNorm1d(13)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def plain() -> tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Net()
    return (model, *trained(model))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def wrapped(mesh, model=None):
    model = model or plain()[0]
    axis = mesh.names[-1]
    gspmd.mark_sharding(model.up.weight, mesh, f"{axis} _")
    gspmd.mark_sharding(model.down.weight, mesh, f"_ {axis}")
    model = gspmd.parallelize(model, mesh)
    return (model, *trained(model))


def steps(model, optimizer, scheduler, first, last):
    found = []
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append(float(loss.detach()))
    return found


@distributed()
def written(mesh, folder):
    model, optimizer, scheduler = wrapped(mesh)
    for step in (2, 4, 5):
        steps(model, optimizer, scheduler, step - 2 if step < 5 else 4, step)
        states = {"scheduler": scheduler}
        options = {"step": step, "states": states, "keep": 2, "asynchronous": step == 4}
        saving = gspmd.save(f"{folder}/step-{step}", model, optimizer, **options)
        assert (saving is not None) == (step == 4)  # the next steps run while it is written
    gspmd.save(f"{folder}/best", model, step=1)  # of another name: it stays
    gspmd.save(f"{folder}/step-5", model, optimizer, step=5, states=states, keep=2)
    Path(folder, "step-9.writing").mkdir(exist_ok=True)  # a process died here


@distributed()
def resumed(mesh, folder, step):
    model, optimizer, scheduler = wrapped(mesh)
    first = gspmd.load(folder, model, optimizer, states={"scheduler": scheduler})
    got = steps(model, optimizer, scheduler, first, 8)
    want = steps(*plain(), 0, 8)[step:]
    assert first == step and got == pytest.approx(want, rel=1e-5), (first, got, want)


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_run_goes_on_on_other_meshes(tmp_path):
    written("data=2,model=2", folder=str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best",
        "step-4",
        "step-5",
        "step-9.writing",
    ]
    assert json.loads((tmp_path / "step-5" / "gspmd.json").read_text())["step"] == 5
    resumed("model=3", folder=str(tmp_path), step=5)
    resumed("data=1", folder=str(tmp_path / "step-4"), step=4)


@distributed("model=3")
def test_the_state_of_one_device_is_loaded(mesh):
    one, optimizer, scheduler = plain()
    steps(one, optimizer, scheduler, 0, 3)
    state = {"model": one.state_dict(), "optimizer": optimizer.state_dict()}
    state = copy.deepcopy(state)
    want = steps(one, optimizer, scheduler, 3, 5)
    torch.manual_seed(1)
    model, optimizer, scheduler = wrapped(mesh, Net())
    gspmd.load_full_state_dict(model, state if dist.get_rank() == 0 else None, optimizer)
    scheduler.last_epoch = 3
    assert steps(model, optimizer, scheduler, 3, 5) == pytest.approx(want, rel=1e-5)
    again = gspmd.full_state_dict(model, optimizer, rank0_only=False)
    gspmd.load_full_state_dict(model, iter(again["model"].items()))
    for wrong, said in (
        ({**state["model"], "other": torch.ones(2)}, "no tensor 'other'"),
        ({"up.weight": torch.ones(13, 6)}, "lacks 'up.bias'"),
        ("/nowhere", "there is no file of tensors"),
        (None, "rank 0 has no source"),
        ({**state["model"], "a": len}, "'a' is no number"),
    ):  # what rank 0 alone sees is an error of every rank
        try:
            gspmd.load_full_state_dict(model, wrong if dist.get_rank() == 0 else None)
        except gspmd.ShardingError as error:
            assert said in str(error), error
        else:
            raise AssertionError("no error")


@distributed("data=2")
def test_extra_states_reach_every_rank(mesh):
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    state = {**nn.Linear(4, 4).state_dict(), "_extra_state": {"calls": 7}}
    model = gspmd.parallelize(Counting(4, 4), mesh)
    gspmd.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    assert model.calls == 7


@distributed("data=2")
def test_an_error_of_one_rank_is_one_of_all(mesh, tmp_path):
    """A full disk where rank 0 completes the folder: nobody waits, the checkpoint before stays."""
    module, *_ = wrapped(mesh)
    gspmd.save(tmp_path / "step-1", module, step=1)

    def full(*_: object) -> None:
        if dist.get_rank() == 0:
            raise OSError(28, "No space left on device")

    for asynchronous in (False, True):
        with patch.object(checkpoint, "_complete", full):
            words = "No space" if dist.get_rank() == 0 else "rank 0 has not written .* No space"
            with pytest.raises((OSError, gspmd.ShardingError), match=words):
                gspmd.save(tmp_path / "step-2", module, step=2, asynchronous=asynchronous)
                gspmd.load(tmp_path, module)  # waits for the asynchronous one
        assert gspmd.load(tmp_path, module) == 1
    gspmd.save(tmp_path / "step-2", module, step=2)
    assert gspmd.load(tmp_path, module) == 2


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),  # whose state is one, not zero, at first
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def losses_of(model, optimizer, begin, end, saves=None):
    """Losses of steps. saves: called between the backward and the update of its step."""
    losses = []
    for step in range(begin, end):
        loss = (model(torch.arange(12.0).view(4, 3) / 7) - step).square().mean()
        loss.backward()
        if saves is not None:
            saves(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed("data=2")
def test_a_save_changes_no_optimizer(mesh, tmp_path):
    """Before the first step, between backward and update, and after both."""
    for name, make in OPTIMIZERS.items():
        plain = nn.Linear(3, 2)
        model, other = (
            gspmd.parallelize(copy.deepcopy(plain), mesh, in_specs="data _") for _ in range(2)
        )
        optimizer = make(model.parameters())
        expected = losses_of(plain, make(plain.parameters()), 0, 5)

        def keep(step, run=(tmp_path / name, model, optimizer)):
            folder, *saved = run
            gspmd.save(folder / f"between-{step}", *saved, step=step)

        gspmd.save(tmp_path / name / "first", model, optimizer)
        found = losses_of(model, optimizer, 0, 2, keep)
        gspmd.save(tmp_path / name / "second", model, optimizer, step=2)
        found += losses_of(model, optimizer, 2, 5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        for folder in ("second", "between-0", "first", "between-1"):
            own = make(other.parameters())
            if folder == "between-1":  # into an optimizer whose parameters have gradients
                other(torch.ones(4, 3)).sum().backward()
            step = gspmd.load(tmp_path / name / folder, other, own)
            own.zero_grad()
            found = losses_of(other, own, step, 5)
            torch.testing.assert_close(found, expected[step:], rtol=1e-5, atol=1e-6, msg=folder)
