"""The features, a row each: name, axes of the mesh, and the fields of Setup that it sets.

Tables of two features are joined, and so are the axes that both give one name. Features that set
one field to different values cannot be together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from .program import UNEVEN, Setup


@dataclass(frozen=True)
class Feature:
    name: str
    axes: tuple[str, ...] = ()
    layout: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


TENSOR = {"heads": "model", "hidden": "model", "words": "model"}
ALONG = {"length": "seq", "stream": "seq"}


def _row(name: str, axes: str = "", layout: dict[str, str] | None = None, **changes: Any):
    return Feature(name, tuple(axes.split()), layout or {}, changes)


def _stages(name: str, **pipeline: Any) -> Feature:
    layers = 2 * pipeline.get("repeats", 1)
    return _row(name, "stage", blocks="pipeline", pipeline=pipeline, layers=layers)


ROWS = (
    _row("data", "data", {"batch": "data"}),
    _row("tensor", "model", TENSOR),
    _row("sequence", "model", {**TENSOR, "stream": "model"}),
    _row("zero3", "data", {"batch": "data", "embed": "data"}),
    _row("zero1", "data", {"batch": "data"}, step=True, states="data"),
    _row("context", "seq", ALONG),
    _row("ring", "seq", ALONG, keys=1, options={"regather": "all"}),
    _row("dropless", "expert", {"batch": "expert", "expert": "expert"}, feed_forward="dropless"),
    _row("capacity", "expert", {"batch": "expert", "expert": "expert"}, feed_forward="capacity"),
    _stages("circular"),
    _stages("circular2", repeats=2),
    _stages("gpipe", schedule="gpipe"),
    _stages("1f1b", schedule="1f1b"),
    _stages("interleaved", schedule="1f1b", repeats=2),
    _stages("zero_bubble", schedule="zero_bubble"),
    _stages("vee", schedule="zero_bubble", repeats=2),
    _row("manual", "model", by_hand=True),
    _row("hardware", options={"hardware": "tpu_v4"}),  # without a rate of float64
    _row("stack", blocks="stack"),
    _row("recompute", recompute=True),
    _row("checkpoint", inner_checkpoint=True),
    _row("selective", selective=True),
    _row("accumulate", accumulate=2),
    _row("tied", tied=True),
    _row("reduce", options={"reduce_dtype": torch.float32}, rounding=torch.float32),
    _row("step", step=True),
    _row("any_batch", dynamic={"batch": 0}),
    _row("any_length", dynamic={"length": 1}),
    _row("uneven", sizes=UNEVEN),
    _row("dropout", dropout=0.5),
    _row("attention_dropout", attention_dropout=0.5),
    _row("flex", window=True),
    _row("gqa", keys=2),
    _row("adapters", adapters=True, frozen=("attention.q", "attention.k", "attention.v")),
    _row("frozen", frozen=("embed", "norm1.weight")),
    _row("tracked", tracked=True),
    _row("hooked", hooked=True),
)
FEATURES = {row.name: row for row in ROWS}
# What one field cannot say: a number of heads that two do not divide has no groups of two, layers
# of experts have no dense layer to write by hand, torch's scan forbids writes in its body,
# and a mask of blocks is one of a length.
APART = {
    frozenset(pair)
    for pair in (
        ("uneven", "gqa"),
        ("uneven", "manual"),
        ("manual", "dropless"),
        ("manual", "capacity"),
        ("flex", "attention_dropout"),
        ("accumulate", "tracked"),
        ("any_length", "flex"),
    )
}
# What a ShardingError refuses: two sets of features that do not go together, and words of the
# message. docs/limits.md has a row for each.
LIMITS = (
    (("data", "zero3", "zero1", "dropless", "capacity"), ("any_batch",), "has a size that depends"),
    (("sequence", "context", "ring"), ("any_length",), "has a size that depends"),
)
MERGED = ("options", "dynamic", "frozen")  # Fields that two rows set together.


def parse(text: str) -> tuple[str, ...]:
    """Return the features of `a+b+c`."""
    names = tuple(text.split("+"))
    for name in names:
        if name not in FEATURES:
            raise SystemExit(f"no feature '{name}'; there are {', '.join(FEATURES)}")
    return names


def fit(names: tuple[str, ...]) -> bool:
    """Return whether these features can be in one program."""
    rows = [FEATURES[name] for name in names]
    return not any(
        frozenset((a.name, b.name)) in APART
        or any(
            a.changes[key] != b.changes[key]
            for key in a.changes
            if key in b.changes and key not in MERGED
        )
        for a, b in combinations(rows, 2)
    )


def limits_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return words of the messages that may refuse a set."""
    chosen = {*names}
    return tuple(text for some, others, text in LIMITS if chosen & {*some} and chosen & {*others})


def setup_of(names: tuple[str, ...]) -> Setup:
    """Return the setup of a set of features."""
    setup = Setup()
    for name in names:
        row = FEATURES[name]
        setup.mesh |= dict.fromkeys(row.axes, 2)
        for dim, axes in row.layout.items():
            present = setup.layout.get(dim, "")
            if axes not in present.split("+"):
                setup.layout[dim] = f"{present}+{axes}".strip("+")
        for key, value in row.changes.items():
            if key == "frozen":
                value = (*setup.frozen, *value)
            elif key in MERGED:
                value = {**getattr(setup, key), **value}
            setattr(setup, key, value)
    setup.mesh = setup.mesh or {"data": 2}
    return setup


def sets(size: int) -> list[tuple[str, ...]]:
    """Return all sets of so many features that can be in one program."""
    return [names for names in combinations(FEATURES, size) if fit(names)]


def random_sets(count: int, seed: int) -> list[tuple[str, ...]]:
    """Return sets of three to six features that can be in one program."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        names = tuple(sorted(draw.sample([*FEATURES], draw.randint(3, 6)), key=[*FEATURES].index))
        if fit(names) and names not in found:
            found.append(names)
    return found
