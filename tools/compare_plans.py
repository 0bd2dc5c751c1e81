"""Prove that a refactoring changed no plan: record the plans of two checkouts, compare them.

    PYTHONPATH=OLD python tools/compare_plans.py save old.json --programs 5000
    PYTHONPATH=NEW python tools/compare_plans.py save new.json --programs 5000
    python tools/compare_plans.py compare old.json new.json
    PYTHONPATH=NEW python tools/compare_plans.py show 17    # a seed, or the name of a case

Every case of the communication suite and random programs of benchmarks/programs are planned. A
record has the bytes that a device sends and hashes of two texts: `plan` is the whole text of the
plan and the replicated operations, `program` the code of one device. An exception is recorded as
its message.

PYTHONPATH chooses the package. Run one copy of the tool for both: the programs come from beside it,
and `compare` warns where two copies draw other ones. A program depends on its seed alone, so one
file may hold fewer of them than the other; `compare` takes those that are in both.

Files and modules of the package may be moved: functions are named without their modules, and a
message names no file of the package. A function or operation that is renamed is a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from plan_subjects import TREE, Key, Subject, generator, subject_of, suite
from torch import fx

import torchgspmd as gspmd
from torchgspmd.fx_passes.replication_report import replication_report

HERE = Path(__file__).resolve().parent
CASES = TREE.parent / "shared" / "communication"

CHUNK = 100  # Keys that one process plans before it makes room for a fresh one.
SECONDS = 300  # CPU time limit of one plan.
NAMED = 20  # Differences that `compare` names.

Record = dict[str, Any]


# --------------------------------------------------------------------------- what is recorded


def text_of(plan: gspmd.Plan) -> str:
    """Return the whole text of a plan, also of a commit that has no Plan.text."""
    return plan.text(full=True) if hasattr(plan, "text") else str(plan)


def texts(plan: gspmd.Plan) -> dict[str, str]:
    """Return what is compared of a plan."""
    report = replication_report(plan.sharded, plan.mesh)  # in program order
    replicated = [f"replicated {r.op} {r.bytes} {r.why} {r.source}" for r in report]
    return {
        "plan": portable("\n".join([text_of(plan), *replicated])),
        "program": portable(without_modules(plan.program.code, plan.program.graph)),
    }


def without_modules(code: str, graph: fx.Graph) -> str:
    """Name functions of the package without their modules, which fx makes a part of their names."""
    for node in graph.nodes:
        module, name = (getattr(node.target, a, None) for a in ("__module__", "__name__"))
        if node.op == "call_function" and str(module).split(".")[0] == "torchgspmd":
            code = code.replace(f"{module}.{name}".replace(".", "_") + "(", f"{name}(")
    return code


def portable(text: str) -> str:
    """Strip addresses, directories, lines of this folder's files, files of the package."""
    package = Path(gspmd.__file__).resolve().parent

    def short(match: re.Match[str]) -> str:
        file = Path(match[1]).resolve()
        if package in file.parents:
            return "torchgspmd"
        return file.name if file.parent == HERE else file.name + match[2]

    text = re.sub(r'([\w./~+-]*\w\.py)((?::|", line )\d+)', short, text)
    return re.sub(r"\b0x[0-9a-f]{6,}", "0x", text)


def record(subject: Subject, collectives: bool = False) -> Record:
    """Plan a subject, return what is kept of it; collectives: whether these are."""
    row: Record = {"name": subject.name}
    try:
        with cpu_limit(SECONDS):
            plan = subject.plan()
            compared = texts(plan)
    except Exception as error:  # Whatever it is, it is compared.
        return row | {"error": message(error)}
    row["bytes"] = float(plan.sent_bytes)
    row |= {k: hashlib.sha256(text.encode()).hexdigest()[:16] for k, text in compared.items()}
    if collectives:
        row["collectives"] = [
            f"{c.kind} {'+'.join(c.axes)} {c.dtype} {c.payload_bytes:g} {c.sent_bytes:g} x{c.count}"
            for c in plan.collectives
        ]
    return row


def message(error: Exception) -> str:
    """Return the type and the text of an error."""
    return portable(f"{type(error).__name__}: {error}")


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so much CPU time, so that a busy machine makes none."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    previous = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


# --------------------------------------------------------------------------- save: processes


def work(cases: Path) -> None:
    """Read keys as JSON from stdin, write a line of JSON for each as soon as it is planned."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    for kind, name in json.load(sys.stdin):
        try:
            row = record(subject_of((kind, name), cases), collectives=kind == "cases")
        except Exception as error:  # The program itself cannot run, on one device either.
            row = {"name": "not drawn", "error": message(error)}
        print(json.dumps([kind, name, row]), file=out, flush=True)


def planned(keys: Sequence[Key], cases: Path) -> list[tuple[str, str, Record]]:
    """Plan keys in a process of their own; another one goes on behind a key that ends it."""
    command = [sys.executable, __file__, "work", "--cases", str(cases)]
    rows: list[tuple[str, str, Record]] = []
    while len(rows) < len(keys):
        done = subprocess.run(
            command,
            input=json.dumps(keys[len(rows) :]),
            text=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        rows += map(json.loads, done.stdout.splitlines())
        if len(rows) < len(keys):
            last = (done.stderr.strip().splitlines() or [""])[-1]
            why = f"the process ended with status {done.returncode}: {portable(last)}"
            rows.append((*keys[len(rows)], {"name": "", "error": why}))
    return rows


def save(options: argparse.Namespace) -> int:
    """Plan everything, write the file after every chunk."""
    if not options.cases.is_dir():
        sys.exit(f"no communication suite at {options.cases}: say where it is with --cases")
    programs = range(options.seed, options.seed + options.programs)
    keys = [("cases", name) for name in suite(options.cases)]
    keys += [("programs", str(seed)) for seed in programs]
    records = resumed(options.out) if options.resume else None
    records = records or {"about": about(), "cases": {}, "programs": {}}
    todo = [key for key in keys if key[1] not in records[key[0]]]
    print(f"{len(todo)} plans with {gspmd.__file__}", file=sys.stderr)
    start, count = time.monotonic(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for rows in pool.map(lambda chunk: planned(chunk, options.cases), chunks(todo)):
            for kind, name, row in rows:
                records[kind][name] = row
            write(options.out, records)
            count += len(rows)
            spent = time.monotonic() - start
            print(f"{count} of {len(todo)}: {spent:.0f} s", file=sys.stderr, flush=True)
    return 0


def about() -> Record:
    """Return where records come from."""
    return {"generator": generator(), "package": gspmd.__file__}


def chunks(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    """Yield keys in groups: one group is planned by one process."""
    return (keys[i : i + CHUNK] for i in range(0, len(keys), CHUNK))


def resumed(path: Path) -> Record | None:
    """Return what a file has; it must come from the same programs and the same package."""
    if not path.exists():
        return None
    records = json.loads(path.read_text())
    if records["about"] != about():
        sys.exit(f"{path} is of other programs or another package: {records['about']}")
    return records


def write(path: Path, records: Record) -> None:
    """Write a file at once: there is never a part of one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(records, indent=0) + "\n")
    part.replace(path)


# --------------------------------------------------------------------------- compare


VERDICTS = {
    "cheaper": "cheaper in bytes",
    "dearer": "dearer in bytes",
    "text": "of the same bytes with another text",
    "error": "with an error in one, or another one",
}


def verdict(a: Record, b: Record) -> str:
    """Return how two records of one key differ: a word, the empty one if they do not."""
    if a == b:
        return ""
    if "error" in a or "error" in b:
        return "error"
    before, after = a["bytes"], b["bytes"]
    return "cheaper" if after < before else "dearer" if after > before else "text"


def compare(options: argparse.Namespace) -> int:
    """Print what differs; return 1 if anything does that is not cheaper."""
    a, b = (json.loads(path.read_text()) for path in (options.a, options.b))
    if a["about"]["generator"] != b["about"]["generator"]:
        print("the two copies of the tool differ: a seed may stand for two programs")
    verdicts = [print_kind(a[kind], b[kind], kind) for kind in ("cases", "programs")]
    words = {word for kind in verdicts for word in kind}
    return int(not words or not words <= {"", "cheaper"})


def print_kind(a: Record, b: Record, kind: str) -> list[str]:
    """Print what differs in the cases, or in the programs; return the verdicts."""
    keys = [key for key in a if key in b]
    verdicts = [verdict(a[key], b[key]) for key in keys]
    counts = [f"{n} {VERDICTS[word]}" for word in VERDICTS if (n := verdicts.count(word))]
    for only, where in ((len(a) - len(keys), "A"), (len(b) - len(keys), "B")):
        counts += [f"{only} only in {where}"] * bool(only)
    equal = verdicts.count("")
    print(f"{kind}: {equal} equal, {len(keys) - equal} different", *counts, sep=", ")
    lines = [f"  {k}: {difference(a[k], b[k], w)}" for k, w in zip(keys, verdicts) if w]
    more = [f"  and {len(lines) - NAMED} more"] * (len(lines) > NAMED)
    print(*lines[:NAMED], *more, sep="\n", end="\n" * bool(lines))
    return verdicts


def difference(a: Record, b: Record, word: str) -> str:
    """Return a line about two records that differ."""
    if a["name"] != b["name"]:
        return f"{word}: {a['name']!r} in A, {b['name']!r} in B"
    if "error" in a or "error" in b:
        left, right = (r.get("error", "planned").splitlines() for r in (a, b))
        at = next((i for i, (x, y) in enumerate(zip(left, right)) if x != y), 0)
        return f"{word}: {a['name']}: {left[at]!r} in A, {right[at]!r} in B"
    parts = [k for k in ("plan", "program", "collectives") if a.get(k) != b.get(k)]
    return f"{word}: {a['name']}: {a['bytes']:g} B -> {b['bytes']:g} B, other {' and '.join(parts)}"


def show(options: argparse.Namespace) -> int:
    """Print the texts of one program or case."""
    kind = "programs" if options.what.isdigit() else "cases"
    subject = subject_of((kind, options.what), options.cases)
    try:
        parts = texts(subject.plan())
    except Exception as error:
        parts = {"error": message(error)}
    print(subject.name, *(f"--- {k}\n{text.strip()}" for k, text in parts.items()), sep="\n")
    return 0


# --------------------------------------------------------------------------- command line


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    cases = argparse.ArgumentParser(add_help=False)
    cases.add_argument("--cases", type=Path, default=CASES, help="communication suite")
    made = commands.add_parser("save", parents=[cases], help="plan and record everything")
    made.add_argument("out", type=Path)
    made.add_argument("--programs", type=int, default=20000, help="number of random programs")
    made.add_argument("--seed", type=int, default=0, help="seed of the first one; others follow it")
    made.add_argument("--jobs", type=int, default=2, help="processes")
    made.add_argument("--resume", action="store_true", help="keep what the file has already")
    both = commands.add_parser("compare", help="compare two files")
    both.add_argument("a", type=Path)
    both.add_argument("b", type=Path)
    one = commands.add_parser("show", parents=[cases], help="print the texts of one plan")
    one.add_argument("what", help="seed of a program, or name of a case")
    commands.add_parser("work", parents=[cases])  # What `save` starts.
    return parser.parse_args()


def main() -> int:
    """Run the command."""
    options = arguments()
    if options.command == "work":
        return work(options.cases) or 0
    return {"save": save, "compare": compare, "show": show}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
