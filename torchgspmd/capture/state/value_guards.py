"""Guards on values that a program asks for while it is traced.

    for h, w in torch.tensor([[32, 32], [16, 16]]).tolist():    a constant
    if self.ready:              a buffer: the program is traced again if the outcome changes
    if self.table[0] > 0:       a tensor in an attribute, which is compared as a whole
    x[:, self.mask]             a mask that decides on a shape (value_free.py)
    for t, h, w in grid.tolist():   whole numbers of an argument: a program for each result
    if x.sum() > 0:             other arguments: an error, as one program serves all batches

The values are computed by the operations that have been traced so far.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...compat.fx_nodes import copy_node, reached
from ...compat.operators import draws
from ...compat.private_apis import FakeTensor
from ...rules.custom_ops.loops import ENTRIES
from .source import Source
from .state_inputs import Retrace, State, TensorInput

_MANY = 100  # most operations between a buffer and the value
_LARGE = 1 << 20  # a tensor in an attribute with more elements is not compared
# Most static shapes by one buffer's values; with more values the shape is dynamic.
_SHAPES = 4


class WholeNumbers(NamedTuple):
    """An argument that is no float. leaf: its index among the leaves of a call's arguments."""

    name: str
    leaf: int


@dataclass(eq=False)
class ValueGuard:
    """A function on state tensors and arguments, and its result in the trace."""

    function: Callable[..., Tensor]
    inputs: tuple[TensorInput | WholeNumbers, ...]
    expected: Tensor
    where: str | None
    last: list[Tensor] = field(default_factory=list)  # the inputs' values at the last success

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Return whether the function has the same result. leaves: of the call's arguments."""
        if not all(isinstance(each, WholeNumbers) or each.holds() for each in self.inputs):
            return False
        with torch.no_grad():
            values = [
                _local_values(leaves[x.leaf] if isinstance(x, WholeNumbers) else x.tensor())
                for x in self.inputs
            ]
            now = [value for value in values if value is not None]
            if len(now) < len(values):
                return False
            # Equal inputs have an equal result, so the function need not run.
            if len(self.last) != len(now) or not all(map(torch.equal, now, self.last)):
                if not torch.equal(self.function(*now), self.expected):
                    return False
                self.last = [tensor.clone() for tensor in now]
        return True

    @property
    def name(self) -> str:
        """Return words for the argument that it reads, or for a buffer."""
        names = (f"argument '{x.name}'" for x in self.inputs if isinstance(x, WholeNumbers))
        return next(names, "a buffer")

    def described(self) -> str:
        """Return the result as text: its numbers, or a checksum of many numbers."""
        return str(
            self.expected.tolist()
            if self.expected.numel() < 10
            else zlib.crc32(self.expected.contiguous().cpu().numpy().tobytes())
        )


class ValueGuards:
    """The values that one trace may ask for, and the guards on them."""

    source_of: Callable[[Tensor], Source | None]  # for a tensor that is no input

    def __init__(
        self,
        inputs: dict[int, TensorInput],
        arguments: dict[int, WholeNumbers],
        leaves: Sequence[Any],
        state: State,
    ) -> None:
        """Set the inputs whose values a trace may read.

        inputs, arguments: these, by their index among all inputs. state: says whether a trace may
        read numbers from buffers and arguments. If not, it reads constants only: numbers may stay
        symbolic.
        """
        self.inputs, self.state = {**inputs, **arguments}, state
        # before stand-ins take their place
        self.tensors = {i: each.tensor() for i, each in inputs.items()}
        self.tensors |= {i: leaves[each.leaf] for i, each in arguments.items()}
        self.looks: dict[Any, ValueGuard] = {}  # by node, or by source
        # why a trace that reads numbers from buffers would know more
        self.symbolic: list[str] = []
        self.asked: list[Retrace] = []  # the same for numbers from arguments

    def record(self, source: Source, where: str | None) -> bool:
        """Guard on a tensor that is no input; return whether it can be compared."""
        compared = TensorInput(source)
        if is_compared := compared.holds() and compared.tensor().numel() <= _LARGE:
            value = _evaluate(_itself, [compared.tensor()])
            self.looks[source] = ValueGuard(_itself, (compared,), value, where)
        return is_compared

    def ask(
        self, node: fx.Node, owner: nn.Module, where: str | None, is_shape: bool = False
    ) -> Tensor | None:
        """Return a node's value if it is known, else None.

        is_shape: the value decides on a shape.
        """
        inputs = _placeholders_of(node)
        if inputs is None:
            return None
        order = {
            placeholder: i for i, placeholder in enumerate(node.graph.find_nodes(op="placeholder"))
        }
        indices = [order[placeholder] for placeholder in inputs]
        if any(i not in self.inputs or _local_values(self.tensors[i]) is None for i in indices):
            return None
        if inputs and not is_shape and self.state.may_compile:
            # Code for compilers may not ask: no guard, and one program for all values.
            raise Retrace(f"the program asks for a value at {where}", self.state.be_compiled)
        read = [self.inputs[i] for i in indices]
        names = {each.name for each in read if isinstance(each, WholeNumbers)}
        is_test = node.meta["val"].dtype is torch.bool and not is_shape
        state = self.state
        if names - state.asked - (state.tested if is_test else set()):
            # A shape alone may stay dynamic: a mask would give each batch a program. It stays so
            # if the program has only tested the mask.
            if not is_shape:
                why = f"the program asks for a value of '{min(names)}' at {where}"
                learn = partial((state.tested if is_test else state.asked).update, names)
                self.asked.append(Retrace(why, learn))
            return None
        if inputs and not names and not (self.state.is_looking or is_shape):
            self.symbolic.append(f"the program asks for a value of a buffer at {where}")
            # A truth value is for a branch: no operation takes it.
            if node.meta["val"].dtype is torch.bool:
                raise Retrace(self.symbolic[-1], self.state.look)
            return None
        if node not in self.looks:
            function = _extract_function(node, inputs, owner)
            # Constants that the function reads may be state, too.
            for tensor in function.buffers():
                if (source := self.source_of(tensor)) is not None:
                    self.record(source, where)
            # Past __call__, around which hooks of all modules would run.
            run = function.forward
            values = _evaluate(run, [self.tensors[i] for i in indices])
            if not inputs:
                return values
            look = ValueGuard(run, tuple(read), values, where)
            if (
                is_shape
                and not names
                and (shape := (where, look.described())) not in self.state.shapes
            ):
                if sum(line == where for line, _ in self.state.shapes) == _SHAPES:
                    return None
                self.state.shapes.add(shape)
            self.looks[node] = look
        return self.looks[node].expected


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _placeholders_of(node: fx.Node) -> list[fx.Node] | None:
    """Return the placeholders that a node depends on.

    Return None if random numbers, a loop's iterations or very many operations come between.
    """
    seen = list[fx.Node]()
    for each in reached([node]):
        sizes = getattr(each.meta.get("val"), "shape", ())
        has_symbols = each.op == "placeholder" and any(type(n) is not int for n in sizes)
        if draws(each.target) or each.target in ENTRIES or has_symbols:
            return None
        seen.append(each)
    placeholders = [n for n in seen if n.op == "placeholder"]
    return None if placeholders and len(seen) > _MANY else placeholders


def _extract_function(node: fx.Node, inputs: list[fx.Node], owner: nn.Module) -> fx.GraphModule:
    """Return the function that computes a node from these placeholders."""
    needed, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - needed
        needed |= new
        stack += new
    graph, copies = fx.Graph(), {}
    for placeholder in inputs:
        copies[placeholder] = graph.placeholder(placeholder.name)
    for each in node.graph.nodes:
        if each in needed and each not in copies:
            copies[each] = copy_node(graph, each, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule(
        {n.target: getattr(owner, n.target) for n in needed if n.op == "get_attr"}, graph
    )


def _evaluate(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*map(_local_values, tensors)).clone()


def _local_values(tensor: Any) -> Tensor | None:
    """Return a tensor's values; None if this process does not have them all."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if hasattr(tensor, "placements"):
        return tensor.to_local() if all(p.is_replicate() for p in tensor.placements) else None
    return tensor.cpu() if tensor.device.type == "xla" else tensor
