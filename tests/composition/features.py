"""The features, a row each: name, axes of the mesh, and the fields of Setup that it sets.

Tables of two features are joined, and so are the axes that both give one name. Features that set
one field to different values cannot be together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from torchgspmd.comm.hardware import Hardware

from .program import UNEVEN, Setup


@dataclass(frozen=True)
class Feature:
    name: str
    axes: tuple[str, ...] = ()
    layout: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


TENSOR = {"heads": "model", "hidden": "model", "words": "model"}
EXPERT = {"batch": "expert", "expert": "expert"}
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_H100 = Hardware.of("h100")
NODES = replace(_H100, links=(replace(_H100.links[0], devices=2), _H100.links[1]))
ALONG = {"length": "seq", "stream": "seq"}


def _row(name: str, axes: str = "", layout: dict[str, str] | None = None, **changes: Any):
    return Feature(name, tuple(axes.split()), layout or {}, changes)


STAGES = "circular circular2 gpipe gpipe_outside 1f1b interleaved zero_bubble vee".split()
STAGES += ["whole_model", "whole_vee"]


def _stages(name: str, **pipeline: Any) -> Feature:
    layers = 2 * pipeline.get("repeats", 1)
    return _row(
        name, "stage", {"stage": "stage"}, blocks="pipeline", pipeline=pipeline, layers=layers
    )


ROWS = (
    _row("data", "data", {"batch": "data"}),
    _row("tensor", "model", TENSOR),
    _row("sequence", "model", {**TENSOR, "stream": "model"}),
    _row("zero3", "data", {"batch": "data", "embed": "data"}),
    _row("zero1", "data", {"batch": "data", "states": "data"}, step=True),
    _row("context", "seq", ALONG),
    _row("ring", "seq", ALONG, keys=1, options={"advanced": {"regather": "all"}}),
    _row("dropless", "expert", EXPERT, feed_forward="dropless"),
    _row("capacity", "expert", EXPERT, feed_forward="capacity"),
    _stages("circular"),
    _stages("circular2", repeats=2),
    _stages("gpipe", schedule="gpipe"),
    _stages("gpipe_outside", schedule="gpipe", ends=False),
    _stages("1f1b", schedule="1f1b"),
    _stages("interleaved", schedule="1f1b", repeats=2),
    _stages("zero_bubble", schedule="zero_bubble"),
    _stages("vee", schedule="zero_bubble", repeats=2),
    _stages("whole_model", schedule="1f1b", by_model=True),
    _stages("whole_vee", schedule="zero_bubble", repeats=2, by_model=True),
    _row("manual", "model", by_hand=True),
    _row("hardware", options={"hardware": "tpu_v4"}),  # without a rate of float64
    _row("stack", blocks="stack"),
    _row("recompute", recompute=True),
    _row("checkpoint", inner_checkpoint=True),
    _row("selective", selective=True),
    _row("accumulate", accumulate=2),
    _row("microbatches", options={"microbatches": 2}),
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
    _row("batch_norm", normed=True),
    _row("nodes", "hosts data", {"batch": "hosts+data"}, options={"hardware": NODES}),
    _row("param", options={"param_dtype": torch.float32}, rounding=torch.float32),
    _row("half", options=HALF, rounding=torch.bfloat16),
    _row("names", by_name=True),
    _row("priorities", "data", {"batch": "data", "embed": "data:p1"}),
    _row("custom", custom=True),
    _row("spatial", "space", {"rows": "space"}, stem=True),
    _row("shared", "expert", EXPERT, feed_forward="dropless", shared=True),
    _row("alternate", "expert", EXPERT, feed_forward="dropless", alternate=True),
    _row("evaluate", evaluate=True),
    _row("decode", decode=True),
)
FEATURES = {row.name: row for row in ROWS}
# What one field cannot say: a number of heads that two do not divide has no groups of two, layers
# of experts have no dense layer to write by hand, torch's scan forbids writes in its body,
# statistics of parts are not the batch's, a model whose layers are stages is called once,
# a mask of blocks is one of a length, specs in a manual region are axes, a convolution along tokens
# has no cache, a slope is as exact as the loss that it is taken of, BatchNorm takes no statistics
# of float64 with rows of float32, and blocks that differ are no stack.
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
        ("accumulate", "batch_norm"),
        ("microbatches", "tracked"),
        ("microbatches", "batch_norm"),
        ("accumulate", "whole_model"),
        ("accumulate", "whole_vee"),
        ("param", "batch_norm"),
        ("half", "batch_norm"),
        ("names", "manual"),
        ("decode", "spatial"),
        *(
            (half, drawn)
            for half in ("param", "half")
            for drawn in ("dropout", "attention_dropout")
        ),
        *(("alternate", name) for name in ("stack", *STAGES)),
    )
}
# What a ShardingError refuses: groups of features, of which one of each do not go together, and
# words of the message. docs/limits.md has a row for each.
LIMITS: tuple[tuple[tuple[list[str], ...], str], ...] = (
    ((["whole_model", "whole_vee"], ["tracked", "batch_norm"]), "is used outside of it"),
)
MERGED = ("options", "dynamic")  # Fields whose tables two rows fill together.
JOINED = ("frozen", "rounding")  # of the rounding the coarsest counts


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
        or any(differ(key, a.changes[key], b.changes[key]) for key in {*a.changes} & {*b.changes})
        for a, b in combinations(rows, 2)
    )


def differ(key: str, a: Any, b: Any) -> bool:
    """Return whether two rows set one field to values that cannot be together."""
    if key in JOINED:
        return False
    if key in MERGED:
        return any(a[name] != b[name] for name in {*a} & {*b})
    return a != b


def limits_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return words of the messages that may refuse a set."""
    chosen = {*names}
    return tuple(text for groups, text in LIMITS if all(chosen & {*group} for group in groups))


def setup_of(names: tuple[str, ...]) -> Setup:
    """Return the setup of a set of features."""
    setup = Setup()
    for name in names:
        row = FEATURES[name]
        setup.mesh |= dict.fromkeys(row.axes, 2)
        for dim, axes in row.layout.items():
            setup.layout[dim] = _joined(setup.layout.get(dim, ""), axes)
        for key, value in row.changes.items():
            if key == "frozen":
                value = (*setup.frozen, *value)
            elif key == "rounding":
                value = max(value, setup.rounding, key=lambda dtype: torch.finfo(dtype).eps)
            elif key in MERGED:
                value = {**getattr(setup, key), **value}
            setattr(setup, key, value)
    setup.mesh = setup.mesh or {"data": 2}
    return setup


def _joined(present: str, more: str) -> str:
    """Return the axes of both, with the priority that one of them has."""
    axes = {axis.partition(":")[0]: axis for axis in filter(None, present.split("+"))}
    for axis in more.split("+"):
        name, priority, _ = axis.partition(":")
        axes[name] = axis if priority else axes.get(name, axis)
    return "+".join(axes.values())


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
