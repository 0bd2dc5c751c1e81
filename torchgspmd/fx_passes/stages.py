"""The stages of a program, the metadata on its nodes at each, and the verifier.

TORCHGSPMD_CHECK=1 lets the runner (pipeline.py) verify a program after every pass, as the tests do.
With TORCHGSPMD_CHECK=2 each new plan has a certificate, too (docs/certificate.md).
"""

from __future__ import annotations

import enum
import os
from typing import Any, NamedTuple

import torch
from torch import fx

from ..comm.kinds import Step
from ..layout.mesh import Mesh
from ..rules import FactorRule
from ..shard_spec import ShardSpec
from .localize.infer_shapes import verify_memory_order
from .lower.verify_in_flight import verify_in_flight
from .partition.explain_costs import Decisions
from .partition.verify_partition import verify_partition


class Stage(enum.IntEnum):
    """A program's stage. docs/architecture.md prints a program at each stage."""

    CAPTURED = 0  # ATen operations at global shapes, forward and backward in one graph
    EXPANDED = 1  # operations have rules, or cannot be decomposed
    ANNOTATED = 2  # every value has a layout
    PARTITIONED = 3  # every operand has the layout that its operation needs
    LOCAL = 4  # shapes of one device, whose coordinates are inputs
    SCHEDULED = 5  # nothing but `start` communicates, and every result has a `wait`
    LOWERED = 6  # torch.distributed's functional collectives, for one rank
    RUNNABLE = 7  # rewritten for the backend: results may be written over operands


CAPTURED, EXPANDED, ANNOTATED, PARTITIONED, LOCAL, SCHEDULED, LOWERED, RUNNABLE = Stage


class Key(NamedTuple):
    """A key in node.meta: the stages that have it, its value's type, and its meaning."""

    name: str
    first: Stage
    last: Stage
    type: Any
    meaning: str


# Where a size or number is known only when the program runs, val has a number in its place.
_ROWS = (
    Key("val", CAPTURED, PARTITIONED, object, "fake tensor (several: a tuple), or a number"),
    Key("other", CAPTURED, PARTITIONED, object, "val with other numbers in these places, if any"),
    Key(
        "captured",
        CAPTURED,
        RUNNABLE,
        str,
        "node of the captured graph with this value, maybe flattened",
    ),
    Key(
        "computed",
        EXPANDED,
        PARTITIONED,
        torch.dtype,
        "dtype in which an operation has the value, if another than that of val",
    ),
    Key(
        "order",
        EXPANDED,
        RUNNABLE,
        dict,
        "of operands that are not contiguous in the trace, if an operation asks for their order",
    ),
    Key("lies", LOCAL, RUNNABLE, tuple | None, "its order in memory, if known; None: contiguous"),
    Key("source", CAPTURED, RUNNABLE, str | None, "file:line of the user's code"),
    Key("module", CAPTURED, RUNNABLE, str, "path of the module whose forward computes it"),
    Key("backward", CAPTURED, RUNNABLE, bool, "belongs to the backward"),
    Key("dynamic", CAPTURED, RUNNABLE, bool, "has sizes or numbers that only a run knows"),
    Key("draw", CAPTURED, CAPTURED, int, "number of what draws; the same if it is drawn again"),
    Key("loop", CAPTURED, PARTITIONED, str, "loops whose bodies draw it anew in each iteration"),
    Key("runs", CAPTURED, PARTITIONED, int, "how often it runs, if a loop's body has it"),
    Key("value", LOCAL, RUNNABLE, str, "node of the partitioned graph with the same value"),
    Key("spec", ANNOTATED, RUNNABLE, ShardSpec, "layout of the value"),
    Key(
        "parts", EXPANDED, PARTITIONED, tuple, "of an input: a dimension, and how many parts it has"
    ),
    Key("pinned", ANNOTATED, PARTITIONED, tuple, "axes, and the factors that each may shard alone"),
    Key("mark", ANNOTATED, PARTITIONED, ShardSpec, "layout that a mark asks for"),
    Key("rule", PARTITIONED, PARTITIONED, FactorRule, "of the operation"),
    Key("assignment", PARTITIONED, PARTITIONED, dict, "factor of the rule: axes that shard it"),
    Key("operand_specs", PARTITIONED, PARTITIONED, tuple, "layouts that the operation needs"),
    Key("result_specs", PARTITIONED, PARTITIONED, tuple, "layouts of its results"),
    Key("specs", PARTITIONED, PARTITIONED, tuple, "of the output node: layouts of the outputs"),
    Key(
        "decisions", PARTITIONED, PARTITIONED, Decisions, "of the output: what was chosen, and why"
    ),
    Key("step", PARTITIONED, RUNNABLE, Step | None, "step between layouts that the node takes"),
    Key("unknown", LOCAL, RUNNABLE, tuple | None, "another shape, if a run knows some sizes alone"),
    Key("size", LOCAL, RUNNABLE, tuple, "of an input: which size of arguments, and its stand-in"),
    Key("shape", LOCAL, RUNNABLE, tuple | list | None, "shape on one device, padding included"),
    Key("dtype", LOCAL, RUNNABLE, torch.dtype | None, "of a tensor"),
    Key("bytes", LOCAL, RUNNABLE, int, "of all results of a start; of the workspace of a ring"),
    Key(
        "ring",
        PARTITIONED,
        LOCAL,
        str,
        "its keys travel round a ring, in which devices may compute for others",
    ),
    Key("chosen", EXPANDED, PARTITIONED, str, "line of the summary: what was chosen, and why"),
    Key("limit", LOCAL, RUNNABLE, int, "of indices: the rows of the whole table"),
    Key("recomputed", LOCAL, RUNNABLE, str, "value of the forward that the backward has again"),
    Key("host", LOCAL, RUNNABLE, bool, "lies in the memory of the host"),
    Key("collective", LOCAL, RUNNABLE, str, "kind, operand, size, axes: for profiles"),
    Key("product", LOWERED, RUNNABLE, bool, "computes an einsum"),
    Key("again", ANNOTATED, PARTITIONED, bool, "for XLA: repeats a node of the forward"),
)
META = {row.name: row for row in _ROWS}


def verifies(level: int = 1) -> bool:
    """Return whether TORCHGSPMD_CHECK is the level, or above. 1: stages. 2: certificates, too."""
    return os.environ.get("TORCHGSPMD_CHECK") in ("1", "2")[level - 1 :]


def verify(graph: fx.Graph, stage: Stage, mesh: Mesh) -> None:
    """Raise AssertionError, for a bug in a pass, unless a graph is legal at its stage."""
    graph.lint()
    faults = [f for node in graph.nodes for key in node.meta if (f := _fault(node, key, stage))]
    if faults:
        raise AssertionError("metadata that stages.py does not list:\n  " + "\n  ".join(faults))
    if stage == PARTITIONED:
        verify_partition(graph, mesh)
    elif stage == LOCAL:
        verify_memory_order(graph)
    elif stage == LOWERED:
        verify_memory_order(graph)
        verify_in_flight(graph)


def _fault(node: fx.Node, name: str, stage: Stage) -> str | None:
    """Return the fault in a key of a node's metadata at a stage."""
    row = META.get(name)
    if row is None:
        return f"%{node} has meta['{name}'], which has no row"
    if not row.first <= stage <= row.last:
        return f"%{node} has meta['{name}'] at stage {stage.name}"
    if not isinstance(node.meta[name], row.type):
        return f"meta['{name}'] of %{node} is a {type(node.meta[name]).__name__}"
    return None


def drop_later_keys(graph: fx.Graph, stage: Stage) -> None:
    """Remove later stages' metadata from a graph that goes back to a stage."""
    later = [row.name for row in _ROWS if row.first > stage]
    for node in graph.nodes:
        for name in later:
            node.meta.pop(name, None)
