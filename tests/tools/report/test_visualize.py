"""Pictures of layouts: every element has the holders that the layout says."""

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes.simulator import split_global
from torchgspmd.shard_spec import ShardSpec

MESH = Mesh(data=2, model=3)
CASES = [
    ("data model", (5, 8)),
    ("_ data+model", (2, 7)),
    ("model _ data", (3, 2, 5)),
    ("_ _", (2, 2)),
    ("", ()),
]


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_devices_hold_what_the_picture_says(spec, shape):
    picture = gspmd.visualize(spec, MESH, shape)
    whole = torch.arange(max(torch.Size(shape).numel(), 1)).reshape(shape)
    shards = split_global(whole, ShardSpec.parse(spec), MESH)
    ranks = []
    for block, devices in picture.holders.items():
        for rank in devices:
            part = whole[tuple(slice(*rows) for rows in block)]
            local = shards[rank][tuple(slice(0, n) for n in part.shape)]
            assert local.equal(part)
            ranks.append(rank)
    assert sorted(ranks) == list(range(MESH.size))
    assert str(picture).startswith(f"[{spec}] of {list(shape)}")
    assert "<table>" in picture._repr_html_() and "\x1b[" in picture._text(color=True)


def test_what_has_no_layout():
    with pytest.raises(gspmd.ShardingError, match="has no layout"):
        gspmd.visualize(torch.ones(2))
    with pytest.raises(gspmd.ShardingError, match="a layout alone"):
        gspmd.visualize("data")
