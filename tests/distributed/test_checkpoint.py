"""A checkpoint of torch.distributed.checkpoint is resumed on other meshes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import distributed
from tied_model import batch, close, pair
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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
