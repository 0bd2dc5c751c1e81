"""Put faults into plans, and count those that a certificate finds.

python -m certificate --faults 100 --seed 0
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections import Counter

from .faults import Injected
from .judge import CAUGHT, CRASHED, HARMLESS, MISSED, MODELS, Judge, Verdict


def apart(judge: Judge, seed: int) -> Verdict | None:
    """Return the verdict of a process of its own: some faults write where no tensor is."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writer, "wb") as file:
            pickle.dump(judge.judge(seed), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else Verdict(Injected("crash", "", frozenset()), CRASHED)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m certificate", description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="sets of features")
    parser.add_argument("--faults", type=int, default=100, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--far", action="store_true", help="print errors that name another place")
    args = parser.parse_args()
    kinds: dict[str, Counter[str]] = {}
    total, near = Counter[str](), 0
    for name in args.models:
        start, judge, mine = time.perf_counter(), Judge(name), Counter[str]()
        print(judge.plan.verify(), flush=True)
        for seed in range(args.seed, args.seed + args.faults):
            verdict = apart(judge, seed)
            if verdict is None:
                continue
            mine[verdict.kind] += 1
            near += verdict.kind == CAUGHT and verdict.near
            kinds.setdefault(verdict.fault.kind, Counter())[verdict.kind] += 1
            if verdict.kind == CAUGHT and not verdict.near and args.far:
                print(f"far: {name} {seed} {verdict.fault} {verdict.text}", flush=True)
            if verdict.kind == MISSED:
                print(f"missed: {name} {seed} {verdict.fault} {verdict.text}", flush=True)
        total += mine
        print(f"{name:20} {dict(mine)} {time.perf_counter() - start:.0f} s", flush=True)
    for kind, counts in sorted(kinds.items()):
        print(
            f"  {kind:20} {counts[CAUGHT]:6} caught {counts[MISSED]:4} missed "
            f"{counts[HARMLESS]:6} change no number"
        )
    matter = total[CAUGHT] + total[MISSED]
    print(
        f"{total[CAUGHT]} of {matter} faults that matter caught, {near} near their place; "
        f"{total[HARMLESS]} change no number, {total[CRASHED]} end the process"
    )


if __name__ == "__main__":
    main()
