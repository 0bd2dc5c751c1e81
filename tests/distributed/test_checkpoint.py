"""A checkpoint of torch.distributed.checkpoint is resumed on other meshes."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import distributed
from tied_model import batch, close, pair
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchgspmd as gspmd


@distributed()
def save(mesh, path):
    model, _ = pair(mesh, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=path)


@distributed()
def load(mesh, path):
    """Resumes what `save` saved on another mesh; two more steps equal those of one process."""
    model, reference = pair(mesh, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    parameters, state = get_state_dict(model, optimizer)
    content = {"model": parameters, "optimizer": state}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    other = torch.optim.AdamW(reference.parameters(), 1e-2)
    for step in range(4):
        other.zero_grad()
        expected = reference(*batch(step))
        expected.backward()
        other.step()
        if step >= 2:
            optimizer.zero_grad()
            loss = model(*batch(step))
            loss.backward()
            optimizer.step()
            close(loss, expected, 1e-4)


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_checkpoint_is_resumed_on_other_meshes(tmp_path):
    save("data=2,model=2", path=tmp_path)
    for mesh in ("model=3", "data=1"):
        load(mesh, path=tmp_path)


@distributed("data=2,model=2")
def test_checkpoints_of_fsdp2(mesh):
    """torch's fully_shard writes what a mesh reads, and the other way round, by names."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None for _ in range(2)]
    dist.broadcast_object_list(folders)
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 5))
    torch.manual_seed(2)
    ours = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 5))
    gspmd.annotate(ours, mesh, {"0.weight": "model _", "2.weight": "_ data+model"})
    ours = gspmd.parallelize(ours, mesh)
    values = {name: t.clone() for name, t in theirs.state_dict().items()}
    fully_shard(theirs, mesh=init_device_mesh("cpu", (4,)))
    for writer, reader, folder in ((theirs, ours, folders[0]), (ours, theirs, folders[1])):
        dcp.save({"model": writer.state_dict()}, checkpoint_id=folder)
        with torch.no_grad():
            for p in writer.parameters():
                p.zero_()
        state = {"model": reader.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        reader.load_state_dict(state["model"])
        for name, t in reader.state_dict().items():
            assert t.full_tensor().equal(values[name]), name
