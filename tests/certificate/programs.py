"""Random programs that are right, and whether a certificate takes one for wrong."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from composition.features import random_sets
from helpers import assert_same
from test_dynamic_programs import MARK, drawn_spec, replanned
from test_random_programs import MESHES, drawn, for_each
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd import Plan, ShardingError
from torchgspmd.capture import Captured

from .models import planned

CERTIFIED, LISTED = "certified", "with values that are listed"
ALARM, WRONG, REFUSED = "false alarm", "wrong", "refused"
EACH = 200  # programs of a seed
LAYOUTS = 8  # of each function, which is captured once
Row = dict[str, Any]  # seed, counts, keys of the programs, texts of alarms


def rows(count: int, seed: int, log: Path) -> Iterator[Row]:
    """Yield the rows of seeds with so many programs in all; those of the log are not run again."""
    done = {row["seed"]: row for row in read(log)}
    for number in range(seed, seed - (-count // EACH)):
        if number not in done:
            done[number] = _judged(number)
            with log.open("a") as file:
                print(json.dumps(done[number]), file=file)
        yield done[number]


def read(log: Path) -> list[Row]:
    """Return the rows of a log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def summary(rows: list[Row]) -> str:
    """Return the counts of all rows, and the alarms."""
    counts, keys = Counter[str](), set[str]()
    for row in rows:
        counts.update(row["counts"])
        keys.update(row["keys"])
    lines = [text for row in rows for text in row["alarms"]]
    each = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    return "\n".join([*lines, f"{len(keys)} different programs: {each}; {counts[ALARM]} {ALARM}s"])


def _judged(number: int) -> Row:
    counts, keys, alarms = Counter[str](), list[int](), list[str]()
    rng = Random(number)

    def note(text: str, make: Callable[[], Plan], is_right: Callable[[Plan], bool]) -> None:
        key = zlib.crc32(text.encode())
        if key in keys:  # hypothesis may draw a program twice
            return
        keys.append(key)
        verdict, why = _verdict(make, is_right)
        counts[verdict] += 1
        alarms.extend([f"{verdict}: seed {number}\n{text}\n{why}"] if why else [])

    def one(data: Any) -> None:
        text, run, inputs, options = drawn(data)
        captured = list[Captured]()

        def make() -> Plan:
            plan = gspmd.plan(run, *inputs, **options)
            captured.append(plan.captured)
            return plan

        def is_right(plan: Plan) -> bool:
            return _is_right(plan, inputs, run(*inputs))

        note(text, make, is_right)
        for _ in range(LAYOUTS - 1) if captured else ():
            other = _Layouts(rng, captured[0], inputs)
            note(f"{text}\n{other}", partial(other.plan, captured[0]), is_right)

    for_each(number, EACH // LAYOUTS, one)
    (names,) = random_sets(1, number)
    note("+".join(names), lambda: planned("+".join(names)), lambda plan: True)
    return {"seed": number, "counts": counts, "keys": keys, "alarms": alarms}


class _Layouts:
    """A mesh, and layouts of inputs, results and marks on it."""

    def __init__(self, rng: Random, captured: Captured, inputs: Sequence[Tensor]) -> None:
        self.mesh = mesh = rng.choice(MESHES)
        nodes = captured.graph.find_nodes(op="call_function", target=MARK)
        values = [n.meta["val"] for n in nodes if not n.meta.get("backward")]
        results = [n.meta["val"] for n in captured.graph.output_node().args[0]]

        def drawn_specs(tensors: Sequence[Tensor]) -> list[str | None]:
            specs = [drawn_spec(rng, mesh, t.dim()) for t in tensors]
            return [None if rng.random() < 0.3 else spec for spec in specs]

        self.specs, self.outs = drawn_specs(inputs), (drawn_specs(results[:2]), None)
        self.marks = [drawn_spec(rng, mesh, t.dim()) for t in values]

    def __str__(self) -> str:
        return f"{self.mesh!r} in {self.specs} out {self.outs} marks {self.marks}"

    def plan(self, captured: Captured) -> Plan:
        return replanned(captured, self.mesh, self.specs, self.outs, self.marks)


def _verdict(make: Callable[[], Plan], is_right: Callable[[Plan], bool]) -> tuple[str, str]:
    """Return what becomes of a program, and why if it is an alarm."""
    try:
        plan = make()
    except ShardingError:
        return REFUSED, ""
    try:
        return (CERTIFIED if plan.verify().complete else LISTED), ""
    except ShardingError as error:
        return (ALARM if is_right(plan) else WRONG), str(error)


def _is_right(plan: Plan, inputs: list[Tensor], want: Any) -> bool:
    try:
        assert_same(plan.simulate(*inputs, _poison=True), want, terms=1 << 16)
    except AssertionError:
        return False
    return True
