"""The passes. Each is one function; pipeline.py has their order."""

from .expand.decompose_ops import decompose_ops
from .ir import Rules
from .localize.localize_graph import localize_graph
from .partition.insert_collectives import regather_weights
from .partition.partition_graph import partition_graph
from .propagate.layouts import Layouts
from .propagate.propagate_layouts import propagate_layouts

__all__ = [
    "Layouts",
    "Rules",
    "decompose_ops",
    "localize_graph",
    "partition_graph",
    "propagate_layouts",
    "regather_weights",
]
