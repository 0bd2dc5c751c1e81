"""Peak memory of a step of a GPT on a card, beside that of the plan; exits with 1 above 5 %."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import DP, GPT, Config  # noqa: E402


def main() -> None:
    device, mesh = torch.device("cuda", 0), gspmd.Mesh(data=1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    config = Config(2048, context=256, layers=4, heads=8, width=512)
    model = gspmd.annotate(GPT(config).to(device), DP.on(mesh))
    model = gspmd.parallelize(model, mesh, in_specs=("data _", "data _"))
    batch = [torch.randint(2048, (16, 256), device=device) for _ in range(2)]
    for _ in range(2):
        model.zero_grad()
        model(*batch).backward()
    model.zero_grad()
    memory = model.plan.report("h100").memory
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - memory.parameters - memory.inputs  # of cuBLAS
    torch.cuda.reset_peak_memory_stats()
    model(*batch).backward()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - others
    print(f"measured {measured / 2**20:.1f} MiB, predicted {memory.peak / 2**20:.1f} MiB")
    dist.destroy_process_group()
    sys.exit(abs(measured - memory.peak) > 0.05 * memory.peak)


if __name__ == "__main__":
    main()
