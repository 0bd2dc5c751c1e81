"""Our layouts and XLA's: the same text, the same shards on the same devices."""

import itertools

import pytest
import torch

from torchgspmd import Mesh, ShardSpec
from torchgspmd.xla_backend.runtime import place_tensor, start
from torchgspmd.xla_backend.sharding import device_order, layout_text, spec_of_text, text_of

MESHES = [Mesh(data=4, model=2), Mesh(a=2, b=2, c=2), Mesh(all=8), Mesh(one=1, data=2, model=4)]


def layouts(mesh: Mesh, rank: int) -> list[ShardSpec]:
    """All of them: every axis on some dimension or none, in every order."""
    names = [name for name in mesh.names if mesh.count((name,)) > 1]
    found = {ShardSpec.replicated(rank)}
    for order in itertools.permutations(names):
        for place in itertools.product(range(rank + 1), repeat=len(names)):
            dims = [()] * (rank + 1)
            for axis, d in zip(order, place):
                dims[d] += (axis,)
            found.add(ShardSpec(tuple(dims[:rank])))
    return sorted(found, key=str)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_is_written_as_xla_writes_it(mesh):
    device, order = start(mesh), tuple(device_order())
    for rank in (1, 2, 3):
        for spec in layouts(mesh, rank):
            text = layout_text(place_tensor(torch.zeros((8,) * rank), spec, mesh, device))
            assert text == text_of(spec, mesh, order), spec
            assert spec_of_text(text, rank, mesh, order) == spec, text


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (13, 3)])
def test_every_device_gets_the_shard_of_its_coordinates(mesh, shape):
    import torch_xla

    device, x = start(mesh), torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for spec in layouts(mesh, 2):
        placed = place_tensor(x, spec, mesh, device)
        shards = {
            int(name.split(":")[1]): shard
            for shard, name in torch_xla._XLAC._get_local_shards([placed])[0]
        }
        local = spec.local_shape(shape, mesh)
        for rank, id in enumerate(device_order()):
            where = mesh.coordinates(rank)
            mine = x
            for d, axes in enumerate(spec.dims):
                begin = min(mesh.index(axes, where) * local[d], shape[d])
                mine = mine.narrow(d, begin, min(local[d], shape[d] - begin))
            kept = shards[id][tuple(slice(n) for n in mine.shape)]  # XLA pads
            assert shards[id].shape == torch.Size(local) and torch.equal(kept, mine), (spec, rank)


def test_slices_are_the_slow_axes(monkeypatch):
    """Devices of one slice are neighbours in the order, so that the first axes of a mesh run
    between slices.
    """
    import torch_xla.runtime as xr

    monkeypatch.setattr(
        xr, "global_runtime_device_attributes", lambda: [{"slice_index": i % 2} for i in range(8)]
    )
    assert device_order() == [0, 2, 4, 6, 1, 3, 5, 7]
