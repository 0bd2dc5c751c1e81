"""Bytes that are alive while one device's program runs.

A value lives from its operation to the last use of it or of its views, which have no memory of
their own; inputs and outputs live to the end. A collective's result lives from its `start` on, its
operand until its first wait. While a loop runs, its results are alive, and one iteration's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...capture import PARAMETER
from ...comm.collective import start, wait
from ...compat.private_apis import OpOverload
from ...errors import ShardingError
from ...rules.custom_ops.nd import WORKSPACE
from ..localize.sizes_in_a_run import shard_inputs
from ..loop_call import BodyCall, LoopCall
from ..program import Program
from ..units import size_text

STATES = 2 * torch.float32.itemsize  # bytes of an optimizer for an element of a parameter


def budget_of(program: Program) -> int:
    """Return the bytes that the peak of a program of one device may have."""
    request = program.request
    if request.memory_budget is not None:
        return request.memory_budget
    memory = program.hardware.memory
    if request.hardware is None and request.device == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    parameters = (
        math.prod(node.meta["shape"])
        for node, inp in zip(shard_inputs(program.graph, program.mesh), program.captured.inputs)
        if inp.kind == PARAMETER
    )
    return int(memory) - STATES * sum(parameters)


def check_budget(program: Program) -> None:
    """Raise ShardingError if a program, as it is scheduled, needs more than its budget."""
    least, budget = peak(program.graph), budget_of(program)
    if least <= budget:
        return
    inputs = shard_inputs(program.graph, program.mesh)
    from_outside = sum(map(bytes_of, inputs))
    raise ShardingError.here(
        f"a device needs {size_text(least)}, more than the memory budget of {size_text(budget)}",
        why=f"no choice of recomputed values needs less; of it parameters and arguments are "
        f"{size_text(from_outside)}",
        fix=f"set a budget of {least}, or divide more: docs/out_of_memory.md",
    )


class Strided(NamedTuple):
    """A tensor without its elements. strides: None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        return cls(tuple(x.shape), x.dtype, None if x.is_contiguous() else x.stride())

    def meta(self) -> Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return empty if self.strides is None else empty.as_strided(self.shape, self.strides)


class Aliasing:
    """The memory that values use, asked for in an order in which operands come first.

        %q = getitem(%unbind, 0);  %t = transpose(%q, 1, 2)     # the memory of %unbind's operand
        %r = reshape(%t, [b, s, d])                             # its own: the rows of %t are apart

    Views are computed on the meta device, from operands with their own strides, so that PyTorch
    tells which results are views. All else is taken to be allocated, and contiguous.
    """

    def __init__(self) -> None:
        self._owners: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, Strided | tuple[Strided, ...]] = {}

    def owner(self, node: fx.Node) -> fx.Node:
        """Return the value whose memory a node's result is in: the node, if it allocates any."""
        if node not in self._owners:
            self._owners[node] = self._owner(node)
        return self._owners[node]

    def workspace(self, node: fx.Node) -> int:
        """Return the bytes that an operation allocates besides its results."""
        if (count := WORKSPACE.get(node.target)) is None or not _has_known_sizes(node):
            return node.meta.get("bytes", 0)
        return _bytes(count, *self._arguments(node))

    def _owner(self, node: fx.Node) -> fx.Node:
        if node.target is getitem:
            if (parts := self._views.get(node.args[0])) is None:
                return node
            self._views[node] = parts[node.args[1]]
            return self.owner(node.args[0])
        if not _may_be_view(node):
            return node
        is_view, self._views[node] = _view(node.target, *self._arguments(node))
        return self.owner(node.args[0]) if is_view else node

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """Return a node's arguments, a Strided in place of each tensor."""
        args, kwargs = fx.map_arg((node.args, tuple(node.kwargs.items())), self._value)
        return args, kwargs

    def _value(self, node: fx.Node) -> Any:
        return self._views.get(node) or Strided(tuple(node.meta["shape"]), node.meta["dtype"])


def _has_known_sizes(node: fx.Node) -> bool:
    """Return True if operands and result are tensors whose sizes do not depend on values."""
    values = (node, *node.all_input_nodes)
    return not any(x.meta.get("unknown") for x in values) and all(
        x.meta.get("dtype") is not None and "shape" in x.meta for x in node.all_input_nodes
    )


def _may_be_view(node: fx.Node) -> bool:
    """Return True for an operation whose result may share memory with its first operand."""
    if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
        return False
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and _has_known_sizes(node)


@lru_cache(maxsize=4096)  # like layers have equal ones
def _view(op: Any, args: Any, kwargs: Any) -> tuple[bool, Strided | tuple[Strided, ...]]:
    """Return whether a result views the first operand, and the result."""
    args, kwargs = _on_meta((args, kwargs))
    result = op(*args, **dict(kwargs))
    several = isinstance(result, Sequence)
    is_view = _memory(result[0] if several else result) == _memory(args[0])
    return is_view, tuple(map(Strided.of, result)) if several else Strided.of(result)


@lru_cache(maxsize=4096)
def _bytes(count: Callable[..., int], args: Any, kwargs: Any) -> int:
    args, kwargs = _on_meta((args, kwargs))
    return count(*args, **dict(kwargs))


def _on_meta(arguments: object) -> Any:
    if isinstance(arguments, Strided):
        return arguments.meta()
    return tuple(map(_on_meta, arguments)) if isinstance(arguments, tuple) else arguments


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of(node: fx.Node) -> int:
    """Return a value's bytes; 0 if it is not one tensor, or lies in the host's memory."""
    if node.meta.get("host"):
        return 0
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


def inputs_bytes(graph: fx.Graph) -> int:
    return sum(map(bytes_of, graph.find_nodes(op="placeholder")))


def peak(graph: fx.Graph) -> int:
    """Return the most bytes that are alive at once."""
    ledger = Ledger(graph)
    for node in graph.nodes:
        ledger.emit(node)
    return ledger.peak


def iteration_bytes(call: BodyCall) -> int:
    """Return the most bytes that a loop iteration allocates, with the carry that it gets."""
    if not isinstance(call, LoopCall):
        return call.iteration_bytes(_own_bytes)
    inputs = call.body_inputs
    return _own_bytes(call.graph) + sum(map(bytes_of, (*inputs.carries, *inputs.held)))


def _own_bytes(body: fx.Graph) -> int:
    """Return the most bytes that a body has in a run besides its inputs."""
    return peak(body) - inputs_bytes(body)


class Ledger:
    """Bytes alive as a program's nodes are emitted, in any legal order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.aliasing = Aliasing()
        self.uses: dict[fx.Node, int] = {}  # of a value, and of its views
        self.iterations: dict[fx.Node, int] = {}  # bytes of a loop's iteration
        for node in graph.nodes:
            self.uses[node] = len(node.users)
            if isinstance(node.target, BodyCall):
                self.iterations[node] = iteration_bytes(node.target)
        self.alive = self.peak = inputs_bytes(graph)
        self.sent: set[fx.Node] = set()  # Starts that have been waited for.

    def needed(self, node: fx.Node) -> int:
        """Return the bytes that a node allocates."""
        if node.op != "call_function" or node.target is wait:
            return 0
        if isinstance(node.target, BodyCall):  # all of its results
            return sum(map(bytes_of, node.users))
        # The call itself counts all of its results.
        if node.target is getitem and isinstance(node.args[0].target, BodyCall):
            return 0
        if node.target is start:
            return node.meta["bytes"]
        return bytes_of(node) if self.aliasing.owner(node) is node else 0

    def workspace(self, node: fx.Node) -> int:
        """Return the bytes that a node allocates, besides its results, while it runs."""
        return 0 if node.target is start else self.aliasing.workspace(node)

    def emit(self, node: fx.Node) -> int:
        """Emit the next node, and return the bytes that are alive while it runs."""
        self.alive += self.needed(node)
        during = self.alive + self.workspace(node)
        if node in self.iterations:  # the last carries are values of its last iteration
            carries = node.target.carries if isinstance(node.target, LoopCall) else 0
            last = (u for u in node.users if u.args[1] < carries)
            during += self.iterations[node] - sum(map(bytes_of, last))
        self.peak = max(self.peak, during)
        # A message reads its operands until it is waited for, so they are alive until then.
        if node.target is wait and (begun := node.args[0]) not in self.sent:
            self.sent.add(begun)
            self._release_operands(begun)
        # A view keeps the memory of its owner alive.
        if (owner := self.aliasing.owner(node)) is not node:
            self.uses[owner] += len(node.users)
        if node.target is not start:
            self._release_operands(node)
        if not node.users and owner is node:
            self._release(node)
        return during

    def _release_operands(self, node: fx.Node) -> None:
        """Count a use for each operand, and free those that have no further use."""
        for value in node.all_input_nodes:
            owner = self.aliasing.owner(value)
            self.uses[owner] -= 1
            self._release(owner)

    def _release(self, value: fx.Node) -> None:
        """Free a value without further uses."""
        if not self.uses[value] and value.op == "call_function" and value.target is not start:
            self.alive -= bytes_of(value)
