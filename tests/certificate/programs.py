"""Random programs that are right, and whether a certificate takes one for wrong."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from composition.features import random_sets
from helpers import assert_same
from test_random_programs import drawn, for_each

import torchgspmd as gspmd
from torchgspmd import Plan, ShardingError

from .models import planned

CERTIFIED, LISTED = "certified", "with values that are listed"
ALARM, WRONG, REFUSED = "false alarm", "wrong", "refused"
EACH = 50  # programs of a seed
SETS_EVERY = 5  # seeds, there is a set of features, too
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

    def note(text: str, verdict: str, why: str) -> None:
        key = zlib.crc32(text.encode())
        if key not in keys:  # hypothesis may draw a program twice
            keys.append(key)
            counts[verdict] += 1
            alarms.extend([f"{verdict}: seed {number}\n{text}\n{why}"] if why else [])

    def one(data: Any) -> None:
        text, run, inputs, options = drawn(data)
        try:
            plan = gspmd.plan(run, *inputs, **options)
        except ShardingError:
            return note(text, REFUSED, "")
        verdict, why = _verdict(plan)
        if why and not _is_right(plan, inputs, run(*inputs)):
            verdict = WRONG
        return note(text, verdict, why)

    for_each(number, EACH, one)
    if number % SETS_EVERY == 0:
        name = "+".join(random_sets(1, number)[0])
        try:
            note(name, *_verdict(planned(name)))
        except ShardingError:
            note(name, REFUSED, "")
    return {"seed": number, "counts": counts, "keys": keys, "alarms": alarms}


def _verdict(plan: Plan) -> tuple[str, str]:
    try:
        return (CERTIFIED if plan.verify().complete else LISTED), ""
    except ShardingError as error:
        return ALARM, str(error)


def _is_right(plan: Plan, inputs: list[torch.Tensor], want: Any) -> bool:
    try:
        assert_same(plan.simulate(*inputs, _poison=True), want, terms=1 << 16)
    except AssertionError:
        return False
    return True
