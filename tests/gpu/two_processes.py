"""Train the GPT in some layouts on two processes that share a card, as gloo carries CUDA tensors.

    torchrun --nproc-per-node 2 tests/gpu/two_processes.py [--device cpu]

NCCL refuses two processes on one card. Prints one line a layout, and exits with 1 where the losses
differ from those of one process, or a layout fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt.model import GPT, LAYOUTS, Config  # noqa: E402

AXES = {"dp": "data", "tp": "model", "sp": "model", "cp": "seq", "fsdp": "data", "pp": "stage"}
SIZE = Config(96, context=32, layers=2, heads=4, width=64)


def losses(model: torch.nn.Module, batch: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layouts", nargs="*", choices=list(AXES))
    args = parser.parse_args()
    # gloo sends tensors of CUDA to all processes, and not to one
    layouts = args.layouts or [x for x in AXES if args.device == "cpu" or AXES[x] != "stage"]
    dist.init_process_group("gloo")
    device = torch.device(args.device)
    torch.manual_seed(0)
    plain = GPT(SIZE).to(device)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    batch = [torch.randint(96, (8, 32)).to(device) for _ in range(2)]
    want = losses(plain, batch)
    failed = 0
    for layout in layouts:
        mesh = gspmd.Mesh(**{AXES[layout]: 2})
        model = GPT(SIZE).to(device)
        model.load_state_dict(state)
        model.divide(mesh, 4, schedule="1f1b")
        specs = (gspmd.UNCONSTRAINED,) * 2
        try:
            marked = gspmd.annotate(model, LAYOUTS[layout].on(mesh))
            got = losses(gspmd.parallelize(marked, mesh, in_specs=specs), batch)
            error = max(abs(a - b) for a, b in zip(got, want))
            word = "equal" if error < 1e-4 else "WRONG"
            print(f"{dist.get_rank()} {layout:5} {word} {error:.1e}", flush=True)
            failed += word != "equal"
        except Exception:
            failed += 1
            text = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
            print(f"{dist.get_rank()} {layout:5} FAILED\n{text}", flush=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
