"""Like blocks of a model as one module, whose weights are stacked."""

from .pipeline import pipeline
from .stack import stack

__all__ = ["pipeline", "stack"]
