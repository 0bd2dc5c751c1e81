"""State that is neither parameter nor buffer: tensors in attributes and tables, and numbers.

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden)     # the source self.hidden
        return self.head(self.hidden)

Such tensors are program arguments, behind the call's own. Every run reads them from their
sources, and writes their new values (writes.py). So are numbers that change from call to call
(symbolic_numbers.py).
"""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import ShardingError, user_line
from ..rewrites.branches import Branches
from ..rewrites.chosen_loops import Missing
from .source import Source

COUNTED = (int, float)  # types that a SymbolicNumber may stand for (symbolic_numbers.py)
LARGE = 2**62  # integers from this size on are no inputs
Function = Callable[[Any], Any]


@dataclass(eq=False)
class TensorInput:
    """A tensor that a program takes from its source in every run."""

    source: Source
    kind: ClassVar[str] = "tensor"

    def __post_init__(self) -> None:
        self.read = self.source.reader()

    @property
    def name(self) -> str:
        return self.source.name

    def holds(self) -> bool:
        """Return whether a tensor is there."""
        return isinstance(self.read(), Tensor)

    def tensor(self) -> Tensor:
        return self.read()


@dataclass(eq=False)
class NumberInput(TensorInput):
    """A number that a program takes as a tensor.

    During a trace it has the number and its stand-in. It collects the program's conditions on the
    number.
    """

    kind: ClassVar[str] = "number"
    value: int | float = 0
    traced: Tensor | None = None
    conditions: list[tuple[Function, Any]] = field(default_factory=list)

    def holds(self) -> bool:
        """Return whether a number that fits into a tensor is there."""
        value = self.read()
        return type(value) is float or type(value) is int and abs(value) < LARGE

    def tensor(self) -> Tensor:
        value = self.read()
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64)

    def guard_on(self, function: Function) -> Any:
        """Return the function's result; the program holds for numbers with this result."""
        result = function(self.value)
        # A guard on the number itself covers all the others.
        if function is identity:
            self.conditions = [(function, result)]
        elif not self.conditions or self.conditions[0][0] is not identity:
            self.conditions.append((function, result))
        return result

    def to_conditions(self) -> Conditions:
        return Conditions(type(self.value), tuple(self.conditions))


@dataclass(frozen=True)
class Conditions:
    """A guard's predicate on a number: results of functions on it."""

    cls: type
    conditions: tuple[tuple[Function, Any], ...]

    def hold(self, value: object) -> bool:
        """Return whether all functions on the number have the same results as in the trace."""
        if type(value) is not self.cls:
            return False
        try:
            return all(
                type(result := function(value)) is type(expected) and result == expected
                for function, expected in self.conditions
            )
        except (ArithmeticError, ValueError):  # as forward would raise
            return False


def is_trained(value: object) -> bool:
    """Return whether a value is a tensor that an optimizer may change."""
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def identity(value: object) -> Any:
    return value


class Varying:
    """The float arguments that differ between otherwise equal calls."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}  # value in the first call, by leaf index
        self.now: dict[str, float] = {}  # current value by name, for those that vary

    def take(self, leaves: Sequence[object]) -> list[int]:
        """Record a call's floats; return the positions of those that vary."""
        positions = []
        for i, leaf in enumerate(leaves):
            if type(leaf) is float and (
                leaf != self.first.setdefault(i, leaf) or self.named(i) in self.now
            ):
                self.now[self.named(i)] = leaf
                positions.append(i)
        return positions

    @staticmethod
    def named(i: int) -> str:
        return f"argument {i}"


class Retrace(BaseException):
    """A trace is repeated with the learned state.

    It is no Exception, which the program may catch.
    """

    def __init__(self, reason: str, learn: Callable[[], None] = lambda: None) -> None:
        super().__init__(reason)
        self.learn = learn


class State:
    """Knowledge about a module's state, from calls and traces up to now."""

    def __init__(self) -> None:
        # entries that programs write, or whose tensors they mutate; dicts are ordered sets
        self.entries: dict[Source, None] = {}
        self.counted: dict[Source, None] = {}  # numbers that a program writes, or that changed
        self.varying: dict[Any, Varying] = {}  # by the key that otherwise equal calls share
        self.is_looking = False  # whether traces read buffers' values (value_guards.py)
        self.shapes: set[Any] = set()  # buffers' values that decided on a shape
        self.asked: set[str] = set()  # arguments whose values traces read
        self.tested: set[str] = set()  # those of which they read truth values (`if mask.any()`)
        self.is_counting = True  # whether a trace may use symbolic numbers
        # The first line that asks for an order in memory: inputs then have the caller's.
        self.asks_order = ""
        # Traces say that no compiler runs, as in eager mode; if the program asks for values there,
        # as masks of transformers do, that one does. An error there settles that none runs.
        self.is_eager, self.is_settled = True, False
        self.kept_sites: set[str] = set()  # lines that rewrites leave alone (trace_context.py)
        # modules in which int() and the like take numbers that only a run knows
        # (builtin_numbers.py)
        self.namespaces: list[dict[str, Any]] = []
        self.branches = Branches()  # on values that only a run knows
        self.missing = Missing()  # of the iterations that values choose

    def add(self, source: Source, value: object = None) -> None:
        """Add a source's entry. value: the value that the program writes there."""
        self.entries[source.entry] = None
        if isinstance(value, COUNTED) and not isinstance(value, bool):  # or a SymbolicNumber
            self.counted[source] = None

    @property
    def learnt(self) -> str:
        """Return the knowledge that another trace would lack, as text; empty without any."""
        facts = [f"the program changes {source}" for source in (*self.entries, *self.counted)]
        facts += ["it depends on values of buffers"] if self.is_looking or self.shapes else []
        facts += [f"it depends on values of {name}" for name in sorted(self.asked | self.tested)]
        facts += [f"it uses a value of {site}" for site in sorted(self.kept_sites)]
        facts += [f"it asks for an order in memory at {self.asks_order}"] if self.asks_order else []
        facts += ["it takes numbers of Python"] if not self.is_counting or self.namespaces else []
        facts += ["it branches on values"] if self.branches.lines else []
        facts += ["its code for compilers fails"] if self.is_settled else []
        facts += [f"iteration {i} at {line} fails" for line, i in sorted(self.missing.errors)]
        return ", ".join(facts)

    def look(self) -> None:
        """Allow traces to read buffers' values."""
        self.is_looking = True

    def ask_order(self, line: str = "") -> None:
        """Give traces inputs in the caller's order in memory. line: the one that asks for it."""
        self.asks_order = line or user_line() or "a call"

    def stop_counting(self) -> None:
        self.is_counting = False

    def leave_out(self, error: Exception) -> None:
        """Raise Retrace if an iteration that values choose raised an error."""
        broken, self.missing.broken = self.missing.broken, None
        frames = traceback.walk_tb(error.__traceback__)
        # The program may have caught that iteration's error, and this one is another.
        if broken is None or all(frame.f_code is not broken[1] for frame, _ in frames):
            return
        key, _ = broken
        kept = error.with_traceback(None)  # whose frames hold traced tensors
        reason = f"iteration {key[1]} at {key[0]} raises {type(error).__name__}"
        raise Retrace(reason, partial(self.missing.errors.update, {key: kept})) from None

    @property
    def may_compile(self) -> bool:
        """Whether a trace may yet say that a compiler runs."""
        return self.is_eager and not self.is_settled

    def be_compiled(self) -> None:
        """Make torch.compiler.is_compiling() True in traces."""
        self.is_eager = False

    def be_eager(self) -> None:
        """Make torch.compiler.is_compiling() False in traces for good."""
        self.is_eager = self.is_settled = True

    def vary(self, source: Source, value: object) -> None:
        """Record that a number or tensor differs from its guard. value: the current one."""
        if isinstance(value, Tensor):
            self.add(source)
        else:
            self.counted[source] = None

    def inputs(self, besides: frozenset[int], varying: dict[str, float]) -> list[TensorInput]:
        """Return the tensors in the entries, then the numbers that change from call to call.

        besides: the ids of parameters and buffers. varying: numbers among the arguments.
        """
        tensors, trained = [], {*besides}
        for source, leaf in (pair for entry in self.entries for pair in entry.leaves()):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                continue
            if id(leaf) not in trained:
                tensors.append(TensorInput(source))
            if is_trained(leaf):  # one input for all its places, which has the whole gradient
                trained.add(id(leaf))
        for source in self.counted:
            if isinstance(holder := source.holder(), defaultdict):
                holder[source.steps[-1]]  # is there from now on, as when forward asks for it
        sources = [*self.counted, *(Source(varying, (name,)) for name in varying)]
        numbers = [NumberInput(source) for source in sources]
        return [*tensors, *(each for each in numbers if self.is_counting and each.holds())]


# Questions about the order of a tensor in memory: x.stride(), x.is_contiguous(), x.as_strided(...).
# A trace has contiguous inputs, whatever the caller's are. If the program asks, it is traced again
# with the caller's orders, and a call with other ones gets a program of its own.
_AS_STRIDED = {torch.as_strided: 3, Tensor.as_strided: 3, Tensor.as_strided_: 3}
_ORDER = {
    *_AS_STRIDED,
    *(Tensor.stride, Tensor.is_contiguous, Tensor.dim_order),
    *(Tensor.resize_, Tensor.resize_as_),
}
_PLACE = {Tensor.storage_offset}


# torch's modes, and ours, read strides and offsets of every value that they wrap.
_MODES = ("torch._subclasses", "torch._functorch", "torch._higher_order_ops", "torch.fx")


def _caller() -> str:
    return sys._getframe(3).f_globals.get("__name__", "")


class AskedOrders:
    """The questions of one trace, each with the line that asks first."""

    def __init__(self) -> None:
        self.order = self.place = ""

    def record(self, func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func not in _ORDER and func not in _PLACE:
            return
        # Tracing itself asks, too. No function of torch computes with a place.
        caller = _caller()
        if caller.startswith((*_MODES, "torchgspmd")) or func in _PLACE and caller[:6] == "torch.":
            return
        line = user_line() or "the program"
        self.order = self.order or line
        has_offset = "storage_offset" in kwargs or len(args) > _AS_STRIDED.get(func, len(args))
        if func in _PLACE or has_offset:
            self.place = self.place or line

    def check(self, names: Sequence[str], inputs: Sequence[Tensor], state: State) -> None:
        """Raise Retrace if a trace asked for orders that it did not have.

        Raises:
            ShardingError: It asked for the place of an input in its memory.
        """
        for name, x in zip(names, inputs):
            if self.place and x.device.type != "meta" and x.storage_offset():
                raise ShardingError(
                    f"the program asks for a place in memory, and '{name}' is a part of a tensor",
                    where=self.place,
                    why=f"its first element is number {x.storage_offset()} in memory; a program "
                    "has inputs of their own",
                    fix=f"pass '{name}' as a clone(), or leave storage_offset out",
                )
        if not self.order or state.asks_order:
            return

        if all(x.is_contiguous() for x in inputs):
            state.ask_order(self.order)
        else:
            why = f"it asks for an order in memory at {self.order}"
            raise Retrace(why, partial(state.ask_order, self.order))
