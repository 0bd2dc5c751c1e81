"""backend="cudagraphs" on two processes: replays send what the program sends.

Programs are those for CUDA, while values are on the CPU; RecordedGraphs stand for the cards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks import distributed
from recorded_graphs import RecordedGraphs

import torchgspmd as gspmd
from torchgspmd.runtime import sharded_module
from torchgspmd.runtime.call_comparison import EVERY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, TP, Config  # noqa: E402

SIZE = Config(11, context=8, layers=1, heads=2, width=8)


@distributed("model=2")
@patch.dict(os.environ, TORCHGSPMD_ASSUME_CUDA="1")
def test_steps(mesh):
    batch = [torch.randint(11, (4, 8)) for _ in range(2)]

    def losses(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gspmd.parallelize(
            gspmd.annotate(GPT(SIZE), TP.on(gspmd.Mesh(model=2))),
            gspmd.Mesh(model=2),
            in_specs=(gspmd.UNCONSTRAINED,) * 2,
            **options,
        )
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(EVERY + 2):  # the ranks compare their calls meanwhile
            optimizer.zero_grad()
            found.append(model(*batch))
            found[-1].backward()
            optimizer.step()
        return [loss.detach() for loss in found]

    want, graphs = losses(), RecordedGraphs()
    with patch.object(sharded_module, "graphs_for", lambda device, backend: graphs):
        got = losses(backend="cudagraphs")
    assert all(map(torch.equal, got, want)), (got, want)
    assert (graphs.captures, graphs.replays) == (2, 2 * (EVERY + 2))
