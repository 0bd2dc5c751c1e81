"""The table KINDS: collectives, and the other steps between layouts.

All knowledge about a kind lies in its file. Features add rows (`add_kinds`). With B payload bytes
and n devices in a group, bandwidth-optimal algorithms send per device

    all_reduce      2 (n-1)/n B         payload: the reduced tensor
    all_gather        (n-1)/n B         payload: the gathered tensor, padding included
    reduce_scatter    (n-1)/n B         payload: the tensor before it is scattered
    all_to_all        (n-1)/n B         payload: the tensor of one device
    permute                 B           payload: what the busiest device sends or receives
    halo, halos             B           payload: what the busiest device sends

docs/adding_a_collective.md adds a kind.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ...compat.private_apis import OpOverload
from .all_gather import all_gather
from .all_reduce import all_reduce
from .all_to_all import all_to_all
from .halo import halo, halos
from .kind import CollectiveKind as CollectiveKind
from .kind import FusedKind as FusedKind
from .kind import Kind as Kind
from .kind import LocalStepKind as LocalStepKind
from .kind import Step as Step
from .kind import StepKind as StepKind
from .kind import WireOp as WireOp
from .kind import no_moves
from .local_steps import shard, term, window
from .permute import permute
from .reduce_scatter import reduce_scatter
from .ring_einsum import einsum_scatter, gather_einsum

# By name, in the order in which a step search tries them.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        shard,
        all_gather,
        all_to_all,
        all_reduce,
        reduce_scatter,
        permute,
        halo,
        halos,
        term,
        window,
        gather_einsum,
        einsum_scatter,
    )
}
SEARCHED: list[StepKind] = []  # The step kinds that a search may take.
WIRE_OPS: dict[OpOverload, WireOp] = {}  # The operations that a lowered program communicates by.


def collective_kinds() -> dict[str, CollectiveKind]:
    """Return the step kinds that communicate, by name."""
    return {name: kind for name, kind in KINDS.items() if isinstance(kind, CollectiveKind)}


def _index() -> None:
    """Fill the lists that follow from the table."""
    kinds = [kind for kind in KINDS.values() if isinstance(kind, StepKind)]
    # In place: other modules have imported the lists.
    SEARCHED[:] = [kind for kind in kinds if kind.moves is not no_moves]
    WIRE_OPS.clear()
    WIRE_OPS.update({w.op: w for kind in collective_kinds().values() for w in kind.wire})


def add_kinds(*kinds: Kind) -> None:
    """Add rows to the table, behind those that it has."""
    for kind in kinds:
        if kind.name in KINDS:
            raise ValueError(f"there is a kind '{kind.name}' already")
        KINDS[kind.name] = kind
    _index()


@contextmanager
def _restored() -> Generator[None]:
    """Restore the table when the block ends."""
    before = dict(KINDS)
    try:
        yield
    finally:
        KINDS.clear()
        KINDS.update(before)
        _index()


@contextmanager
def registered(kind: StepKind) -> Generator[None]:
    """Have a further kind in the table, for plans and runs in the block."""
    with _restored():
        add_kinds(kind)
        yield


@contextmanager
def without_kinds(feature: str) -> Generator[None]:
    """Take a feature's rows out of the table while in this context."""
    with _restored():
        for name in [name for name, kind in KINDS.items() if kind.feature == feature]:
            del KINDS[name]
        _index()
        yield


_index()
