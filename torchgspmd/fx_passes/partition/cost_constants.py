"""Every constant in the cost model and the searches, with its unit, source and reason.

Costs are in bytes on the wire: bytes that a device sends, and work that is worth as much. Constants
are chosen by us unless a source is named: they order layouts, and predict no time.
`advanced={"costs": {"memory_per_byte": 64}}` overrides some; docs/debugging_a_layout.md has the
table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ...errors import ShardingError, did_you_mean

SearchCounts = Counter[str]
RESHARD_SEARCHES, RESHARD_STATES = "reshard_searches", "reshard_states"
RESHARD_PERMUTES, RESHARD_LIMITED = "reshard_permutes", "reshard_limited"
ALWAYS = (RESHARD_SEARCHES, RESHARD_STATES, RESHARD_PERMUTES)  # Keys of every plan.


def no_counts() -> SearchCounts:
    """Return counters of search effort in `partition`: equal on every machine, unlike seconds.

    A search memory carries one Counter. `partition` adds its growth to the program's counts, and a
    plan has them as `Plan.counts`. A search adds to a key of its own:

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
    return Counter(dict.fromkeys(ALWAYS, 0))


def _constant(value: object, unit: str, reason: str, source: str = "ours") -> Any:
    """Return a field for CostConstants."""
    return field(default=value, metadata={"unit": unit, "reason": reason, "source": source})


@dataclass(frozen=True)
class CostConstants:
    """One plan's constants; equal constants give two plans equal choices."""

    # ---------------------------------------------------------------------- the cost of a strategy
    flops_per_byte: float = _constant(
        10.0,
        "operations per byte sent",
        "few, so that arithmetic is always divided among the devices",
    )
    padding_flops_per_byte: float = _constant(
        500.0,
        "operations per byte sent",
        "many: devices are fast, and padding of uneven shards is no reason for another layout",
        "examples/unet3d, whose volumes do not divide",
    )
    link_flops_per_byte: float = _constant(
        1000.0,
        "operations per byte sent",
        "few, for links as fast as those within one host: a device computes so much while a byte "
        "is sent. So long it may wait for keys that travel, or for devices with more to do",
    )
    memory_per_byte: float = _constant(
        128.0,
        "bytes read or written per byte sent",
        "many: if layouts send equal bytes, the one with smaller shards wins",
    )
    pending_bonus: float = _constant(
        1 / 8,
        "fraction of a sum's bytes on a device",
        "a later addition may share a pending sum's reduction",
    )
    tie_break: float = _constant(
        1e-9,
        "fraction of a sum's bytes on a device",
        "the pending bonus in the last phases: it only decides between equal costs",
    )
    pair_bytes: float = _constant(
        float(2**20),
        "bytes on a device",
        "so many values for pairs of rows are computed in blocks round a ring; with fewer, its "
        "messages take longer than a gather, and there is little memory to win",
        "the loss of SigLIP over 1,024 rows on 8 devices: 0.5 MiB",
    )
    # --------------------------------------------------------------------- the cost of a reshard
    collective_fee: float = _constant(
        8.0, "bytes sent", "between two ways with equal bytes, the one with fewer collectives wins"
    )
    permute_fee: float = _constant(
        12.0,
        "bytes sent",
        "more than the other fees: between equal steps the plain collective wins over a permute",
    )
    local_step_fee: float = _constant(
        0.01, "bytes sent", "between equal ways the one with fewer slices wins; slices send nothing"
    )
    message_price: float = _constant(
        4096.0,
        "bytes sent",
        "a message's cost besides its bytes, after the search by bytes. It is little beside "
        "latency times bandwidth (100 KB for gloo, 2 MB for NVLink), as the bytes are to decide",
        "latencies and bandwidths of torchgspmd/comm/hardware.py",
    )
    message_share: float = _constant(
        1 / 1024,
        "fraction of the bytes sent",
        "a program sends at most so much more for fewer messages",
    )
    # ------------------------------------------------------------------------------- the searches
    min_saving: float = _constant(
        1 / 16,
        "fraction of the bytes sent",
        "a factor path gives up its operations' choices only for a real gain",
    )
    retry_share: float = _constant(
        0.5,
        "fraction of a layout's extra cost",
        "a layout that lost in a region, or in an equal one, is tried again only when the "
        "region's cost differs by so much. The cost of other layouts changes with it",
        "the U-Net of Stable Diffusion 1.5: a quarter of its trials, of which none would have won",
    )
    retry_share_of_large: float = _constant(
        1.0,
        "fraction of a layout's extra cost",
        "the same for a large region. In a small one, a layout wins after half of its extra cost",
        "a loss over a sharded vocabulary (program 218 of tools/compare_plans.py): 12.7 KiB with "
        "it in small regions too, 6.7 KiB with half of it",
    )
    give_up_share: float = _constant(
        1.0,
        "fraction of a region's bytes",
        "a layout that costs so much more in a large region loses, before operations around it "
        "choose again: their choices hardly save as much as the region sends now",
        "the same U-Net with weights on both axes: 239 of 1,115 trials, of which none would have "
        "won. The others that won did so from 0.88 at most",
    )
    give_up_ops: int = _constant(
        64, "operations", "a smaller region is tried to the end and again, which takes little time"
    )
    min_share: float = _constant(
        1 / 8,
        "fraction of a region's operations",
        "a whole elementwise region is tried for a factor only if so many operations have it",
    )
    min_course_share: float = _constant(
        1 / 2,
        "fraction of the operations",
        "an open input's dimension that runs through fewer is not the program's batch",
    )
    pending_depth: int = _constant(
        4,
        "operations",
        "the search for a sum that could stay pending looks at most so many operations ahead",
    )
    max_sweeps: int = _constant(
        6, "sweeps per round", "choices that still change then go in circles"
    )
    max_region_rounds: int = _constant(
        3, "rounds per phase", "regions gain most in the first round, and planning takes time"
    )
    max_different_contractions: int = _constant(
        64,
        "contractions with different shapes",
        "one layer has fewer, forward and backward, also with experts and latent attention. Like "
        "layers share their searches, so their number does not count",
        "Mixtral 8x7B: with all its layers in one path its batch sends a quarter of the bytes",
    )
    min_loop_rounds: int = _constant(
        4, "rounds", "only a loop shares its weights among so many equal contractions"
    )
    max_choices: int = _constant(
        64,
        "strategies per operation",
        "where parts of one axis lie on different dimensions, up to so many combinations are "
        "judged. Above this number, only those in which one axis differs from a neighboring "
        "layout are",
    )
    max_layouts: int = _constant(
        1000,
        "layouts",
        "a search for steps that visits more takes the best steps found so far; the plan and its "
        "report say so",
    )

    def override(self, values: Mapping[str, float] | None) -> CostConstants:
        """Return the constants with other values for some, by name."""
        names = [f.name for f in fields(self)]
        for name, value in (values or {}).items():
            if name not in names:
                raise ShardingError.here(
                    f"costs has no constant '{name}'", fix=did_you_mean(name, names)
                )
            # Costs are divided by these: zero would be an infinite price.
            divides = name.endswith("_per_byte")
            if not (value > 0 if divides else value >= 0):
                raise ShardingError.here(
                    f"costs has {name}={value!r}",
                    fix=f"give a number {'above' if divides else 'not below'} 0",
                )
        return replace(self, **(values or {}))
