"""accelerate's loop on a mesh equals a plain loop of PyTorch on one device."""

import pytest
import torch
from accelerate.state import AcceleratorState
from ranks import distributed
from tiny import EPSILON, Read, Tokens, close, llama, marked, shared_folder, whole
from torch.utils.data import DataLoader

import torchgspmd as gspmd
from torchgspmd.integrations.accelerate import Accelerator

MESHES = ("data=2", "model=2", "data=2,model=2")
ROWS, ACCUMULATED = 4, 2


def parts(model, data=None):
    """An optimizer, a schedule whose steps are seen, and a loader that shuffles."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    torch.manual_seed(5)
    return optimizer, scheduler, DataLoader(data or Tokens(22), ROWS, shuffle=True)


def plain(epochs):
    """The losses, norms and rates of one device."""
    model = llama()
    optimizer, scheduler, loader = parts(model)
    found = []
    for _ in range(epochs):
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            (loss / ACCUMULATED).backward()
            if (i + 1) % ACCUMULATED == 0 or i + 1 == len(loader):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                found.append((loss.item(), norm.item(), scheduler.get_last_lr()[0]))
    return model, found


def prepared(mesh, data=None, **options):
    AcceleratorState._reset_state(reset_partial_state=True)  # of the test before
    accelerator = Accelerator(mesh, gradient_accumulation_steps=ACCUMULATED, cpu=True, **options)
    model = marked(mesh)
    objects = accelerator.prepare(model, *parts(model, data))
    return accelerator, *objects


def train(accelerator, model, optimizer, scheduler, loader, epochs):
    found = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append((loss.item(), float(norm), scheduler.get_last_lr()[0]))
    return found


@distributed(*MESHES)
def test_the_loop_equals_one_device(mesh):
    accelerator, *objects = prepared(mesh)
    found = train(accelerator, *objects, epochs=1)
    model, want = plain(epochs=1)
    assert len(found) == len(want) == 3
    for mine, theirs in zip(found, want):
        assert mine == pytest.approx(theirs, rel=1e-4)
    close(whole(objects[0]), model.state_dict())
    seen = []
    for batch in accelerator.prepare(DataLoader(Tokens(10, 1), ROWS)):
        seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
    assert torch.cat(seen).equal(Tokens(10, 1).rows)  # each row once
    state = accelerator.get_state_dict(objects[0])
    assert len(state) == (len(model.state_dict()) if accelerator.is_main_process else 0)


@distributed("data=2", "data=2,model=2")
def test_each_rank_reads_its_rows(mesh):
    data = Read(22)
    accelerator, *objects = prepared(mesh, data, own_rows=True)
    found = train(accelerator, *objects, epochs=1)
    model, want = plain(epochs=1)
    for mine, theirs in zip(found, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    close(whole(objects[0]), model.state_dict())
    assert len({*data.read}) == len(data.read) == 11, data.read
    rows = accelerator.prepare(DataLoader(Tokens(12, 1), ROWS))
    rest = [batch["input_ids"] for batch in accelerator.skip_first_batches(rows, 1)]
    assert torch.cat([each.full_tensor() for each in rest]).equal(Tokens(12, 1).rows[ROWS:])
    uneven = accelerator.prepare(DataLoader(Tokens(9, 1), ROWS))
    with pytest.raises(gspmd.ShardingError, match="a batch of 1 rows is not divided by 2"):
        list(uneven)


@distributed()
def written(mesh, folder):
    accelerator, *objects = prepared(mesh)
    train(accelerator, *objects, epochs=1)
    accelerator.save_state(folder)


@distributed()
def resumed(mesh, folder):
    accelerator, *objects = prepared(mesh)
    torch.manual_seed(9)
    accelerator.load_state(folder)
    found = train(accelerator, *objects, epochs=1)
    model, want = plain(epochs=2)
    for mine, theirs in zip(found, want[3:]):
        assert mine == pytest.approx(theirs, rel=1e-4)
    close(whole(objects[0]), model.state_dict())


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_state_goes_on_on_another_mesh(tmp_path):
    written("data=2", folder=str(tmp_path))
    resumed("model=2", folder=str(tmp_path))


@distributed("data=2,model=2")
def test_mixed_precision_and_a_model_that_saves_itself(mesh):
    """autocast is part of the program; every rank calls save_pretrained, as accelerate says."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mesh, mixed_precision="bf16", cpu=True)
    model, folder = accelerator.prepare(marked(mesh)), shared_folder()
    batch = torch.utils.data.default_collate([Tokens(4)[i] for i in range(4)])
    with torch.no_grad():
        found = model(**batch)
        with torch.autocast("cpu", torch.bfloat16):
            want = llama()(**batch)
    assert found.logits.dtype == torch.float32
    torch.testing.assert_close(found.loss, want.loss.float(), rtol=2.0**-8, atol=0)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        close(dict(type(llama()).from_pretrained(folder).state_dict()), llama().state_dict(), 0)
