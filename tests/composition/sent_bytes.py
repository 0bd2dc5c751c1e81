"""What a device sends: the golden table of all features and pairs, and what a pair may send.

sent_bytes.json has a row for each. `python -m composition --sent` adds those that it lacks,
`--sent all` computes all of them again.
"""

from __future__ import annotations

import json
from pathlib import Path

from .features import sets
from .judge import bytes_sent

TABLE = Path(__file__).with_name("sent_bytes.json")
# Refused pairs have no row.
SENT: dict[str, float | None] = json.loads(TABLE.read_text()) if TABLE.exists() else {}


def every() -> list[str]:
    """Return the sets that have a row."""
    return ["+".join(names) for size in (1, 2) for names in sets(size)]


def complete(again: bool) -> None:
    """Write the rows that the table lacks, or all."""
    for name in every():
        if again or name not in SENT:
            SENT[name] = bytes_sent(tuple(name.split("+")))
            write()


def write() -> None:
    """Write the table, without rows of sets that are no longer."""
    rows = {name: SENT[name] for name in every() if name in SENT}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(n)}" for name, n in rows.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")


# A pair sends at most the sum of what its features send alone, and this for sums of what a feature
# adds to the program: the norm of clipping, means of a batch, gradients of adapters, losses of
# microbatches, on up to four devices.
ADDED = 816
# Features beside which another one sends more than alone: times, and why.
MORE = {
    "uneven": (1.6, "other sizes, and padding"),
    **dict.fromkeys(
        ("circular2", "interleaved", "vee", "whole_vee"), (1.55, "four layers, not two")
    ),
    **dict.fromkeys(("recompute", "selective", "checkpoint"), (1.4, "the forward sends again")),
    **dict.fromkeys(
        ("dropless", "shared", "alternate"),
        (1.6, "rows are sorted over all tokens: gathered along other axes, in each microbatch"),
    ),
    **dict.fromkeys(("any_batch", "any_length"), (250.0, "sizes that stand for unknown ones")),
}
# Pairs for which the search settles on layouts that send more: limits of the search; layers of a
# stack have one layout, where of two layers the second leaves the axis of the image.
SETTLED = {"zero1+capacity": 1.13, "sequence+stack": 1.11, "sequence+circular": 1.02}
SETTLED |= {"sequence+gpipe_outside": 1.02, "stack+spatial": 1.82, "dropless+priorities": 1.84}


def allowed(name: str) -> float:
    """Return the most bytes that a pair may send."""
    pair = name.split("+")
    times = max([1.0, SETTLED.get(name, 1.0), *(MORE[f][0] for f in pair if f in MORE)])
    return times * sum(SENT[feature] or 0 for feature in pair) + ADDED
