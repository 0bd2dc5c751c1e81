"""What we send, beside what XLA sends for the same annotated program: random programs, seed by
seed.

    python benchmarks/against_xla.py --seeds 0:200 [--devices 8] [--only transformer --only moe]
        [--show 17]

Needs torch_xla (extra `xla`). Every program of benchmarks/programs is planned, simulated (padding
holds NaN) and compared with one device; then XLA partitions it for virtual devices on the CPU, with
the same layouts of inputs and results. Programs that send more than XLA's are listed, and the
arithmetic of all devices over that of the program, ours and XLA's (in products, not in
convolutions): XLA sends less where it computes the same on many devices. Ranges of seeds add up;
--out appends what was found as JSON lines, and what is there already is not run again: not the
programs either at which XLA aborted the process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLERANCE = 1e-4  # of every element, relative to the largest one


def start_xla(devices: int) -> None:
    """Virtual devices; before anything runs a backward."""
    os.environ |= {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    from torchgspmd import Mesh
    from torchgspmd.xla_backend.runtime import start

    start(Mesh(x=devices))


def difference(got: list, want: list) -> str:
    """Why results are not those of one device; empty if they are."""
    import torch

    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"result {i} is {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}"
        error, scale = (g - w).abs().max().item(), max(w.abs().max().item(), 1e-3)
        if not torch.isfinite(g).all() or error > TOLERANCE * scale:
            return f"result {i} is off by {error:.1e}, its largest element is {scale:.1e}"
    return ""


def arithmetic_of_xla(text: str) -> float:
    """Of the products in a program of XLA, on one device."""
    from torchgspmd.xla_backend.hlo import HloModule

    total = 0.0
    for body in HloModule(text).computations.values():
        for made in body.values():
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", made.rest)
            if made.op == "dot" and contracted:
                left = body[made.operands[0]].shapes[0][1]
                total += (
                    2 * made.size * math.prod(left[int(d)] for d in contracted[1].split(",") if d)
                )
    return total


def examine(
    seed: int, devices: int, only: list[str], show: bool, keep: Callable[[dict], None]
) -> dict[str, Any]:
    """One program: what was found. keep: for what is known before XLA gets the program, which may
    abort.
    """
    import programs
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils.flop_counter import FlopCounterMode

    import torchgspmd as gspmd
    from torchgspmd.fx_passes.schedule.arithmetic import graph_flops

    torch.manual_seed(seed)
    program = programs.make(seed, devices, only)
    row: dict[str, Any] = {"seed": seed, "name": program.name, "mesh": str(program.mesh)}
    want = [t.detach() for t in pytree.tree_leaves(program.function(*program.inputs))]
    start = time.perf_counter()
    plan = gspmd.plan(
        program.function,
        *program.inputs,
        mesh=program.mesh,
        in_specs=program.in_specs,
        out_specs=program.out_specs,
    )
    row |= {
        "seconds": time.perf_counter() - start,
        "replicated": len(plan.replicated_ops),
        "ours": plan.sent_bytes,
    }
    if show:
        print(plan)
    with FlopCounterMode(display=False) as counter:
        got = pytree.tree_leaves(plan.simulate(*program.inputs, _poison=True))
    row["wrong"] = difference(got, want)
    keep(row)
    compared = gspmd.compare_with_xla(plan)
    row["xla"] = compared.bytes[1]
    if whole := graph_flops(plan.captured.graph, plan.mesh):
        row["arithmetic"] = (
            counter.get_total_flops() / whole,
            arithmetic_of_xla(compared.text) * devices / whole,
        )
    if show:
        print(compared, "", *map(str, plan.replicated_ops), sep="\n")
    return row


def is_above(row: dict[str, Any]) -> bool:
    return "xla" in row and row["ours"] > row["xla"] * 1.001 + 1


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"  {row['seed']:5}  {row['error']}"
    ratio = row["ours"] / row["xla"] if row["xla"] else math.inf if row["ours"] else 1.0
    split = " / ".join(f"{a:.2f}" for a in row["arithmetic"]) if row.get("arithmetic") else "-"
    return (
        f"  {row['seed']:5}  {ratio:6.2f}  {row['ours']:9.0f}  {row['xla']:9.0f}  {split:>12}  "
        f"{row['replicated']:2}"
        f"  {row['mesh']:12}  {row['name']}  {row['wrong']}"
    )


def report(rows: list[dict[str, Any]]) -> None:
    """The programs that need a look, the worst first, and how many there are."""
    above = sorted(filter(is_above, rows), key=lambda r: -r["ours"] / max(r["xla"], 1))
    wrong, failed = [r for r in rows if r.get("wrong")], [r for r in rows if "error" in r]
    for title, found in (("errors", failed), ("wrong numbers", wrong), ("above XLA", above)):
        if found:
            print(
                f"{title}\n   seed   ratio       ours        XLA    arithmetic  whole  mesh  "
                "program",
                *map(line, found),
                sep="\n",
            )
    compared = [r for r in rows if "xla" in r]
    shares = [r["ours"] / r["xla"] for r in compared if r["xla"]]
    mean = math.exp(sum(math.log(max(s, 1e-3)) for s in shares) / len(shares)) if shares else 1.0
    print(
        f"{len(rows)} programs, {len(failed)} errors, {len(wrong)} wrong, {len(compared)} "
        f"compared, {len(above)} above XLA, "
        f"{sum(bool(r['replicated']) for r in compared)} with something whole; ours over XLA's: "
        f"{mean:.2f} (geometric mean)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--devices", type=int, default=8, choices=(2, 4, 8))
    parser.add_argument("--only", action="append", default=[], help="families")
    parser.add_argument("--show", type=int, help="print the plan and the comparison of one seed")
    parser.add_argument(
        "--out", type=Path, help="JSON lines; seeds that are there are not run again"
    )
    args = parser.parse_args()
    start_xla(args.devices)
    seeds = range(*map(int, args.seeds.split(":"))) if args.show is None else [args.show]
    known = (
        [json.loads(text) for text in args.out.read_text().splitlines()]
        if args.out and args.out.exists()
        else []
    )
    rows = {row["seed"]: row for row in known if row["seed"] in seeds}

    def keep(row: dict[str, Any]) -> None:
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for seed in seeds:
        if seed in rows:
            continue
        try:
            rows[seed] = examine(seed, args.devices, args.only, args.show is not None, keep)
        except Exception as error:
            rows[seed] = {
                "seed": seed,
                "error": f"{type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
            }
            if args.show is not None:
                traceback.print_exc()
        keep(rows[seed])
        if is_above(rows[seed]) or rows[seed].get("wrong") or "error" in rows[seed]:
            print(line(rows[seed]), flush=True)
    report(list(rows.values()))


if __name__ == "__main__":
    main()
