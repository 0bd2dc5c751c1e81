"""BatchSampler: the processes together have every row of a global batch, the same on any mesh."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchgspmd as gspmd
from torchgspmd.runtime import batch_sampler

MESHES = ("data=4", "data=2,model=2", "model=2,data=2", "model=4", "host=2,data=2")


def of_ranks(monkeypatch, mesh, length, batch, **options):
    """Return the sampler of each rank of a mesh."""
    mesh, samplers = gspmd.Mesh.parse(mesh), []
    for rank in range(mesh.size):
        monkeypatch.setattr(batch_sampler, "_rank", lambda mesh, rank=rank: rank)
        samplers.append(gspmd.BatchSampler(length, batch, mesh, **options))
    return mesh, samplers


def global_batches(mesh, samplers, axes=("data",)):
    """Return the global batches; each place along the axes has to have one part."""
    axes = [name for name in axes if name in mesh.names]
    for parts in zip(*samplers, strict=True):
        by_place = {}
        for rank, rows in enumerate(parts):
            place = mesh.index(axes, mesh.coordinates(rank))
            assert by_place.setdefault(place, rows) == rows
        yield [row for place in sorted(by_place) for row in by_place[place]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "length, last", [(32, "drop"), (35, "drop"), (35, "repeat"), (3, "repeat")]
)
def test_batches_are_those_of_one_device(monkeypatch, mesh, shuffle, length, last):
    options = {"shuffle": shuffle, "seed": 3, "last": last}
    (alone,) = of_ranks(monkeypatch, "data=1", length, 8, **options)[1]
    mesh, samplers = of_ranks(monkeypatch, mesh, length, 8, **options)
    epochs = [list(alone) for _ in range(2)]
    for epoch in epochs:
        assert [*global_batches(mesh, samplers)] == epoch
        rows = [*itertools.chain(*epoch)]
        assert len(epoch) == len(alone) and all(len(batch) == 8 for batch in epoch)
        assert len({*rows}) == (length if last == "repeat" else length // 8 * 8)
    assert (epochs[0] != epochs[1]) == shuffle


def test_a_run_goes_on_on_another_mesh(monkeypatch):
    (alone,) = of_ranks(monkeypatch, "data=1", 40, 8)[1]
    every = [*alone, *alone]
    for step in (0, 3, 5, 7):
        mesh, samplers = of_ranks(monkeypatch, "data=2,model=2", 40, 8)
        for sampler in samplers:
            sampler.resume(step)
        state = samplers[0].state_dict()
        found = [*global_batches(mesh, samplers)]
        assert found == every[step : step + len(found)] and len(found) == 5 - step % 5
        other = gspmd.BatchSampler(40, 8, gspmd.Mesh(data=1))
        other.load_state_dict(state)
        assert (other.epoch, other.first) == divmod(step, 5)


def test_two_axes_of_the_batch(monkeypatch):
    mesh, samplers = of_ranks(monkeypatch, "host=2,data=2", 16, 8, axes=("host", "data"))
    assert [len(rows) for rows in next(zip(*samplers))] == [2] * 4
    assert [
        *global_batches(
            *of_ranks(monkeypatch, "host=2,data=2", 16, 8, axes=("host", "data")), ("host", "data")
        )
    ] == [*of_ranks(monkeypatch, "data=1", 16, 8)[1][0]]


def test_a_loader_takes_it(monkeypatch):
    _, samplers = of_ranks(monkeypatch, "data=2,model=2", 16, 8, shuffle=False)
    data = TensorDataset(torch.arange(16))
    (first, *_), (second, *_), (third, *_) = (
        [x for (x,) in DataLoader(data, batch_sampler=samplers[rank])] for rank in (0, 1, 2)
    )
    assert first.tolist() == second.tolist() == [0, 1, 2, 3] and third.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "length, batch, options, text",
    [
        (16, 6, {}, "not divided by 4 devices of data"),
        (4, 8, {}, "fill no batch"),
        (16, 8, {"axes": "dta"}, "did you mean 'data'"),
        (16, 8, {"last": "pad"}, "last is 'pad'"),
    ],
)
def test_mistakes(monkeypatch, length, batch, options, text):
    with pytest.raises(gspmd.ShardingError, match=text):
        of_ranks(monkeypatch, "data=4", length, batch, **options)


def test_without_a_process_group():
    with pytest.raises(gspmd.ShardingError, match="(?s)no process group.*torchrun"):
        gspmd.BatchSampler(8, 4, gspmd.Mesh(data=2))
