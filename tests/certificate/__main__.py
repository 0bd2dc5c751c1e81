"""Put faults into plans, and count those that a certificate finds.

python -m certificate --faults 100 --log counts.jsonl     # goes on where the log ends
python -m certificate --count counts.jsonl                # prints a log's counts
python -m certificate --programs 20000 --log alarms.jsonl # certifies random programs
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import programs
from .judge import CAUGHT, CRASHED, HARMLESS, MISSED, Judge
from .models import MODELS

Row = dict[str, Any]  # model, seed, kind, node, verdict, near, text
LIMIT = 300  # seconds of a fault


def judged(judge: Judge, seeds: range) -> Iterator[Row]:
    """Yield rows of faults, from processes that die of some: they crash, or never end."""
    while seeds:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                for seed in seeds:
                    faulthandler.dump_traceback_later(LIMIT, exit=True)
                    print(json.dumps(_row(judge, seed)), file=file, flush=True)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            for line in file:
                row = json.loads(line)
                judge.seen.add(row["key"])
                seeds = range(row["seed"] + 1, seeds.stop)
                yield row
        os.waitpid(child, 0)
        if seeds:
            dead = {"kind": "?", "node": "", "verdict": CRASHED, "near": True, "text": ""}
            yield {"model": judge.name, "seed": seeds[0], **dead}
            seeds = seeds[1:]


def _row(judge: Judge, seed: int) -> Row:
    verdict = judge.judge(seed)
    row: Row = {"model": judge.name, "seed": seed, "key": judge.last}
    if verdict is None:
        return row | {"kind": "", "node": "", "verdict": "none", "near": True, "text": ""}
    is_plain = verdict.kind == CAUGHT and verdict.near
    text = "" if is_plain or verdict.kind == HARMLESS else verdict.text
    fault = {"kind": verdict.fault.kind, "node": verdict.fault.node}
    return row | fault | {"verdict": verdict.kind, "near": verdict.near, "text": text}


def put(models: list[str], faults: int, log: Path) -> None:
    """Judge so many faults of each model; append them to a log, where those of it are left out."""
    rows = read(log)
    last = {row["model"]: row["seed"] for row in rows}
    for name in models:
        seeds = range(last.get(name, -1) + 1, faults)
        if not seeds:
            continue
        judge = Judge(name)
        judge.seen |= {row["key"] for row in rows if row["model"] == name and "key" in row}
        print(name, judge.plan.verify(), flush=True)
        with log.open("a") as file:
            for row in judged(judge, seeds):
                print(json.dumps(row), file=file, flush=True)


def read(log: Path) -> list[Row]:
    """Return the rows of a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines]


def summary(rows: list[Row]) -> str:
    """Return the counts of a log, and the faults that were missed or found far away."""
    counts, kinds = Counter[str](row["verdict"] for row in rows), dict[str, Counter[str]]()
    for row in rows:
        kinds.setdefault(row["kind"], Counter())[row["verdict"]] += 1
    lines = [
        f"  {kind:20} {each[CAUGHT]:6} caught {each[MISSED]:4} missed "
        f"{each[HARMLESS]:6} change no number"
        for kind, each in sorted(kinds.items())
        if kind not in ("", "?")
    ]
    for row in rows:
        is_far = row["verdict"] == CAUGHT and not row["near"]
        if is_far or row["verdict"] == MISSED:
            word, where = "far" if is_far else MISSED, f"{row['model']} {row['seed']}"
            lines.append(f"{word}: {where} {row['kind']} %{row['node']}: {row['text']}")
    near = sum(row["verdict"] == CAUGHT and row["near"] for row in rows)
    lines.append(
        f"{counts[CAUGHT]} of {counts[CAUGHT] + counts[MISSED]} faults that matter caught, {near} "
        f"near their place, in {len({row['model'] for row in rows})} models; {counts[HARMLESS]} "
        f"change no number, {counts[CRASHED]} end the process, a pass refuses {counts['refused']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m certificate", description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="sets of features")
    parser.add_argument("--faults", type=int, default=100, help="tries for each model")
    parser.add_argument("--log", type=Path, default=Path("certificate.jsonl"))
    parser.add_argument("--count", type=Path, help="print the counts of this log alone")
    parser.add_argument("--programs", type=int, default=0, help="random programs, which are right")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    args = parser.parse_args()
    if args.programs:
        print(programs.summary([*programs.rows(args.programs, args.seed, args.log)]))
        return
    if args.count is None:
        put([*args.models], args.faults, args.log)
    print(summary(read(args.count or args.log)))


if __name__ == "__main__":
    main()
