"""Frames of generated code have the plan's names, in the flight recorder and memory snapshots."""

import gc
import json
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marked_block import Block
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.profiled_code import key_of, lines_of

SCRIPT = Path(__file__).parents[1] / "distributed" / "flight_recorder.py"


class Model(nn.Module):
    def __init__(self, stacked):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        if stacked:
            self.blocks = gspmd.stack(self.blocks)

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield gspmd.Mesh(data=1)
    dist.destroy_process_group()


def stacks_in(run) -> list[list[dict]]:
    """Return the frames of each call of C from generated code, the innermost first."""
    found = []

    def look(frame, event, argument):
        if event == "c_call" and key_of(frame.f_code.co_filename):
            rows = []
            while frame is not None:
                code = frame.f_code
                row = {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
                rows.append(row)
                frame = frame.f_back
            found.append(rows)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def snapshot(stacks):
    """Return these stacks as in torch.cuda.memory._snapshot()."""
    blocks = [{"size": 512, "state": "active_allocated", "frames": stack} for stack in stacks]
    traces = [{"action": "alloc", "addr": 0, "size": 512, "frames": stack} for stack in stacks]
    return {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [traces]}


def line(code: str) -> int:
    rows = (SCRIPT.parents[1] / "marked_block.py").read_text().splitlines()
    return next(i for i, row in enumerate(rows, 1) if code in row)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_memory_snapshot_of_a_step(alone, stacked):
    module, x = gspmd.parallelize(Model(stacked), alone, in_specs="data _"), torch.ones(4, 8)
    module(x).backward()
    stacks = stacks_in(lambda: module(x).backward())
    with torch.profiler.profile():  # other code, with ranges
        stacks += stacks_in(lambda: module(x).backward())
    dump = snapshot(stacks)
    before = json.dumps(dump)
    named = gspmd.name_frames(dump)
    assert json.dumps(dump) == before
    blocks = [block["frames"] for block in named["segments"][0]["blocks"]]
    assert [trace["frames"] for trace in named["device_traces"][0]] == blocks
    found = {frame["name"] for frames in blocks for frame in frames if key_of(frame["filename"])}
    block = "blocks.block" if stacked else "blocks.1"
    at = rf"at \S*marked_block.py:{line('torch.tanh(self')}"
    for path in (block, f"{block}.up", f"{block}.down"):
        named_so = re.compile(rf"\w+ of %\w+: {re.escape(path)} {at}")
        assert any(map(named_so.fullmatch, found)), found
    files = {key_of(frame["filename"]) for frames in blocks for frame in frames} - {""}
    assert len(files) >= 4, "forward and backward, with ranges and without"
    # All other frames, and all other entries, are as they were.
    for old, new in zip(stacks, blocks):
        for a, b in zip(old, new, strict=True):
            assert a == (b if not key_of(a["filename"]) else {**b, "name": a["name"]})


def test_equal_programs_have_equal_files_and_others_do_not(alone):
    modules = [gspmd.parallelize(Model(False), alone, in_specs="data _") for _ in range(2)]
    other = gspmd.parallelize(Model(True), alone, in_specs="data _")
    files = [file_of(module) for module in (*modules, other)]
    assert files[0] == files[1] != files[2]
    assert files[0].startswith("<torchgspmd forward>.")
    # The names live as long as one of the programs.
    del modules[0]
    gc.collect()
    assert set(gspmd.frame_names()) >= {key_of(file) for file in files}
    del modules, other
    gc.collect()
    assert not set(gspmd.frame_names()) & {key_of(file) for file in files}


def file_of(module):
    """Return the file of the code of a module's forward."""
    module(torch.ones(4, 8))
    (program,) = (p for programs in module._programs.values() for p in programs)
    return program.forward.plain.__func__.__code__.co_filename


def test_a_traceback_shows_generated_code(alone):
    module = gspmd.parallelize(Model(False), alone, in_specs="data _")
    name = file_of(module)
    linecache.checkcache()
    lines = lines_of(name)
    assert lines is not None
    for number, row in lines.rows.items():
        assert linecache.getline(name, number).strip().startswith(re.split("[: ]", row.text)[0])


def test_a_dump_of_unknown_programs():
    file = "<torchgspmd forward>.000000000000.00000000"
    dump = [{"frames": [{"filename": file, "line": 3, "name": "forward"}]}]
    with pytest.raises(gspmd.ShardingError, match="no frame of the dump is of a known program"):
        gspmd.name_frames(dump, {})
    names = {key_of(file): {"3": "mm: blocks.0 at train.py:41"}}
    assert gspmd.name_frames(dump, names)[0]["frames"][0]["name"] == names[key_of(file)]["3"]


@pytest.mark.distributed
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="gloo has no flight recorder"
)
def test_the_flight_recorder_of_two_processes(tmp_path):
    subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=os.environ | {"TORCH_FR_BUFFER_SIZE": "200", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
    )
    dumps, names, named = (
        [json.loads((tmp_path / f"{what}.{rank}").read_text()) for rank in range(2)]
        for what in ("dump", "names", "named")
    )
    for rank in range(2):
        # In this process, which has not planned the model; the other rank has.
        assert gspmd.name_frames(dumps[rank], names[rank]) == named[1 - rank]
        found = [
            frame["name"]
            for entry in named[rank]["entries"]
            for frame in entry["frames"]
            if key_of(frame["filename"])
        ]
        at = f"at tests/marked_block.py:{line('torch.tanh(self')}"
        label = "all_reduce einsum_default_3, 128 B, model"
        # Four collectives in each of two steps.
        assert found[1] == f"all_reduce__default_1: {label}: blocks.1.down {at}"
        assert len(found) == 8 and found[:4] == found[4:]
