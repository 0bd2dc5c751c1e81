"""Sets of features are right together: those that once were not, and a part of all pairs.

TORCHGSPMD_SETS=pairs runs all pairs, TORCHGSPMD_SETS=random:300:SEED so many sets of three to six.
"""

import os

import pytest

from composition.features import parse, random_sets, sets
from composition.judge import REFUSED, RIGHT, judge

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
    "circular+accumulate",
    "1f1b+accumulate",
    "zero_bubble+accumulate",
    "zero1+vee",
)
# Sets that a ShardingError refuses, each with words of its message; docs/limits.md has the reasons.
LIMITS: dict[str, str] = {}
EVERY = 30  # of the pairs one in so many


def chosen() -> list[str]:
    """Return the sets to run."""
    kind, *rest = os.environ.get("TORCHGSPMD_SETS", "once").split(":")
    if kind == "random":
        count, seed = map(int, rest)
        found = random_sets(count, seed)
    else:
        found = sets(2)[:: 1 if kind == "pairs" else EVERY]
    return list(dict.fromkeys([*ONCE, *LIMITS, *map("+".join, found)]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", chosen())
def test_a_set_of_features(text):
    verdict = judge(parse(text))
    wanted = REFUSED if text in LIMITS else RIGHT
    assert verdict.kind == wanted, f"{verdict}\ncd tests && python -m composition {text}"
    assert LIMITS.get(text, "") in verdict.text
