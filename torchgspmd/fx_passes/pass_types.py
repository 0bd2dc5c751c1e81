"""The types of the pipeline's rows: a pass, and passes that may run without one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from .ir import runs
from .partition.insert_collectives import inserted
from .program import Program
from .schedule.liveness import budget_of, peak
from .stages import Stage

Run = Callable[[Program], fx.Graph | None]


class FeaturePass(NamedTuple):
    """A pass that a feature adds. looks_for: it runs if the graph calls any of these targets."""

    run: Run
    looks_for: Collection[object]


FEATURE_PASSES: dict[str, FeaturePass] = {}  # by a row's name; each feature adds its own at import


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program.

    run: takes the program, and returns the rewritten graph; None if it changed nothing. From
    `split_joint` on it is called for the forward, and for the backward.
    needs, ensures: the stages before and after it; it ensures the one that it needs by default.
    optional: names for `skip_passes`; a pass whose names are all skipped is left out.
    when: whether the pass is for this program.
    again: passes before it, or itself, that run next if it changed the program.
    in_loops: whether it runs on loop bodies, too.
    changes: whether it may change the program; else it is left out. A way without it goes on from
    where it runs.
    limit: the way without it is taken only if this is about as much as in the first way.
    feature: the features/ folder that the row belongs to; "core" for none.
    after, before: passes, by name, that the row has to follow and to precede.
    because: why it stands there.
    """

    name: str
    run: Run
    needs: Stage
    ensures: Stage = cast(Stage, None)
    optional: tuple[str, ...] = ()
    when: Callable[[Program], bool] = lambda p: True
    again: tuple[str, ...] = ()
    in_loops: bool = False
    changes: Callable[[Program], bool] | None = None
    limit: Callable[[Program], float] = lambda p: 0.0
    feature: str = "core"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    because: str = ""

    def __post_init__(self) -> None:
        if self.ensures is None:
            object.__setattr__(self, "ensures", self.needs)


@dataclass(frozen=True)
class Alternatives:
    """Passes that may run without one.

    order: the name of the pass that is left out, or None, for one way after the other. A pass that
    changed nothing in the first way is not left out. enough: whether to try no further way. cost:
    the cheapest way is taken, else the last one.
    """

    order: Callable[[Program], tuple[str | None, ...]]
    enough: Callable[[Program], bool]
    cost: Callable[[Program], float] | None
    passes: tuple[Pass, ...]

    @property
    def needs(self) -> Stage:
        return self.passes[0].needs


Step = Pass | Alternatives


def on_graph(run: Callable[[fx.Graph], fx.Graph | None]) -> Run:
    """Return the `run` for a pass that needs nothing but the graph."""
    return lambda p: run(p.graph)


def rows_of(steps: Sequence[Step]) -> tuple[Pass, ...]:
    """Return the passes in steps, those in alternatives at their place."""
    return tuple(p for s in steps for p in (s.passes if isinstance(s, Alternatives) else (s,)))


def without_rows(steps: Sequence[Step], feature: str) -> Iterator[Step]:
    for step in steps:
        if isinstance(step, Alternatives):
            rows = tuple(each for each in step.passes if each.feature != feature)
            yield replace(step, passes=rows)
        elif step.feature != feature:
            yield step


def with_row(steps: Sequence[Any], new: Pass, after: str) -> Iterator[Any]:
    """Yield the steps with a row behind the one named `after`."""
    for step in steps:
        if isinstance(step, Alternatives):
            yield replace(step, passes=tuple(with_row(step.passes, new, after)))
            continue
        yield step
        if step.name == after:
            yield new


def feature_pass(
    feature: str,
    name: str,
    stage: Stage,
    has_work: Callable[[Program], bool] = lambda p: False,
    **row: Any,
) -> Pass:
    """Return the row for a pass that a feature adds. has_work: whether it runs without a target."""

    def run(program: Program) -> fx.Graph | None:
        added = FEATURE_PASSES[name]
        is_needed = program.calls_any(added.looks_for) or has_work(program)
        return added.run(program) if is_needed else None

    return Pass(name, run, stage, feature=feature, **row)


# ------------------------------------------------- criteria between alternatives


def has_hosts(p: Program) -> bool:
    """Return whether the request names the hardware, or the processes are on several hosts."""
    return p.request.hardware is not None or p.request.hosts > 0


def sent_bytes(p: Program) -> float:
    """Return the bytes that a device sends in a partitioned program."""
    return sum(node.meta["step"].sent * runs(node) for node in inserted(p.graph))


def work(p: Program) -> float:
    """Return a device's arithmetic and memory traffic, at the partition's prices."""
    decisions = p.graph.output_node().meta["decisions"]
    return sum(strategy.work for strategy in decisions.strategies.values())


def price(p: Program) -> float:
    """Return the bytes that a device sends, and those that a link would send while it works."""
    constants = p.request.constants
    return sent_bytes(p) + work(p) * constants.flops_per_byte / constants.link_flops_per_byte


def fits_device(p: Program) -> bool:
    """Return whether one device's program fits into its budget or GPU; elsewhere it does."""
    if p.request.has_budget:
        return peak(p.graph) <= budget_of(p)
    inputs = p.captured.graph.find_nodes(op="placeholder")
    on_card = any(n.meta["val"].device.type == "cuda" for n in inputs)
    if not on_card or not torch.cuda.is_available():  # asked alone, it forbids forks that use cards
        return True
    card = torch.cuda.get_device_properties(torch.cuda.current_device())  # opens no context
    return peak(p.graph) <= card.total_memory
