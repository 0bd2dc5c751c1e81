"""Two processes that run a step and write what gloo's flight recorder has, with names and without.

For tests/tools/test_name_frames.py, which sets TORCH_FR_BUFFER_SIZE before the processes start.
"""

import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from marked_block import Block  # noqa: E402


def train(folder):
    mesh = gspmd.Mesh(model=2)
    model = nn.Sequential()
    model.blocks = nn.Sequential(Block(mesh), Block(mesh))
    module = gspmd.parallelize(model, mesh)
    for _ in range(2):
        module(torch.ones(4, 8)).square().mean().backward()
    dump = pickle.loads(_dump_fr_trace())  # by this process
    texts: list = [None, None]
    dist.all_gather_object(texts, json.dumps(dump, default=str))
    rank = dist.get_rank()
    # The other rank's frames have the same names here.
    parts = {
        "dump": texts[rank],
        "named": json.dumps(gspmd.name_frames(json.loads(texts[1 - rank]))),
        "names": json.dumps(gspmd.frame_names()),
    }
    for name, text in parts.items():
        Path(folder, f"{name}.{rank}").write_text(text)


if __name__ == "__main__":
    gspmd.launch(train, 2, sys.argv[1])
