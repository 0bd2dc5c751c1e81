"""Run an optimizer's own `step` on the tensors of a program.

    for p in group["params"]:
        state = self.state[p]
        if len(state) == 0:                     the first step: a program of its own
            state["step"], state["bases"] = 0, [None, None]
        state["step"] += 1                      a number that every run counts
        if state["step"] % 10 == 0:             a program for each outcome

The step sees the program's parameters, gradients and states in place of the optimizer's. Its
numbers, flags and containers are those of its groups, its attributes and `kept`. The capture
watches them (capture/state). torch's optimizers have capturable=True: they may not ask for values.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy as copy_of
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ..compat.private_apis import TorchDispatchMode
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError

CAPTURABLE = {"capturable": True, "foreach": False, "fused": False}
ORDINARY_LOOP = "parallelize the model alone, and step the optimizer as usual"
_LEAVES = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# Operations that read no value of a tensor.
_OF_SHAPES = {
    *(f"aten::{name}_like" for name in "empty full ones rand randn zeros".split()),
    *(f"aten::new_{name}" for name in "empty empty_strided full ones zeros".split()),
}

State = dict[Any, Any]


def run_step(
    optimizer: Optimizer,
    groups: Sequence[tuple[list[Tensor], list[Tensor | None]]],
    states: Mapping[Any, State],
) -> dict[Any, State]:
    """Step parameters in place; return the states, with those that the step has added.

    groups: the parameters and gradients in the place of each group's. states: by parameter.
    """
    options = CAPTURABLE if torch.compiler.is_compiling() else {}
    now: dict[Any, State] = defaultdict(dict, states)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_entries(vars(optimizer), {"state": now}))
        for group, (parameters, gradients) in zip(optimizer.param_groups, groups):
            named = {name: value for name, value in options.items() if name in group}
            stack.enter_context(_entries(group, {**named, "params": parameters}))
            for p, gradient in zip(parameters, gradients):
                stack.enter_context(_gradient(p, gradient))
        _call_step(optimizer)
    return now


def _call_step(optimizer: Optimizer) -> None:
    """Call the step without hooks, those on all optimizers too: ours follows a step on XLA."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__" if getattr(step, "hooked", False) else "__call__")(optimizer)


@contextmanager
def _entries(table: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Replace entries of a table for a while."""
    before = {name: table[name] for name in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


@contextmanager
def _gradient(parameter: Tensor, gradient: Tensor | None) -> Iterator[None]:
    before, parameter.grad = parameter.grad, gradient
    try:
        yield
    finally:
        parameter.grad = before


# ---------------------------------------------------------------------------------- first states


class FirstStates(NamedTuple):
    """The start of a step: each parameter's states, and the names of the numbers that it counts.

    groups: the names in each group. attributes: those of the optimizer.
    """

    states: dict[Tensor, State]
    groups: list[list[str]]
    attributes: list[str]


def first_states(optimizer: Optimizer) -> FirstStates:
    """Return the start of the first step, and add its numbers to the groups.

    A step on copies creates them. If a step that finds them computes the same, they are there from
    the beginning. Otherwise the optimizer's first step differs from the later ones, and creates
    them itself.

    Raises:
        ShardingError: The step needs a closure, which would run the model anew, or is that of
            another optimizer, whose parameters and states are out of sight.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ShardingError.here(
            f"{name} steps by a closure, and train_step runs the model once",
            fix=ORDINARY_LOOP,
        )
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ShardingError.here(
            f"{name} steps another optimizer, whose states train_step does not see",
            fix=ORDINARY_LOOP,
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    present = {p: dict(optimizer.state.get(p, {})) for p in parameters}
    first = _Trial(optimizer, present, [{} for _ in optimizer.param_groups])
    groups = [group.first for group in first.groups]
    counted = [
        [n for n in now if is_plain(now[n]) and (n not in group or now[n] != group[n])]
        for now, group in zip(first.groups, optimizer.param_groups)
    ]
    own, now = vars(optimizer), vars(first.twin)
    attributes = [n for n in now if is_plain(now[n]) and (n not in own or now[n] != own[n])]
    states = {p: first.states[copy].first for p, copy in first.copies.items()}
    for on_meta in (True, False):
        # Shapes say enough, unless the step asks for values, or for a device.
        with suppress(Exception):
            again = _Trial(optimizer, states, groups, on_meta)
            break
    else:
        return FirstStates(present, counted, attributes)
    if first.stores_its_inputs or first.log != again.log:
        return FirstStates(present, counted, attributes)
    for group, added in zip(optimizer.param_groups, groups):
        group.update({name: value for name, value in added.items() if name not in group})
    return FirstStates(states, counted, attributes)


def is_plain(value: object) -> bool:
    """Return whether JSON holds a value as it is, and alone."""
    return value is None or type(value) in (bool, int, float, str)


def _copied(value: Any, on_meta: bool = False) -> Any:
    """Return a copy of a state, without the values of tensors that have dimensions."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta") if on_meta and value.dim() else value.clone()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item, on_meta) for item in value)
    if type(value) is dict:
        return {key: _copied(item, on_meta) for key, item in value.items()}
    return value


class _Recorder(dict):
    """A table of states. first: each entry's first value, a copy. seen: gets each first value."""

    def __init__(self, entries: Mapping[Any, Any], seen: Callable[[Any], None]) -> None:
        super().__init__(entries)
        self.first: State = {name: _copied(value) for name, value in entries.items()}
        self.seen = seen

    def __setitem__(self, name: object, value: object) -> None:
        if name not in self.first:
            self.seen(value)
            self.first[name] = _copied(value)
        super().__setitem__(name, value)

    def update(self, *args: object, **values: object) -> None:
        for name, value in dict(*args, **values).items():
            self[name] = value

    def setdefault(self, name: object, value: object = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]


class _Trial(TorchDispatchMode):
    """A step on copies of the parameters and states, with other gradients.

    copies: by parameter. states: by copy. log: the operations that depend on parameters or
    gradients, in order. stores_its_inputs: whether a state begins as one of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: Mapping[Tensor, State],
        groups: Sequence[State],
        on_meta: bool = False,
    ) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.stores_its_inputs = False
        self.dependent: set[StorageWeakRef] = set()  # what parameters and gradients decide
        self.copies = {p: nn.Parameter(_copied(p.detach(), on_meta), False) for p in states}
        for copy in self.copies.values():
            # Any numbers that are no zeros: a quotient of zeros would be NaN.
            count = torch.arange(copy.numel(), device=copy.device)
            copy.grad = count.sin().to(copy.dtype).view(copy.shape)
            self.dependent |= {_storage(copy), _storage(copy.grad)}
        self.states: dict[Any, _Recorder] = defaultdict(self._recorder)
        for p, state in states.items():
            self.states[self.copies[p]] = self._recorder(_copied(state, on_meta))
        self.groups = [
            self._recorder({**group, **added, "params": [self.copies[p] for p in group["params"]]})
            for group, added in zip(optimizer.param_groups, groups)
        ]
        for group in self.groups:
            del group.first["params"]
        # A twin: the optimizer keeps its groups, states, hooks and attributes.
        self.twin = twin = object.__new__(type(optimizer))
        tables = {n: copy_of(t) for n, t in vars(optimizer).items() if type(t) in (dict, list, set)}
        twin.__dict__.update(vars(optimizer) | tables)
        twin.__dict__.update(param_groups=self.groups, state=self.states)
        devices = [*{p.device for p in states if p.device.type == "cuda"}]
        with torch.random.fork_rng(devices), set_stance("force_eager"), torch.no_grad(), self:
            _call_step(twin)

    def _recorder(self, entries: Mapping[Any, Any] = {}) -> _Recorder:
        return _Recorder(entries, self._look)

    def _look(self, value: object) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and _storage(leaf) in self.dependent:
                self.stores_its_inputs = True
            if not isinstance(leaf, _LEAVES):
                raise ShardingError.here(
                    f"the optimizer keeps a {type(leaf).__name__} in its state, whose tensors "
                    "train_step does not see",
                    fix=ORDINARY_LOOP,
                )

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        read = any(isinstance(t, Tensor) and _storage(t) in self.dependent for t in leaves)
        if read and not func.is_view and func._schema.name not in _OF_SHAPES:
            form = pytree.tree_map_only(Tensor, lambda t: (t.shape, t.dtype), (args, kwargs))
            self.log.append((func, str(form)))
            written = (
                value
                for argument, value in zip(func._schema.arguments, args)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            for leaf in pytree.tree_leaves((result, *written)):
                if isinstance(leaf, Tensor):
                    self.dependent.add(_storage(leaf))
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def precise(state: Tensor) -> Tensor:
    """Return a state; a number as float64, in which torch computes with it where it is read."""
    return state.double() if not state.dim() and state.is_floating_point() else state
