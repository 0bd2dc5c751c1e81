"""Mutations of state by a forward: attributes and tables of a module, and variables.

Tensors and plain values that forward assigns are effects of the program. Everything else is of
the trace alone.
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
from .bytecode_names import called_functions, reachable_values
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
from .number_guards import Tally
from .object_trees import opened
from .places import LISTS, NumberPlace, Place, State, is_table
from .recorder import Reach, Recorder
from .symbolic_numbers import SymbolicNumber, at_backward, tally_of
from .variable_tables import ClassVariables, Table, Variables


class Tables:
    """The tables in which a forward, its hooks or a function may leave tensors and plain values.

        net.register_forward_hook(lambda m, x, y: outputs.append(y))      # the list `outputs`

    They are attributes of the modules and of the objects that these name, and tables that functions
    name.
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
        # (stand-in, index of the place, guard on its tensor) by the id of the stand-in
        self.places: dict[int, tuple[Tensor, int, Kind]] = {}
        self.numbers: list[Tally] = []
        self.recorder: Recorder | None = None  # while a module is traced

    def _reach(self) -> None:
        """Find the Python functions that the program may call, and the objects that it may read."""
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
        """Put stand-ins into the places for the time of a trace, then restore all tables.

        Objects that were assigned to attributes stay.
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
            self.initial_entries = {
                id(table.container): table.last_entries for table in self.tables
            }
            self.named = [
                (table, snapshot(table.container)) for table in self.tables if table.is_named
            ]
            if self.recorder is not None:
                self.recorder.record_variables(self.called)
            yield
        finally:
            for table in self.tables:
                self._restore(table)
            for tally in self.numbers:
                if tally.place.is_there() and type(tally.place.value()) is SymbolicNumber:
                    tally.place.put(tally.value)
            # Stand-ins may remain in global variables.
            for place, tensor, value in zip(places, stand_ins, before):
                if place.is_there() and place.value() is tensor:
                    place.put(value)

    def _restore(self, table: MutableTable) -> None:
        """Restore the entries of a table."""
        container, before = table.container, table.before
        if isinstance(container, LISTS):
            if len(container) != len(before) or not all(map(is_, container, before.values())):
                container.clear()
                container.extend(before.values())
            return
        for name, value in table.entries().items():
            if value is not before.get(name, ABSENT) and self._is_mutation(name, value):
                _put(container, name, before.get(name, ABSENT))
        # Only missing entries are written: the table may be read-only.
        for name in [name for name in before if name not in container]:
            container[name] = before[name]

    def mutations(self, outputs: list[Tensor], state: Sequence[Tensor]) -> list[StateMutation]:
        """Return the mutations since the last look; append their tensors to the outputs.

        state: parameters and buffers, which do not count: an LSTM has its weights in a list, too.
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
            removed = tuple(
                name
                for name in old
                if name not in now and (not table.attributes or self._is_mutation(name, old[name]))
            )
            appended: list = []
            is_whole_list = isinstance(table.container, LISTS) and len(now) < len(old)
            if isinstance(table.container, LISTS) and len(now) != len(old):
                is_whole_list = is_whole_list or any(name < len(old) for name in changed)
                appended = [*table.container][0 if is_whole_list else len(old) :]
                changed, removed = {}, ()
            if not (changed or removed or appended or is_whole_list):
                continue
            entries = {name: replace_tensors(value, outputs) for name, value in changed.items()}
            mutations.append(
                StateMutation(
                    table.root,
                    table.path,
                    entries,
                    removed,
                    replace_tensors(appended, outputs),
                    is_whole_list,
                )
            )
            names = [
                *changed,
                *removed,
                *(range(0 if is_whole_list else len(old), len(now)) if appended else ()),
            ]
            for name in names or [0]:
                self.changed.add((id(table.root), (*table.path, name)[0]))
                self.state.add(table.root, (*table.path, name), changed.get(name))
        return mutations

    def start_backward(self) -> None:
        """Let numbers of the backward be those that forward left in the places."""
        for tally in self.numbers:
            if tally.place.is_there() and type(symbol := tally.place.value()) is SymbolicNumber:
                tally.place.put(at_backward(symbol, tally.place))
        for table in self.tables:
            table.last_entries = table.entries()

    def _is_mutation(self, name: Any, value: Any, excluded: frozenset[int] = frozenset()) -> bool:
        """Return whether runs write the entry: it is plain, or a tensor of the trace."""
        return name not in KEPT_BY_TORCH and (
            is_plain(value) or _contains_tensor(value, self.traced, excluded)
        )

    def reads(self, used: Container[int], operands: Container[int]) -> Guards:
        """Return the guards on what was read, and on tables and objects that functions name.

        used: the places whose tensors the program uses. operands: ids of other tensors that
        functions were called with.
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
        for holder, name in self.changed:  # a read through type(self) is not recorded
            if holder in classes and (
                self.recorder is None or (holder, name) not in self.recorder.entries
            ):
                compared = self._guard_value(
                    self.initial_entries[holder].get(name, ABSENT), used, True
                )
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
        """Return the guard on an entry that was read.

        value: the entry when it was read. then: its snapshot.
        """
        initial = self.initial_entries.get(id(table))
        if initial is not None and name not in self.globals.get(id(table), (name,)):
            initial = None
        if (
            initial is None
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
        if initial is not None and (
            type(before := initial.get(name, ABSENT)) is SymbolicNumber or id(before) in self.places
        ):
            value = then = before  # the read may have come before the stand-in
        if initial is not None and initial.get(name, ABSENT) is not value:
            return ANY  # the program had written the entry before the read
        if table.get(name, ABSENT) is not value and not is_watched(value) and not is_table(value):
            return ANY  # an object that the trace replaced
        return self._guard_value(then, used, self._is_changed(table, (name,)))

    def _has_stand_in(self, value: Any) -> bool:
        """Return whether the value is or contains a stand-in for the content of a place."""
        leaves = value.leaves() if isinstance(value, Contents) else (value,)
        return any(type(leaf) is SymbolicNumber or id(leaf) in self.places for leaf in leaves)

    def _is_changed(self, root: Table, path: tuple) -> bool:
        """Return whether the program writes into the root, or into this entry of it."""
        return any(entry[: 1 + len(path)] == (id(root), *path) for entry in self.changed)

    def _guard_value(self, value: Any, used: Container[int], is_changed: bool) -> Any:
        """Return the guard on a snapshot.

        A list that the program appends to is not guarded if its tensors are not used.
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
        """Return whether the value stands in a place whose tensor the program uses."""
        return id(value) in self.places and self.places[id(value)][1] in used

    def owner_of(self, tensor: Tensor) -> tuple[Table, tuple] | None:
        """Return the entry that holds a tensor, or the tensor that it is a view of."""
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
    """Write an entry, or delete it if the value is ABSENT."""
    if value is ABSENT:
        del container[name]
    else:
        container[name] = value


def _contains_tensor(
    value: Any, kind: type[Tensor], excluded: frozenset[int] = frozenset()
) -> bool:
    """Return whether a tensor of this type is in the value, other than those excluded."""
    return any(
        isinstance(leaf, kind) and id(leaf) not in excluded
        for leaf in pytree.tree_leaves(opened(value))
    )
