"""What the coverage benchmarks share: random layouts, the comparison, processes that can crash, the
report.

A row is what was found of one operation or module: its samples, how many of them are right in the
forward and in both, how many were given a layout and ran partitioned, what was replicated, and the
failures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait

import torch
from torch import Tensor

import torchgspmd as gspmd

MESHES = (dict(a=2), dict(a=3), dict(a=4), dict(a=2, b=2), dict(a=2, b=3))


def random_spec(rng: random.Random, shape, names) -> str:
    """Every axis on a random dimension or on none; an axis may meet another one there."""
    words: list[list[str]] = [[] for _ in shape]
    for name in rng.sample(names, len(names)):
        if shape and rng.random() < 0.75:
            words[rng.randrange(len(shape))].append(name)
    return " ".join("+".join(w) or "_" for w in words)


def differs(got: list[Tensor], want: list[Tensor], relative: float = 1e-4) -> str | None:
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for i, (g, w) in enumerate(zip(got, want)):
        g, w = g.detach().resolve_conj().resolve_neg(), w.detach().resolve_conj().resolve_neg()
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"result {i} is {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}"
        if w.dtype == torch.bool:
            g, w = g.to(torch.uint8), w.to(torch.uint8)
        finite = w[w.isfinite()].abs() if w.numel() else w
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        if not torch.allclose(g, w, rtol=relative, atol=relative / 5 * scale, equal_nan=True):
            error = (
                (g - w).abs().nan_to_num(9e9).max()
                if w.is_floating_point()
                else (g != w).float().mean()
            )
            return f"result {i} is off by {float(error):.1e}"
    return None


def tried(row: dict, plan: gspmd.Plan, specs: Iterable[str]) -> dict:
    """The row with what the plan did with these layouts."""
    row["random"] = any(
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        for n in plan.sharded.nodes
    )
    row["replicated"] = sorted(
        {r.op for r in plan.replicated_ops if "is gathered over" not in r.why}
    )
    row["sharded"] = any(any(w not in "_" for w in s.split()) for s in specs)
    row["partitioned"] = any(n.meta.get("assignment") for n in plan.sharded.nodes)
    return row


def failure(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200]


class Found:
    """What is found of one operation or module, sample by sample."""

    def __init__(self, name: str):
        self.row = {
            "op": name,
            "samples": 0,
            "forward": 0,
            "both": 0,
            "failures": [],
            "replicated": [],
            "partitioned": 0,
            "sharded": 0,
        }

    def add(self, index: int, row: dict, backward: bool, forward: Callable[[], dict]) -> None:
        """Counts a sample; forward tries it again without its backward."""
        found = self.row
        if row.get("random"):  # it sets the seed itself, so running it twice did not show it
            found["skipped"] = "random"
            return
        failed = "wrong" in row or "raises" in row
        found["samples"] += 1
        found["both"] += not failed
        found["forward"] += not failed or backward and not {"wrong", "raises"} & set(forward())
        found["sharded"] += row.get("sharded", False)
        found["partitioned"] += (
            row.get("sharded", False)
            and row.get("partitioned", False)
            and not row.get("replicated")
        )
        found["replicated"] = sorted({*found["replicated"], *row.get("replicated", ())})
        if failed:
            found["failures"].append({"sample": index, **row})


IDLE = 20  # seconds of the clock for one of the CPU: other jobs may take the rest


def worker(connection, run_one: Callable[[str], dict], seconds: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (name := connection.recv()) is not None:
        end = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        try:
            connection.send(run_one(name))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            connection.send(
                {"op": name, "samples": 0, "forward": 0, "both": 0, "skipped": failure(error)}
            )


class Pool:
    """Processes that work on one name each, replaced where one crashes or takes too long.

    seconds: of the CPU, so that the rows are the same beside other jobs.
    """

    def __init__(self, run_one: Callable[[str], dict], jobs: int, seconds: float):
        self.run_one, self.jobs, self.seconds = run_one, jobs, seconds
        self.late = f"took more than {seconds:.0f} s of the CPU"

    def start(self):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=worker, args=(theirs, self.run_one, self.seconds), daemon=True
        )
        process.start()
        theirs.close()
        return ours, process

    def run(self, names: list[str]) -> Iterator[dict]:
        """Yields the row of every name."""
        todo, busy = list(reversed(names)), {}
        idle = [self.start() for _ in range(self.jobs)]
        while todo or busy:
            while todo and idle:
                connection, process = idle.pop()
                name = todo.pop()
                connection.send(name)
                busy[connection] = process, name, time.monotonic() + IDLE * self.seconds
            for connection in wait(list(busy), timeout=1):
                process, name, _ = busy.pop(connection)
                try:
                    yield connection.recv()
                    idle.append((connection, process))
                except EOFError:
                    process.join()
                    slow = process.exitcode == -signal.SIGXCPU
                    yield self.lost(name, self.late if slow else "crashed")
                    idle.append(self.start())
            for connection, (process, name, end) in list(busy.items()):
                if time.monotonic() > end:
                    busy.pop(connection)
                    process.kill()
                    yield self.lost(name, self.late)
                    idle.append(self.start())
        for connection, _ in idle:
            connection.send(None)

    @staticmethod
    def lost(name: str, why: str) -> dict:
        return {
            "op": name,
            "samples": 1,
            "forward": 0,
            "both": 0,
            "sharded": 0,
            "partitioned": 0,
            "replicated": [],
            "failures": [{"raises": why}],
        }


def options(what: str, of: str, **more: str) -> argparse.Namespace:
    """more: options of a benchmark's own, with their defaults."""
    parser = argparse.ArgumentParser(description=what.split("\n")[0])
    parser.add_argument("--only", action="append", help=f"name of {of}; may be repeated")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help=f"limit for {of}")
    parser.add_argument("--json", help="file to write all rows to")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_args()


def measure(
    many: str, names: list[str], run_one: Callable[[str], dict], given: argparse.Namespace
) -> None:
    """Runs all names, prints what is not right and a summary; many: what the names are names of."""
    if given.only:
        names = [n for n in names if n in given.only or n.split(".")[-1] in given.only]
    rows, start = [], time.monotonic()
    for row in Pool(run_one, given.jobs, given.seconds).run(names):
        rows.append(row)
        for fail in row.get("failures", ())[:2]:
            print(
                f"{row['op']}: {fail.get('wrong') or fail['raises']}  [{fail.get('mesh')} "
                f"{fail.get('specs')}]",
                flush=True,
            )
    summary = summarize(rows, round(time.monotonic() - start))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(
                {"summary": summary, "rows": sorted(rows, key=lambda r: r["op"])}, file, indent=1
            )
    print(
        f"{summary['tested']} {many} ({len(summary['skipped'])} left out: random, or without "
        f"samples) in {summary['seconds']} s: "
        f"{summary['forward_right']} right in the forward, {summary['both_right']} in both; "
        f"{len(summary['silently_wrong'])} silently wrong, "
        f"{len(summary['raising'])} raise; {summary['partitioned']} ran partitioned, "
        f"{summary['nothing_replicated']} replicate nothing"
    )


def summarize(rows: list[dict], seconds: int) -> dict:
    tested = [r for r in rows if r["samples"]]
    return {
        "tested": len(tested),
        "skipped": sorted(r["op"] for r in rows if not r["samples"]),
        "forward_right": sum(r["forward"] == r["samples"] for r in tested),
        "both_right": sum(r["both"] == r["samples"] for r in tested),
        "silently_wrong": sorted(
            r["op"] for r in tested if any("wrong" in f for f in r["failures"])
        ),
        "raising": sorted(r["op"] for r in tested if any("raises" in f for f in r["failures"])),
        "nothing_replicated": sum(not r["replicated"] for r in tested),
        "partitioned": sum(r["partitioned"] > 0 for r in tested),
        "seconds": seconds,
    }
