"""Counters of search effort in `partition`: equal on every machine, unlike seconds.

A search memory carries one Counter. `partition` adds its growth to the program's counts, and a plan
has them as `Plan.counts`. A search adds to a key of its own:

    reshard_searches   different reshards that were searched
    reshard_states     layouts that these searches expanded
    reshard_permutes   permutes whose bytes these searches evaluated
    reshard_limited    searches that ended at `max_layouts`, with the best steps up to there
    op_candidates      strategies judged for one operation; chain_candidates, sum_candidates,
                       early_sum_candidates and message_candidates those that these moves judge
    body_layouts       layouts tried for whole bodies; thread_layouts, input_layouts for threads
                       and for open inputs with all that follows
    solver_sweeps      visits to all operations

A plan has `propagate`'s largest run: propagation_sweeps over all operations, propagation_steps
computed through one operation, and propagation_updates of layouts. `suggest` counts plans, too.
"""

from __future__ import annotations

from collections import Counter

SearchCounts = Counter[str]
RESHARD_SEARCHES, RESHARD_STATES = "reshard_searches", "reshard_states"
RESHARD_PERMUTES, RESHARD_LIMITED = "reshard_permutes", "reshard_limited"
ALWAYS = (RESHARD_SEARCHES, RESHARD_STATES, RESHARD_PERMUTES)  # Keys of every plan.


def no_counts() -> SearchCounts:
    """Return zero counts under the keys that every plan has."""
    return Counter(dict.fromkeys(ALWAYS, 0))
