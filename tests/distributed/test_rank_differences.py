"""Models that are not the same on all ranks: what makes no difference to the program works;
the rest is one ShardingError on every rank, that says what differs, and after which the model goes
on as before.
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from ranks import distributed, on_cpu
from torch import nn

import torchgspmd as gspmd

TABLE: dict = {}


class Net(nn.Module):
    """use: what forward does with the module, and with what it computes."""

    def __init__(self, use, **attributes):
        super().__init__()
        self.head, self.use = nn.Linear(4, 4), use
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.use(self, self.head(x))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Net(of_one_rank, rank=dist.get_rank()) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


class Log:
    def __init__(self):
        self.rank, self.lines = dist.get_rank(), 0

    def info(self):
        if self.rank == 0:
            self.lines += 1


def wrapped(mesh, use, **attributes):
    torch.manual_seed(0)
    return gspmd.parallelize(Net(use, **attributes), mesh, in_specs="auto")


def error_of(model):
    """The message that every rank raises."""
    try:
        model(torch.ones(6, 4))
    except gspmd.ShardingError as error:
        found = str(error)
    else:
        found = "no error"
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert everywhere == [found] * len(everywhere), everywhere
    return found


def noted(model, y):
    if model.rank == 0:
        model.calls += 1
    return y


def printed(model, y):
    print("loss", file=sys.stderr) if TABLE["rank"] == 0 else None
    return y * TABLE["scale"]


def of_one_rank(model, y):
    return 2 * y if model.rank == 0 else y


def kept_on_one_rank(model, y):
    if model.rank == 0:
        model.seen = y.mean()
    return y


def informed(model, y):
    model.log.info()
    return y


def raising(model, y):
    if model.rank == 1:
        raise ValueError("not here")
    return y


@distributed("data=2", warning_filter="error")
def test_reads_that_make_no_difference(mesh):
    rank = dist.get_rank()
    TABLE.update(rank=rank, scale=2.0)
    log = Log()
    for use, attributes in (
        (noted, {"rank": rank, "calls": 0}),
        (printed, {}),
        (informed, {"log": log}),
        (
            lambda model, y: y * model.config.scale,
            {"config": SimpleNamespace(rank=rank, scale=3.0)},
        ),
        (lambda model, y: y if model.name else y, {"name": f"rank {rank}"}),
    ):
        model = wrapped(mesh, use, **attributes)
        same = wrapped(mesh, lambda model, y: y)
        scale = (
            attributes["config"].scale
            if "config" in attributes
            else TABLE["scale"]
            if use is printed
            else 1.0
        )
        for _ in range(3):
            torch.testing.assert_close(model(torch.ones(6, 4)), scale * same(torch.ones(6, 4)))
        assert len(model._all_programs()) == 1
    assert log.lines == (3 if rank == 0 else 0)


@distributed("data=2", warning_filter="error")
@on_cpu
def test_random_numbers(mesh):
    model = wrapped(
        mesh,
        lambda model, y: nn.functional.dropout(y) if model.rank else nn.functional.dropout(y),
        rank=dist.get_rank(),
    )
    model(torch.ones(6, 4))
    torch.manual_seed(dist.get_rank())
    assert error_of(model).startswith("the ranks would draw different random numbers")


@distributed("data=2", warning_filter="error")
def test_reads_that_make_other_programs(mesh):
    rank = dist.get_rank()
    for use in (of_one_rank, kept_on_one_rank):
        message = error_of(wrapped(mesh, use, rank=rank))
        assert (
            message.startswith("the ranks have made different programs") and "'rank'" in message
        ), message
    assert "'blocks.1.rank' is 0 on rank 0 and 1 on rank 1" in error_of(
        gspmd.parallelize(Deep(), mesh, in_specs="auto")
    )
    for value in (torch.tensor([1.0, 2.0, 3.0, rank]), np.arange(4.0) + rank, [1, 2, 3, rank]):
        model = wrapped(mesh, lambda model, y: y * torch.as_tensor(model.given), given=value)
        message = error_of(model)
        assert "'given'" in message, message
        model.given = torch.ones(4)
        torch.testing.assert_close(
            model(torch.ones(6, 4)), wrapped(mesh, lambda model, y: y)(torch.ones(6, 4))
        )


@distributed("data=2", warning_filter="error")
def test_errors_of_one_rank(mesh):
    model = wrapped(mesh, raising, rank=dist.get_rank())
    try:
        model(torch.ones(6, 4))
    except (ValueError, gspmd.ShardingError) as error:
        found = error
    assert isinstance(found, ValueError if dist.get_rank() == 1 else gspmd.ShardingError), found
    assert dist.get_rank() == 1 or "rank 1" in str(found) and "not here" in str(found), found
    model.rank = 0
    model(torch.ones(6, 4))


def frozen(model):
    model.head.bias.requires_grad_(False)


def replaced(model):
    model.head = nn.Sequential(model.head)


def changed(model):
    model.scale = 2.0


def in_a_table(model):
    TABLE["scale"] = 5.0


@distributed("data=2", warning_filter="error")
@on_cpu
def test_what_is_changed_on_one_rank(mesh):
    TABLE.update(scale=1.0, rank=0)
    for change, name in (
        (changed, "'scale'"),
        (in_a_table, "scale=5.0"),
        (frozen, "requires_grad of head.bias"),
        (replaced, "the class of head is Sequential"),
        (nn.Module.eval, "the mode of the model is eval"),
        (lambda model: setattr(model, "use", of_one_rank), "'use'"),
    ):
        model = wrapped(mesh, lambda model, y: y * model.scale * TABLE["scale"], scale=1.0, rank=1)
        before = model(torch.ones(6, 4))
        if dist.get_rank() == 0:
            change(model)
        message = error_of(model)
        assert message.startswith("the models differ between ranks") and name in message, (
            name,
            message,
        )
        if dist.get_rank() != 0:
            change(model)
        assert model(torch.ones(6, 4)).shape == before.shape
        TABLE["scale"] = 1.0
    model = wrapped(mesh, lambda model, y: y * model.scale, scale=1.0)
    for step in range(4):
        model.scale = 1.0 + step
        model(torch.ones(6, 4))
    model.scale = float(dist.get_rank())
    message = error_of(model)
    assert "'scale'" in message, message
    for manager, name in (
        (torch.no_grad, "is_grad_enabled"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    ):
        model = wrapped(mesh, lambda model, y: y)
        if dist.get_rank() == 0:
            with manager():
                message = error_of(model)
        else:
            message = error_of(model)
        assert name in message, message
