"""Run sets of features: `cd tests && python -m composition tensor+stack`.

a+b+c           one set: right, refused, wrong, crash or other bytes than in sent_bytes.json,
                and of one that fails a smallest set
--all N         all sets of N features; with --log FILE a line of JSON each, and goes on there
--random N      N sets of three to six features, from --seed
--sent          write the rows that sent_bytes.json lacks; --sent all: all of them
--processes     judge on four processes, on a mesh of four devices, without bytes
--shuffle       in another order: a part of the sets is a sample
--list          the features
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .features import FEATURES, limits_of, parse, random_sets, sets
from .judge import CRASH, REFUSED, WRONG, Verdict, judge, shrink
from .sent_bytes import SENT, complete

OTHER_BYTES = "sends other bytes"
FAILURES = REFUSED, WRONG, CRASH, OTHER_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m composition", description=__doc__)
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--all", type=int)
    parser.add_argument("--random", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--sent", nargs="?", const="new", choices=("new", "all"))
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--with", dest="only", default="", help="only sets with one of a+b")
    args = parser.parse_args()
    os.environ.setdefault("TORCHGSPMD_CHECK", "1")  # programs are verified, as in tests
    if args.list:
        print(*FEATURES, sep="\n")
    if args.sent:
        complete(args.sent == "all")
        return
    chosen = [parse(text) for text in args.sets]
    chosen += sets(args.all) if args.all else []
    chosen += random_sets(args.random, args.seed) if args.random else []
    if args.only:
        chosen = [names for names in chosen if {*names} & {*parse(args.only)}]
    if args.shuffle:
        random.Random(0).shuffle(chosen)
    judged = judge_of_processes() if args.processes else judge
    done = set()
    if args.log and args.log.exists():
        done = {json.loads(line)["names"] for line in args.log.read_text().splitlines()}
    counts: Counter[str] = Counter()
    for names in chosen:
        if "+".join(names) in done:
            continue
        start = time.process_time()
        verdict = judged(names)
        kind = kind_of(verdict)
        counts[kind] += 1
        if args.log:
            row = {"names": "+".join(names), "kind": verdict.kind, "text": verdict.text}
            row |= {"sent": verdict.sent, "seconds": round(time.process_time() - start, 2)}
            with args.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
        if kind in FAILURES or len(chosen) < 10:
            print(verdict, flush=True)
        if kind == OTHER_BYTES:
            print(f"  {verdict.sent:.0f} bytes, {SENT['+'.join(names)]} in sent_bytes.json")
        elif kind in FAILURES and len(names) > 1 and not args.processes:
            print(
                f"  smallest: python -m composition {'+'.join(shrink(verdict).names)}", flush=True
            )
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(any(kind in FAILURES for kind in counts))


def judge_of_processes() -> Callable[[tuple[str, ...]], Verdict]:
    """Return the judge of sets on four processes."""
    sys.path.append(str(Path(__file__).parents[1] / "distributed"))
    return importlib.import_module("composition.on_processes").judge


def kind_of(verdict: Verdict) -> str:
    """Return the verdict in a word, with that of limits and bytes."""
    name = "+".join(verdict.names)
    if verdict.kind == REFUSED and any(w in verdict.text for w in limits_of(verdict.names)):
        return "a row of docs/limits.md"
    is_known = verdict.sent is None or verdict.sent == SENT.get(name, verdict.sent)
    return verdict.kind if is_known else OTHER_BYTES


main()
