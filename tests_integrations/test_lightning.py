"""Lightning on a mesh equals a plain loop of PyTorch on one device."""

import logging

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from ranks import distributed
from tiny import EPSILON, Read, Tokens, close, llama, mark, shared_folder, whole
from torch.utils.data import DataLoader

import torchgspmd as gspmd
from torchgspmd.integrations import default_in_specs
from torchgspmd.integrations.lightning import MeshStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MESHES = ("data=2", "model=2", "data=2,model=2")
ROWS, ACCUMULATED, CLIP = 4, 2, 0.5


class Module(L.LightningModule):
    def __init__(self, mesh=None):
        super().__init__()
        self.net, self.mesh, self.found = llama(), mesh, []

    def configure_model(self):
        if self.mesh is not None and not hasattr(self.net, "plan"):
            model = mark(self.net, self.mesh)
            self.net = gspmd.parallelize(model, self.mesh, in_specs=default_in_specs(self.mesh))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=EPSILON)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch, index):
        loss = self.net(**batch).loss
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.found.append((loss.item(), rate))
        return loss

    def validation_step(self, batch, index):
        self.log("seen", self.net(**batch).loss, sync_dist=True)


def loader(shuffle=True):
    return DataLoader(Tokens(22), ROWS, shuffle=shuffle)


def trainer(mesh, folder, epochs, own_rows=False, **options):
    strategy = MeshStrategy(mesh, own_rows=own_rows) if mesh is not None else "auto"
    return L.Trainer(
        accelerator="cpu",
        devices=1 if mesh is None else mesh.size,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if mesh is not None else None,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=CLIP,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def plain(epochs):
    """The losses and rates of one device, and its weights."""
    model, found = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    torch.manual_seed(5)
    rows = loader()
    for _ in range(epochs):
        for i, batch in enumerate(rows):
            loss = model(**batch).loss
            found.append((loss.item(), scheduler.get_last_lr()[0]))
            (loss / ACCUMULATED).backward()
            if (i + 1) % ACCUMULATED == 0 or i + 1 == len(rows):
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, found


def same(found, want):
    assert len(found) == len(want)
    for mine, theirs in zip(found, want):
        assert mine == pytest.approx(theirs, rel=1e-4)


@distributed(*MESHES)
def test_training_equals_one_device(mesh):
    module = Module(mesh)
    torch.manual_seed(5)
    run = trainer(mesh, shared_folder(), 1, enable_checkpointing=False)
    run.fit(module, loader())
    model, want = plain(1)
    same(module.found, want)
    close(whole(module.net), model.state_dict())
    seen = run.validate(module, loader(shuffle=False), verbose=False)[0]["seen"]
    with torch.no_grad():
        means = [(model(**batch).loss.item(), len(batch["labels"])) for batch in loader(False)]
    expected = sum(mean * rows for mean, rows in means) / sum(rows for _, rows in means)
    assert seen == pytest.approx(expected, rel=1e-4)


@distributed("data=2", "data=2,model=2")
def test_each_rank_reads_its_rows(mesh):
    module, data = Module(mesh), Read(22)
    torch.manual_seed(5)
    run = trainer(mesh, shared_folder(), 1, own_rows=True, enable_checkpointing=False)
    run.fit(module, DataLoader(data, ROWS, shuffle=True))
    model, want = plain(1)
    same(module.found, want)
    close(whole(module.net), model.state_dict())
    assert len({*data.read}) == len(data.read) == 11


@distributed("data=2")
def test_rows_come_in_the_order_of_the_loader(mesh):
    """Lightning puts a DistributedSampler in the place of other ones, which shuffles."""

    class Recording(Tokens):
        def __getitem__(self, i):
            seen.append(int(i))
            return super().__getitem__(i)

    seen = []
    order = [5, 3, 9, 1, 0, 2, 7, 4]
    rows = DataLoader(Recording(22), ROWS, sampler=order)
    trainer(mesh, shared_folder(), 1, enable_checkpointing=False).fit(Module(mesh), rows)
    assert seen == order


@distributed()
def written(mesh, folder):
    torch.manual_seed(5)
    run = trainer(mesh, folder, 1)
    run.fit(Module(mesh), loader())
    run.save_checkpoint(f"{folder}/run.ckpt")


@distributed()
def resumed(mesh, folder):
    model, want = plain(2)
    torch.manual_seed(5)
    for _ in loader():  # the generator is where it was behind the first epoch
        pass
    module = Module(mesh)
    trainer(mesh, folder, 2).fit(module, loader(), ckpt_path=f"{folder}/run.ckpt")
    same(module.found, want[6:])
    close(whole(module.net), model.state_dict())


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_checkpoint_goes_on_on_another_mesh(tmp_path):
    written("data=2", folder=str(tmp_path))
    resumed("model=2", folder=str(tmp_path))
