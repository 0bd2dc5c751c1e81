"""A plan's golden text: what it stores, sends, holds and repeats, for a file under version control.

    torchgspmd plan, format 1
    mesh
      data=2 model=4
    inputs
      blocks.*.down.weight   f32[16, 64@model]   x 3
    communication
      forward   all_reduce   model   f32   blocks.*.down   384 B   x 3
    memory
      peak   20,204 B

Values have the paths of their modules, with * for numbers, so that no line shifts when another
value comes before it. Lines are sorted. A collective has the bytes that a device sends in one run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ..capture import TANGENT
from ..comm.collective import Collective
from ..errors import ShardingError
from ..fx_passes.digest import layout_text, like_name
from ..fx_passes.program import RunnablePlan
from ..fx_passes.units import short_source

HEAD = "torchgspmd plan, format 1"
OUTSIDE = "(outside)"  # the module of a value that forward computes in no module
COMMUNICATION = "communication"
_COUNT = re.compile(r"x (\d+)")
# Fields of a line by section. All but the last name a line; the last is its value.
SECTIONS = {
    "mesh": ("axes",),
    "inputs": ("name", "layout"),
    COMMUNICATION: ("phase", "kind", "axes", "dtype", "module", "bytes"),
    "replicated": ("operation", "module", "bytes"),
    "memory": ("part", "bytes"),
}

Row = tuple[str, ...]  # the fields of a line


@dataclass(frozen=True)
class GoldenChange:
    """A line that differs between two golden texts: its section, its name, and both values."""

    section: str
    name: Row
    before: str
    after: str
    where: str | None = None  # the first line in the user's code

    def __str__(self) -> str:
        verb = "new" if not self.before else "gone" if not self.after else "changed"
        values = " -> ".join(filter(None, (self.before, self.after)))
        place = f"  at {self.where}" if self.where else ""
        return "  ".join((f"{verb:7}", *(self.name or (self.section,)), values)) + place


@dataclass(frozen=True)
class Golden:
    """A golden text's lines: by section how often each stands for a value."""

    sections: Mapping[str, Counter[Row]]

    @classmethod
    def of(
        cls, plan: RunnablePlan, collectives: Sequence[Collective], memory: Mapping[str, float]
    ) -> Golden:
        """Return a plan's lines. memory: bytes, by part."""
        operations = [
            (each.op, place_text(each.module), _bytes(each.bytes)) for each in plan.replicated_ops
        ]
        rows = Counter[Row]()  # like collectives are counted
        for each in collectives:
            rows[collective_row(each)] += each.count
        return cls(
            {
                "mesh": Counter([(" ".join(f"{n}={s}" for n, s in plan.mesh.axes),)]),
                "inputs": Counter(_inputs(plan)),
                COMMUNICATION: rows,
                "replicated": Counter(operations),
                "memory": Counter((name, _bytes(count)) for name, count in memory.items()),
            }
        )

    @classmethod
    def parse(cls, text: str, name: str) -> Golden:
        """Return a text's lines. name: the file's, for errors.

        Raises:
            ShardingError: It is no golden text.
        """
        sections = {section: Counter[Row]() for section in SECTIONS}
        section = ""
        # It may be any file, which no update overwrites.
        fix = "name another file, or remove it and write it anew: plan.check(path, update=True)"
        lines = [line for line in text.splitlines() if line.strip() and line[0] != "#"]
        if lines[:1] != [HEAD]:
            raise ShardingError.here(f"{name} does not begin with '{HEAD}'", fix=fix)
        for line in lines[1:]:
            *fields, count = [*re.split(r"\s{2,}", line.strip()), ""]
            if fields and (found := _COUNT.fullmatch(fields[-1])):
                fields, count = fields[:-1], found[1]
            if line in SECTIONS:
                section = line
            elif section and len(fields) == len(SECTIONS[section]):
                sections[section][(*fields,)] += int(count or 1)
            else:
                raise ShardingError.here(f"{name} has a line that no plan has: {line}", fix=fix)
        return cls(sections)

    @property
    def mesh(self) -> str:
        """The mesh, as Mesh.parse reads it."""
        return ",".join(axes for (axes,) in self.sections["mesh"]).replace(" ", ",")

    def __str__(self) -> str:
        lines = [HEAD]
        for section, rows in self.sections.items():
            table = [
                (*row, *([f"x {count}"] if count > 1 else []))
                for row, count in sorted(rows.items(), key=lambda item: _order(item[0]))
            ]
            widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
            padded = ("  ".join(t.ljust(w) for t, w in zip(row, widths)) for row in table)
            lines += [section, *(f"  {row}".rstrip() for row in padded)] if table else []
        return "\n".join(lines) + "\n"

    def changes(self, after: Golden) -> Iterator[GoldenChange]:
        """Yield the lines that differ in another text, like ones together."""
        for section in SECTIONS:
            old, new = self.sections[section], after.sections[section]
            for name in dict.fromkeys(row[:-1] for row in [*old, *new] if old[row] != new[row]):
                yield GoldenChange(section, name, _values(old, name), _values(new, name))


def read(path: str | Path) -> Golden:
    """Read a golden text.

    Raises:
        ShardingError: There is no such file, or it is no golden text.
    """
    try:
        return Golden.parse(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ShardingError.here(
            f"there is no file {path}", fix="write it: plan.check(path, update=True)"
        ) from None
    except UnicodeDecodeError:
        raise ShardingError.here(f"{path} is no text", fix="name a file of plan.check") from None


def collective_row(each: Collective) -> Row:
    """Return the fields of a collective's line."""
    return (
        "backward" if each.backward else "forward",
        each.kind,
        "+".join(each.axes),
        each.dtype,
        place_text(each.module),
        _bytes(each.sent_bytes / each.count),
    )


def place_text(module: str) -> str:
    """Return a module's path as golden texts have it."""
    return like_name(module) or OUTSIDE


def sources_of(collectives: Sequence[Collective]) -> dict[Row, str]:
    """Return the first line in the user's code for each name of a line about them."""
    found: dict[Row, str] = {}
    for each in collectives:
        if each.source:
            found.setdefault(collective_row(each)[:-1], short_source(each.source))
    return found


def _inputs(plan: RunnablePlan) -> Iterator[Row]:
    nodes = plan.sharded.find_nodes(op="placeholder")
    for node, each in zip(nodes, plan.captured.inputs):
        if each.kind != TANGENT:
            yield like_name(each.name), layout_text(node) or "number"


def _values(rows: Counter[Row], name: Row) -> str:
    """Return the values of all lines with a name, with how often each stands there."""
    values = sorted((row[-1], count) for row, count in rows.items() if row[:-1] == name and count)
    return ", ".join(f"{count} x {value}" if count > 1 else value for value, count in values)


def _order(row: Row) -> tuple[str, ...]:
    # The forward comes first.
    return tuple("a" if field == "forward" else field for field in row)


def _bytes(count: float) -> str:
    """Return exact bytes: one row more in a shape has to show."""
    return f"{count:,.2f}".removesuffix(".00") + " B"
