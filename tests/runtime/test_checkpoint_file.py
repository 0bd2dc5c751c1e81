"""The file beside the tensors of a checkpoint is data: whatever it holds, it is read or refused."""

import json
import os
import random
import resource
import socket
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.runtime import checkpoint, checkpoint_files


class Counter:
    """An object with a state of all kinds."""

    def __init__(self, start=0):
        self.state = {"n": start, 3: (1.5, None), "x": torch.arange(start), "l": [True, "a"]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture
def saved(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = gspmd.parallelize(nn.Linear(3, 2), gspmd.Mesh(data=1))
    gspmd.save(tmp_path / "a", model, step=4, states={"counter": Counter(5)})
    yield tmp_path, model
    dist.destroy_process_group()


def test_states_of_all_kinds(saved):
    folder, model = saved
    counter = Counter()
    assert gspmd.load(folder, model, states={"counter": counter}) == 4
    assert torch.equal(counter.state.pop("x"), torch.arange(5))
    assert counter.state == {"n": 5, 3: (1.5, None), "l": [True, "a"]}
    with pytest.raises(gspmd.ShardingError, match="has no state 'other'"):
        gspmd.load(folder, model, states={"other": counter})
    counter.state["f"] = len
    with pytest.raises(gspmd.ShardingError, match="state of 'c' holds a builtin_function"):
        gspmd.save(folder / "b", model, states={"c": counter})


def test_changed_files_are_refused_or_read_alike(saved):
    """Flipped bytes, cut ends, other types, with the checksum made right again too."""
    folder, model = saved
    file, draw = folder / "a" / "gspmd.json", random.Random(0)
    text = file.read_bytes()
    changed = [b"", b"[]", b"null", b"[" * 20000, b'{"step": 1}', b'{"step": "1", "states": {}}']
    for _ in range(60):
        at = draw.randrange(len(text))
        changed += [text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :], text[:at]]
    for value in ({}, {"dict": 1}, {"tensor": ["0", "load", [1]]}, {"tensor": []}, {"c": []}):
        said = {"step": 1, "states": {"counter": value}}
        changed.append(json.dumps({**said, "checksum": checkpoint._checksum(said)}).encode())
    for each in changed:
        file.write_bytes(each)
        if each == text:
            continue
        with pytest.raises(gspmd.ShardingError, match="is no file of gspmd.save"):
            gspmd.load(folder / "a", model)


@pytest.mark.parametrize("harm", ["truncated", "missing", "flipped", "metadata", "said"])
def test_a_damaged_file_is_named_with_the_newest_whole_checkpoint(saved, harm):
    folder, model = saved
    for step in (5, 6):
        gspmd.save(folder / f"step-{step}", model, step=step)
    newest = folder / "step-6"
    names = {"metadata": ".metadata", "said": "gspmd.json"}
    file = newest / names.get(harm, "__0_0.distcp")
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    elif harm == "flipped":
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    else:
        file.write_bytes(data[: len(data) // 2])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.load(folder, model)
    text = str(error.value)
    assert text.startswith(str(file)), text
    assert f"{folder / 'step-5'}" in text and "step 5" in text, text
    assert all(map(torch.equal, before, model.parameters()))
    assert gspmd.load(folder / "step-5", model) == 5
    assert checkpoint.newest_whole(folder) == folder / "step-5"


def test_two_jobs_that_write_one_folder(saved):
    folder, model = saved
    writing = folder / ("b" + checkpoint.WRITING)
    writing.mkdir()
    for owner, lives in ((os.getppid(), True), (2**22 - 1, False)):
        (writing / ".owner").write_text(f"{socket.gethostname()} {owner} another")
        if not lives:
            gspmd.save(folder / "b", model)
            continue
        with pytest.raises(gspmd.ShardingError, match="two jobs write the checkpoint") as error:
            gspmd.save(folder / "b", model)
        assert f"process {owner} on host" in str(error.value) and str(writing) in str(error.value)
    with patch.object(checkpoint, "CheckedWriter") as writer:

        def stolen(path):
            (writing / ".owner").write_text("node7 123 another")
            return checkpoint_files.CheckedWriter(path)

        writer.side_effect = stolen
        with pytest.raises(gspmd.ShardingError, match="process 123 on host node7 has written it"):
            gspmd.save(folder / "b", model, step=9)
    assert gspmd.load(folder / "b", model) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_room_for_a_file(saved, asynchronous):
    """The kernel refuses to write more, as it does on a full disk."""
    folder, model = saved
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(gspmd.ShardingError) as error:
            saving = gspmd.save(folder / "b", model, asynchronous=asynchronous)
            if saving is not None:
                saving.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpoint._LATEST.saving = None
    text = str(error.value)
    assert text.startswith(f"the checkpoint {folder / 'b'} could not be written: rank 0"), text
    assert f"the newest checkpoint is {folder / 'a'}, of step 4" in text, text
    assert gspmd.load(folder, model) == 4
