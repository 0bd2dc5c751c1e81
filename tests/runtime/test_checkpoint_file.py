"""The file beside the tensors of a checkpoint is data: whatever it holds, it is read or refused."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchgspmd as gspmd
from torchgspmd.runtime import checkpoint


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
