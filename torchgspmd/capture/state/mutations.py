"""What a module's forward assigns: parameters, buffers, other tensors and plain values are effects
of the program, the rest is of the trace alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError, user_line
from ..normalize import NUMBERS
from .argument_mutations import StateMutation, replace_tensors
from .bytecode_names import (
    called_functions,
    reachable_values,
)
from .guards import (
    A_TABLE,
    ABSENT,
    ANY,
    KEPT_BY_TORCH,
    Contents,
    Guards,
    Kind,
    is_plain,
    is_watched,
    matches,
    snapshot,
)
from .mutable_tables import MutableTable, find_tables
from .object_trees import opened
from .places import LISTS, NumberPlace, Place, State, is_table
from .recorder import Reach, Recorder
from .symbolic_numbers import SymbolicNumber, Tally, at_backward, tally_of
from .variable_tables import (
    ClassVariables,
    Table,
    Variables,
)


class Tables:
    """The attributes of a module, of those inside of it and of the objects that they name, and all
    tables and lists in which its forward and its hooks, or a function, may leave tensors and plain
    values: those in attributes, and those that they name, as in `register_forward_hook(lambda m, x,
    y: found.append(y))`.
    """

    def __init__(
        self,
        fn: Callable | nn.Module,
        traced: type[Tensor],
        state: State,
        varying: dict[str, float],
    ) -> None:
        self.traced, self.state, self.varying = traced, state, varying
        self.modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self.functions, self.objects = [fn], []
        for m in self.modules:
            hooks = (
                m._forward_hooks,
                m._forward_pre_hooks,
                m._backward_hooks,
                m._backward_pre_hooks,
            )
            self.functions += [m.forward, *(hook for table in hooks for hook in table.values())]
        self._reach()
        self.tables = [*find_tables(self.modules, self.objects, self.functions, self.called)]
        self.globals = {id(t.container): t.names for t in self.tables if t.names is not None}
        self.changed: set[tuple[int, Any]] = set()  # entries of roots
        self.places: dict[
            int, tuple[Tensor, int, Kind]
        ] = {}  # what stands in a place, which, and what was there
        self.numbers: list[Tally] = []
        self.recorder: Recorder | None = None  # of a module, while it is traced

    def _reach(self) -> None:
        """Finds the functions in Python that a program may call, and the objects that may be read."""
        roots, reach, before = self.functions, Reach(self.modules), -1
        while len(reach.objects) != before:
            before = len(reach.objects)
            self.functions = [*roots, *reach.functions.values()]
            self.called = called_functions(
                self.functions, map(type, (*self.modules, *reach.objects.values()))
            )
            reach.add(
                (
                    value
                    for function in (*self.functions, *self.called)
                    for value in reachable_values(function)
                ),
                are_named=True,
            )
        self.objects = [*reach.objects.values()] if self.modules else []

    @contextmanager
    def substitute(self, places: Sequence[Place], stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Meanwhile these tensors are in the places; afterwards all is as it was but for objects
        that were assigned to attributes.
        """
        before = [place.value() for place in places]
        self.places = {
            id(tensor): (tensor, i, Kind.of(value))
            for i, (value, tensor) in enumerate(zip(before, stand_ins))
            if isinstance(value, Tensor)
        }
        self.numbers = [
            Tally(place, value, tensor)
            for place, value, tensor in zip(places, before, stand_ins)
            if isinstance(place, NumberPlace)
        ]
        try:
            for place, tensor in zip(places, stand_ins):
                place.put(tensor)
            for tally in self.numbers:
                tally.place.put(SymbolicNumber(tally))
            for table in self.tables:
                table.last_entries = table.entries()
            self.start = {id(table.container): table.last_entries for table in self.tables}
            self.named = [
                (table, snapshot(table.container)) for table in self.tables if table.is_named
            ]
            if self.recorder is not None:
                self.recorder.see_variables(self.called)
            yield
        finally:
            for table in self.tables:
                self._restore(table)
            for tally in self.numbers:
                if tally.place.is_there() and type(tally.place.value()) is SymbolicNumber:
                    tally.place.put(tally.value)
            for place, tensor, value in zip(places, stand_ins, before):  # global variables
                if place.is_there() and place.value() is tensor:
                    place.put(value)

    def _restore(self, table: MutableTable) -> None:
        container, before = table.container, table.before
        if isinstance(container, LISTS):
            if len(container) != len(before) or not all(map(is_, container, before.values())):
                container.clear()
                container.extend(before.values())
            return
        for name, value in table.entries().items():
            if value is not before.get(name, ABSENT) and self._is_mutation(name, value):
                _put(container, name, before.get(name, ABSENT))
        for name in [
            name for name in before if name not in container
        ]:  # nothing is written to a table that nobody may write to
            container[name] = before[name]

    def left(self, outputs: list[Tensor], state: Sequence[Tensor]) -> list[StateMutation]:
        """What has been put into tables since the last look; tensors are added to the outputs of
        the program. Parameters and buffers do not count: an LSTM has its weights in a list, too.
        """
        mutations, state_ids = [], frozenset(map(id, state))
        for table in self.tables:
            old, now = table.last_entries, table.entries()
            table.last_entries = now
            for name, value in now.items():
                if isinstance(value, NUMBERS) and value is not old.get(name):
                    raise ShardingError(
                        f"the program puts a number into '{name}' that is known only when it runs",
                        where=user_line(),
                        fix="keep the tensor, and call item() on it outside",
                    )
            changed = {
                name: value
                for name, value in now.items()
                if value is not old.get(name, ABSENT)
                and self._is_mutation(name, value, state_ids)
                and not matches(value, old.get(name, ABSENT))
            }
            gone = tuple(
                name
                for name in old
                if name not in now and (not table.attributes or self._is_mutation(name, old[name]))
            )
            added: list = []
            whole = isinstance(table.container, LISTS) and len(now) < len(old)
            if isinstance(table.container, LISTS) and len(now) != len(old):
                whole = whole or any(name < len(old) for name in changed)
                added, changed, gone = [*table.container][0 if whole else len(old) :], {}, ()
            if not (changed or gone or added or whole):
                continue
            entries = {name: replace_tensors(value, outputs) for name, value in changed.items()}
            mutations.append(
                StateMutation(
                    table.root, table.path, entries, gone, replace_tensors(added, outputs), whole
                )
            )
            names = [*changed, *gone, *(range(0 if whole else len(old), len(now)) if added else ())]
            for name in names or [0]:
                self.changed.add((id(table.root), (*table.path, name)[0]))
                self.state.add(table.root, (*table.path, name), changed.get(name))
        return mutations

    def start_backward(self) -> None:
        """At the end of forward: the backward is of the numbers that are in their places then."""
        for tally in self.numbers:
            if tally.place.is_there() and type(symbol := tally.place.value()) is SymbolicNumber:
                tally.place.put(at_backward(symbol, tally.place))
        for table in self.tables:
            table.last_entries = table.entries()

    def _is_mutation(self, name: Any, value: Any, excluded: frozenset[int] = frozenset()) -> bool:
        """Whether an entry is one that a run leaves too: a tensor of the trace, or plain."""
        return name not in KEPT_BY_TORCH and (
            is_plain(value) or _contains_tensor(value, self.traced, excluded)
        )

    def reads(self, used: Container[int], operands: Container[int]) -> Guards:
        """What the program depends on of what was read, of the tables that functions name, and of
        the objects, if it uses their tensors. used: the places whose tensors it uses; given: ids of
        the tensors elsewhere that functions were called with.
        """
        self.operands = operands
        reads = (
            self.recorder.to_guards(lambda *entry: self._guard_of_read(used, *entry))
            if self.recorder is not None
            else Guards()
        )
        tallies = {
            tally.place.name: tally for tally in self.numbers if tally.place.root is self.varying
        }
        for name, value in self.varying.items():
            reads.add(
                self.varying, name, tallies[name].to_conditions() if name in tallies else value
            )
        classes = {
            id(table.container): table.container
            for table in self.tables
            if isinstance(table.container, ClassVariables)
        }
        for holder, name in self.changed:  # it may have been read of type(self)
            if holder in classes and (
                self.recorder is None or (holder, name) not in self.recorder.seen
            ):
                compared = self._guard_value(self.start[holder].get(name, ABSENT), used, True)
                if compared is not ANY:
                    reads.add(classes[holder], name, compared)
        for table, contents in self.named:
            if not table.attributes or any(self._is_used(leaf, used) for leaf in contents.leaves()):
                compared = self._guard_value(
                    contents, used, table.attributes or self._is_changed(table.root, table.path[:1])
                )
                if compared is not ANY:
                    reads.add(
                        *(
                            (table.root, table.path[0])
                            if table.path
                            else ({A_TABLE: table.root}, A_TABLE)
                        ),
                        compared,
                    )
        return reads

    def _guard_of_read(
        self, used: Container[int], table: dict, name: str, value: Any, then: Any
    ) -> Any:
        """What is compared of an entry that was read with this value, which was this then."""
        start = self.start.get(id(table))
        if start is not None and name not in self.globals.get(id(table), (name,)):
            start = None
        if (
            start is None
            and isinstance(table, Variables)
            and not self._has_stand_in(then)
            and not matches(table.get(name, ABSENT), then)
        ):
            warnings.warn(
                f"forward assigns '{name}' in a way that is not seen: runs of the program "
                "do not; keep it in an attribute of the "
                "module",
                stacklevel=2,
            )
            return ANY
        if start is not None and (
            type(before := start.get(name, ABSENT)) is SymbolicNumber or id(before) in self.places
        ):
            value = then = before  # it may have been read before the stand-in was put there
        if (
            start is not None and start.get(name, ABSENT) is not value
        ):  # the program had written it before
            return ANY
        if table.get(name, ABSENT) is not value and not is_watched(value) and not is_table(value):
            return ANY  # an object, in whose place a trace puts another one
        return self._guard_value(then, used, self._is_changed(table, (name,)))

    def _has_stand_in(self, value: Any) -> bool:
        """Whether what stands for something from a place is in it."""
        leaves = value.leaves() if isinstance(value, Contents) else (value,)
        return any(type(leaf) is SymbolicNumber or id(leaf) in self.places for leaf in leaves)

    def _is_changed(self, root: Table, path: tuple) -> bool:
        """Whether the program writes into the root, or into the entry of it."""
        return any(entry[: 1 + len(path)] == (id(root), *path) for entry in self.changed)

    def _guard_value(self, value: Any, used: Container[int], is_changed: bool) -> Any:
        """Of lists that are changed, and of whose tensors none is used, nothing: things are added
        to them only, unless they were empty.
        """

        def leaf(value: Any) -> Any:
            if type(value) is SymbolicNumber:
                return tally_of(value).to_conditions()
            if not isinstance(value, self.traced):
                return (
                    ANY if isinstance(value, Tensor) and id(value) not in self.operands else value
                )
            return self.places[id(value)][2] if self._is_used(value, used) else ANY

        if not isinstance(value, Contents):
            return leaf(value)
        tensors = [x for x in value.leaves() if isinstance(x, Tensor)]
        if (
            is_changed
            and issubclass(value.cls, LISTS)
            and tensors
            and not any(self._is_used(x, used) for x in tensors)
        ):
            return ANY
        return replace(
            value, items=tuple(self._guard_value(item, used, is_changed) for item in value.items)
        )

    def _is_used(self, value: Any, used: Container[int]) -> bool:
        return id(value) in self.places and self.places[id(value)][1] in used

    def owner_of(self, tensor: Tensor) -> tuple[Table, tuple] | None:
        """The entry that holds a tensor, or the one that it is a view of."""
        memory = tensor.untyped_storage()._cdata
        for table in self.tables:
            for name, value in table.before.items():
                tensors = [
                    x
                    for x in pytree.tree_leaves(value)
                    if isinstance(x, Tensor) and x.layout is torch.strided
                ]
                if name not in KEPT_BY_TORCH and any(
                    x.untyped_storage()._cdata == memory for x in tensors
                ):
                    return table.root, (*table.path, name)
        return None


def _put(container: Table, name: Any, value: Any) -> None:
    if value is ABSENT:
        del container[name]
    else:
        container[name] = value


def _contains_tensor(
    value: Any, kind: type[Tensor], excluded: frozenset[int] = frozenset()
) -> bool:
    """Whether a tensor of this kind is in it, by another id than these."""
    return any(
        isinstance(leaf, kind) and id(leaf) not in excluded
        for leaf in pytree.tree_leaves(opened(value))
    )
