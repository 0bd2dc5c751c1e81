"""Several hosts, simulated on one: the shards of the other hosts are computed and compared."""

import pytest
import torch
from common import checkpoint
from expecttest import assert_expected_inline
from helpers import message
from programs import MESH
from torch import Tensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.xla_backend.runtime import own_devices, parts
from torchgspmd.xla_backend.sharding import device_order, layout_text, text_of

X = torch.arange(8 * 12 * 4.0).reshape(8, 12, 4)
BLOCKS, TORUS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]]  # devices of every host
CUBE = Mesh(data=2, seq=2, model=2)


def held(spec: ShardSpec, mesh: Mesh, ranks: list[int]) -> tuple[Tensor, list[Tensor]]:
    """(the rows of X that the shards of these devices cover, the shard of each)"""
    index, shards = [], []
    for d, axes in enumerate(spec.dims):
        rows = X.shape[d] // mesh.count(axes)
        places = [mesh.index(axes, mesh.coordinates(rank)) for rank in ranks]
        index.append(
            torch.cat([torch.arange(i * rows, (i + 1) * rows) for i in sorted(set(places))])
        )
        shards.append([slice(i * rows, (i + 1) * rows) for i in places])
    return X[index[0]][:, index[1]][:, :, index[2]], [X[where] for where in zip(*shards)]


@pytest.mark.parametrize(
    "hosts", [BLOCKS, TORUS, [[5], [2]]], ids=["blocks", "torus", "one chip each"]
)
@pytest.mark.parametrize(
    "mesh, spec",
    [
        (MESH, "data _ _"),
        (MESH, "model data _"),
        (CUBE, "data+model seq _"),
        (CUBE, "seq+data _ model"),
        (CUBE, "_ _ _"),
        (MESH, "_ data _"),
    ],
    ids=str,
)
def test_every_host_gives_its_devices_their_shards(mesh, spec, hosts):
    spec = ShardSpec.parse(spec)
    for ranks in hosts:
        local, wanted = held(spec, mesh, ranks)
        shape, shards = parts(local, spec, mesh, [mesh.coordinates(rank) for rank in ranks])
        assert shape == [8, 12, 4]
        assert all(torch.equal(got, want) for got, want in zip(shards, wanted, strict=True))


@pytest.mark.parametrize(
    "mesh, spec",
    [
        (Mesh(data=8), "data _ _"),
        (MESH, "data _ model"),
        (MESH, "model+data _ _"),
        (MESH, "_ _ _"),
        (CUBE, "seq model+data _"),
        (Mesh(one=1, data=8), "one+data _ _"),
    ],
    ids=str,
)
@pytest.mark.parametrize("x", [X, X.long()[:5, :7, :3]], ids=["even", "uneven"])
def test_the_batch_of_the_only_host_is_the_whole(mesh, spec, x):
    batch = gspmd.shard_batch(x, mesh, spec)
    trimmed = ShardSpec.parse(spec.replace("one+", ""))
    assert layout_text(batch) == text_of(trimmed, mesh, tuple(device_order()))
    assert torch.equal(batch.cpu(), x)


def test_this_host_has_all_devices_here():
    assert sorted(own_devices()) == list(range(8))


def test_rows_that_do_not_divide_over_the_devices_of_a_host():
    half = [MESH.coordinates(rank) for rank in BLOCKS[0]]
    assert_expected_inline(
        message(lambda: parts(X[:5], ShardSpec.parse("data _ _"), MESH, half)),
        """\
dimension 0 of a host's batch has 5 rows, which its 2 shards do not divide
  where test_hosts.py:N
  fix   give every device the same number of rows, on every host""",
    )


def test_all_hosts_read_what_one_of_them_writes(monkeypatch, tmp_path):
    """Reading a sharded tensor is a program that all hosts run; DCP would let every host read other
    ones.
    """
    given = []
    monkeypatch.setattr(
        checkpoint.dcp, "save", lambda content, checkpoint_id: given.append(content)
    )
    module = torch.nn.Linear(8, 4)
    weight = gspmd.mark_sharding(module.weight, MESH, "model data").detach().clone()
    model = gspmd.parallelize(module, MESH, backend="xla")
    checkpoint.save(model, torch.optim.AdamW(model.parameters()), 0, tmp_path)
    assert {t.device.type for t in pytree.tree_leaves(given) if isinstance(t, Tensor)} == {"cpu"}
    assert torch.equal(given[0]["model"]["weight"], weight)
