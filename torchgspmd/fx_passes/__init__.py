"""The passes, in order. Each takes a graph apart from the next: one file, one function."""
from .expand import expand
from .graph import Rules
from .localize import localize
from .partition import partition
from .propagate import Layouts, propagate
from .regather import regather

PASSES = (expand, propagate, partition, regather, localize)

__all__ = ["PASSES", "Layouts", "Rules", "expand", "localize", "partition", "propagate", "regather"]
