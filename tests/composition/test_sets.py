"""Sets of features are right together: those that once were not, and a part of all pairs.

TORCHGSPMD_SETS=pairs runs all pairs, TORCHGSPMD_SETS=random:300:SEED so many sets of three to six.
"""

import os

import pytest

from composition.features import LIMITS, limits_of, parse, random_sets, sets
from composition.judge import REFUSED, RIGHT, judge
from composition.sent_bytes import SENT

ONCE = (  # sets that failed before
    "sequence+hardware",
    "ring+stack",
    "ring+accumulate",
    "stack+reduce",
    "accumulate+reduce",
    "circular+reduce",
    "stack+checkpoint",
    "circular+checkpoint",
    "1f1b+checkpoint",
    "zero_bubble+checkpoint",
    "stack+selective",
    "accumulate+circular",
    "1f1b+accumulate",
    "zero_bubble+accumulate",
    "zero1+vee",
    "circular+any_length",
    "circular+any_batch",
    "any_length+dropout",
    "recompute+attention_dropout",
    "capacity+1f1b+uneven",
    "dropless+zero_bubble",
    "vee+any_batch",
    "1f1b+dropout+any_length",
    "1f1b+accumulate+any_batch",
    "ring+capacity+flex",
    "context+recompute+gqa",
    "sequence+vee+attention_dropout",
    "zero_bubble+any_batch+attention_dropout",
    "context+vee+batch_norm",
    "recompute+step+param",
    "names+circular+decode+evaluate",
    "data+any_batch",
    "zero3+any_batch",
    "zero1+any_batch",
    "dropless+any_batch",
    "capacity+any_batch",
    "sequence+any_length",
    "context+any_length",
    "ring+any_length",
    "data+gpipe+any_batch",
    "dropless+gpipe+any_batch",
    "dropless+circular+any_batch+any_length",
    "capacity+interleaved+dropout+spatial",
    "sequence+zero_bubble+any_batch+attention_dropout",
)
EVERY = 80  # of the pairs one in so many


def chosen() -> list[str]:
    """Return the sets to run."""
    kind, *rest = os.environ.get("TORCHGSPMD_SETS", "once").split(":")
    if kind == "random":
        count, seed = map(int, rest)
        found = random_sets(count, seed)
    else:
        found = sets(2)[:: 1 if kind == "pairs" else EVERY]
    refused = ["+".join(group[0] for group in groups) for groups, _ in LIMITS]
    return list(dict.fromkeys([*ONCE, *refused, *map("+".join, found)]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", chosen())
def test_a_set_of_features(text):
    names = parse(text)
    verdict, limits = judge(names), limits_of(names)
    wanted = REFUSED if limits else RIGHT
    assert verdict.kind == wanted, f"{verdict}\ncd tests && python -m composition {text}"
    assert not limits or any(words in verdict.text for words in limits)
    assert limits or verdict.sent == SENT.get(text, verdict.sent)
