"""The passes, in order. Each takes a graph apart from the next: one file, one function."""

from .expand.decompose_ops import expand
from .ir import Rules
from .localize.localize import localize
from .partition.partition import partition
from .partition.regather_weights import regather
from .propagate.propagate import Layouts, propagate

PASSES = (expand, propagate, partition, regather, localize)

__all__ = ["PASSES", "Layouts", "Rules", "expand", "localize", "partition", "propagate", "regather"]
