"""load_safetensors reads what each rank has; a model that writes itself writes whole tensors."""

import json
import tempfile
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from ranks import distributed
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import torchgspmd as gspmd

MESHES = ("model=2", "data=2,model=2", "model=3")


class Net(nn.Module):
    """Tied weights, rows that do not divide, a 0-d parameter, buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(11, 6), nn.Linear(6, 13)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("low", torch.randn(5).bfloat16())
        self.register_buffer("counts", torch.arange(7))

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.gain).sum() + self.up.weight.sum()

    def save_pretrained(self, folder, fails=False):
        """As transformers' and huggingface_hub's models have it; it calls itself once more."""
        assert not fails, "the disk is full"
        Path(folder).mkdir(exist_ok=True)
        save_model(self, f"{folder}/model.safetensors")
        return "written"


def wrapped(mesh, model):
    axis = mesh.names[-1]
    rules = {"embed.weight": f"{axis} _", "up.weight": f"_ {axis}", "up.bias": axis, "low": axis}
    gspmd.annotate(model, mesh, rules)
    return gspmd.parallelize(model, mesh)


def folder_of(name):
    """Return a new folder that all ranks see."""
    names = [tempfile.mkdtemp(prefix=name) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


@distributed(*MESHES)
def test_a_model_that_writes_itself_is_whole_and_is_read_again(mesh):
    torch.manual_seed(1)
    want = {name: t.clone() for name, t in Net().state_dict().items()}
    torch.manual_seed(1)
    model, folder = wrapped(mesh, Net()), folder_of("whole")
    assert model.save_pretrained(folder) == ("written" if dist.get_rank() == 0 else None)
    found = load_file(f"{folder}/model.safetensors")
    assert all(t.equal(want[name]) for name, t in found.items()) and len(found) == len(want) - 1
    message = error_of(model.save_pretrained, folder, fails=True)
    assert "the disk is full" in message
    with torch.device("meta"):
        other = Net()
    other = wrapped(mesh, other)
    assert gspmd.load_safetensors(other, folder) == []
    again = gspmd.full_state_dict(other, rank0_only=False)
    assert all(again[name].equal(t) for name, t in want.items())
    assert model(torch.arange(4)).equal(other(torch.arange(4)))


@distributed("model=2", "data=2,model=2")
def test_a_rank_reads_its_bytes_alone(mesh):
    """Two files with an index, which names no third one; shapes and names are compared first."""
    torch.manual_seed(1)
    state = {name: t.clone() for name, t in Net().state_dict().items()}
    del state["head.weight"]
    folder, names = folder_of("files"), sorted(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    if dist.get_rank() == 0:
        for file, own in parts.items():
            save_file({f"net.{name}": state[name] for name in own}, f"{folder}/{file}")
        save_file({"net.other": torch.ones(3)}, f"{folder}/c.safetensors")
        index = {f"net.{name}": file for file, own in parts.items() for name in own}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    dist.barrier()
    model, read = wrapped(mesh, Net()), []
    before = safetensors.safe_open

    class Counting:
        def __init__(self, *arguments):
            self.file = before(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            read.append(self.file.get_tensor(name))
            return read[-1]

        def get_slice(self, name):
            return Slice(self.file.get_slice(name))

    class Slice:
        def __init__(self, part):
            self.part = part

        def get_shape(self):
            return self.part.get_shape()

        def __getitem__(self, where):
            read.append(self.part[where])
            return read[-1]

    safetensors.safe_open = Counting
    try:
        assert gspmd.load_safetensors(model, folder, rename=lambda n: n.removeprefix("net.")) == []
    finally:
        safetensors.safe_open = before
    own = {id(t): t.to_local().nbytes for t in (*model.parameters(), *model.buffers())}
    assert sum(t.nbytes for t in read) == sum(own.values())
    found = gspmd.full_state_dict(model, rank0_only=False)
    assert all(found[name].equal(t) for name, t in state.items())
    said = error_of(gspmd.load_safetensors, model, folder)
    assert "the files lack 'gain'" in said and "the model has no 'net.counts'" in said
    missing = gspmd.load_safetensors(model, f"{folder}/c.safetensors", strict=False)
    assert "net.other" in missing and "up.bias" in missing and "head.weight" in missing
    where = folder if dist.get_rank() else "/nowhere"
    said = error_of(gspmd.load_safetensors, model, where, strict=False)
    assert "rank 0: FileNotFoundError" in said
    wide = {"gain": torch.ones(2)}
    if dist.get_rank() == 0:
        save_file(wide, f"{folder}/c.safetensors")
    dist.barrier()
    said = error_of(gspmd.load_safetensors, model, f"{folder}/c.safetensors", strict=False)
    assert "'gain' has the shape [2], in the model []" in said
