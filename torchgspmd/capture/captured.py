"""What a capture gives: a graph, and how values go in and out of it."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..shard_spec import ShardSpec
from .objects import closed
from .reads import Reads

PARAMETER, BUFFER, ARGUMENT, TANGENT = "parameter", "buffer", "argument", "tangent"
OUTPUT, MUTATION, GRADIENT = "output", "mutation", "gradient"


@dataclass(frozen=True)
class Input:
    """A placeholder of the captured graph."""
    kind: str                           # parameter, buffer, argument or tangent
    name: str                           # qualified name of a parameter or buffer, path of an argument
    shape: tuple[int, ...]
    dtype: torch.dtype
    mark: ShardSpec | None = None       # what mark_sharding recorded on it
    source: str | None = None           # where
    output: int = -1                    # of a tangent: the output it belongs to


@dataclass(frozen=True)
class Output:
    """A result of the captured graph."""
    kind: str                           # output, mutation (new value of an input) or gradient (of an input)
    input: int = -1                     # which input is mutated or differentiated


@dataclass
class Captured:
    """The graph with its calling convention. Node metadata: val (fake tensor), source (file:line), backward (bool)."""
    graph: fx.Graph
    constants: nn.Module                # owns the tensors that get_attr nodes name
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arguments: pytree.TreeSpec          # of (args, kwargs)
    leaves: tuple[Any, ...]             # flat (args, kwargs); None where a tensor goes
    results: pytree.TreeSpec            # of the function's result
    result_leaves: tuple[Any, ...]      # its flat leaves; None where a tensor goes
    result_slots: tuple[int, ...]       # which leaves are tensors
    has_backward: bool = False
    opened: bool = False                # whether the result has objects that hold tensors
    tensors: list[Tensor] = field(default_factory=list)    # the module's own parameters and buffers, in input order
    reads: Reads = field(default_factory=Reads)             # of a module's attributes that became part of it

    def result(self, leaves: list) -> Any:
        """The function's result, of these leaves."""
        tree = pytree.tree_unflatten(leaves, self.results)
        return closed(tree) if self.opened else tree
