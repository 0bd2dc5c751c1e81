"""Counters of the work that the searches of partition do: equal on every machine, unlike seconds.

A search memory carries one Counter. `partition` adds its growth to the program's counts, and a plan
has them as `Plan.counts`. A search adds to a key of its own:

    reshard_searches   different problems of two layouts that were searched
    reshard_states     layouts that these searches expanded
    reshard_permutes   permutes whose bytes these searches evaluated
    reshard_limited    searches that ended at `max_layouts`, with the best steps up to there
"""

from __future__ import annotations

from collections import Counter

SearchCounts = Counter[str]
RESHARD_SEARCHES, RESHARD_STATES = "reshard_searches", "reshard_states"
RESHARD_PERMUTES, RESHARD_LIMITED = "reshard_permutes", "reshard_limited"
ALWAYS = (RESHARD_SEARCHES, RESHARD_STATES, RESHARD_PERMUTES)  # Keys of every plan.


def no_counts() -> SearchCounts:
    """Return counts of 0 under the keys that every plan has."""
    return Counter(dict.fromkeys(ALWAYS, 0))
