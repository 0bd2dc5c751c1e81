"""A forward's mutations: attributes and tables in a module, and variables.

Tensors and plain values that forward assigns are effects of the program. Everything else belongs
to the trace alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ..rewrites.numpy_arrays import check_left
from ..stand_in_sizes import NUMBERS
from .bytecode_names import cell_sources
from .guards import (
    ANY,
    KEPT_BY_TORCH,
    Contents,
    Guard,
    Guards,
    TensorPredicate,
    is_plain,
    is_watched,
    leaves_of,
    matches,
)
from .instructions import READ, uses_of_names
from .mutable_tables import MutableTable, places_of, tables_of
from .object_trees import opened
from .recorder import Reach, Recorder
from .source import (
    ABSENT,
    LISTS,
    Attribute,
    Source,
    Step,
    is_table,
    items_of,
    length,
    set_component,
    step_name,
)
from .state_inputs import NumberInput, Retrace, State, TensorInput, is_trained
from .symbolic_numbers import SymbolicNumber, at_backward, conditions_of, symbolic
from .writes import EXTEND, REPLACE, Write, replace_tensors

_READ = {READ}


class Tables:
    """The tables in which a forward, its hooks or a function may leave tensors and plain values.

        net.register_forward_hook(lambda m, x, y: outputs.append(y))      # the list `outputs`

    They are attributes on the modules and on objects that these name, and tables that functions
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
        self.reach = reach = Reach(fn)
        self.modules, self.called, self.objects = reach.modules, reach.called, reach.objects
        self.tables = tables_of(reach)
        self.table_of = {id(table.container): table for table in self.tables}
        self.changed: dict[Source, None] = {}  # the roots' entries, as an ordered set
        # (stand-in, input index, predicate on its tensor) by the stand-in's id
        self.stand_ins: dict[int, tuple[Tensor, int, TensorPredicate]] = {}
        self.aliased: dict[int, Tensor] = {}  # the tensor behind each stand-in, by its id
        self.numbers: list[NumberInput] = []
        self.recorder: Recorder | None = None  # while a module is traced

    @contextmanager
    def substitute(
        self,
        inputs: Sequence[TensorInput],
        stand_ins: Sequence[Tensor],
        registered: Mapping[int, Tensor],
    ) -> Iterator[None]:
        """Replace inputs by stand-ins during a trace, then restore all tables.

        Objects that were assigned to attributes stay. registered: stand-ins for parameters and
        buffers by the ids of these, which tables may hold, too.
        """
        before = [each.source.read() for each in inputs]
        sources = {each.source for each in inputs}
        shared = {id(x): y for x, y in zip(before, stand_ins) if is_trained(x)} | dict(registered)
        aliases = [
            (source, tensor, shared[id(tensor)])
            for source, tensor in places_of(shared, self.tables, self.modules)
            if source not in sources
        ]
        self.aliased = {id(stand_in): tensor for _, tensor, stand_in in aliases}
        self.stand_ins = {
            id(tensor): (tensor, i, TensorPredicate.of(value))
            for i, (value, tensor) in enumerate(zip(before, stand_ins))
            if isinstance(value, Tensor)
        }
        self.numbers = [each for each in inputs if isinstance(each, NumberInput)]
        try:
            for each, value, tensor in zip(inputs, before, stand_ins):
                if isinstance(each, NumberInput):
                    each.value, each.traced = value, tensor
                    each.source.write(symbolic(each))
                else:
                    each.source.write(tensor)
            for source, _, stand_in in aliases:
                source.write(stand_in)
            for table in self.tables:
                table.initial = table.last = table.entries()
            self.named = [(table, table.snapshot()) for table in self.tables if table.is_named]
            if self.recorder is not None:
                self.recorder.record_variables(self.called)
            yield
        finally:
            for table in self.tables:
                self._restore(table)
            # Stand-ins may remain in global variables.
            for each, tensor, value in zip(inputs, stand_ins, before):
                now = each.source.read()
                if now is tensor or type(now) is SymbolicNumber:
                    each.source.write(value)
            for source, tensor, stand_in in aliases:
                if source.read() is stand_in:
                    source.write(tensor)

    def take_trained(self, operands: Container[int], registered: Container[int]) -> None:
        """Raise Retrace if a trace reads tensors that an optimizer may change, as constants.

        operands: the ids of the tensors with values that were passed to functions.
        """
        places = places_of(operands, self.tables, self.modules)
        found = [s for s, x in places if x.requires_grad and id(x) not in registered]
        if found:
            entries = dict.fromkeys(source.entry for source in found)
            learn = partial(self.state.entries.update, entries)
            raise Retrace(f"{found[0]} requires a gradient", learn)

    def _restore(self, table: MutableTable) -> None:
        container, before = table.container, table.before
        if isinstance(container, LISTS):
            if length(container) != len(before) or not all(
                map(is_, items_of(container), before.values())
            ):
                container.clear()
                container.extend(before.values())
            return
        now = table.entries()
        for step, value in now.items():
            if value is before.get(step, ABSENT):
                continue
            if isinstance(value, NUMBERS) or self._is_mutation(step, value):
                set_component(container, step, before.get(step, ABSENT))
        # Only missing entries are written: the table may be read-only.
        for step in [step for step in before if step not in now]:
            set_component(container, step, before[step])

    def writes(self, outputs: list[Tensor], state: Sequence[Tensor]) -> list[Write]:
        """Return the writes since the last look; append their tensors to the outputs.

        state: parameters and buffers, which do not count: an LSTM has its weights in a list, too.
        """
        writes, state_ids = [], frozenset(map(id, state))
        for table in self.tables:
            old, now = table.last, table.entries()
            table.last = now
            for step, value in now.items():
                if value is old.get(step):
                    continue
                check_left(value, f"puts into '{table.source.at(step)}'")
                if isinstance(value, NUMBERS):
                    raise ShardingError.here(
                        f"the program puts a number into '{table.source.at(step)}' that is known "
                        "only when it runs",
                        fix="keep the tensor, and call item() on it outside",
                    )
            for write in self._writes_of(table, old, now, state_ids):
                # A list that was extended keeps its old items as they are.
                first = len(old) if write.how == EXTEND else 0
                items = map(write.source.at, range(first, len(now)) or (0,))
                for source in (write.source,) if write.source.steps else items:
                    self.changed[source.entry] = None
                    self.state.add(source, write.value)
                if write.value is not ABSENT:
                    write = replace(write, value=replace_tensors(write.value, outputs))
                writes.append(write)
        return writes

    def _writes_of(
        self,
        table: MutableTable,
        old: dict[Step, object],
        now: dict[Step, object],
        state: frozenset[int],
    ) -> Iterator[Write]:
        """Yield the writes that turn a table's old entries into the new ones."""
        changed = {
            step: value
            for step, value in now.items()
            if value is not old.get(step, ABSENT)
            and self._is_mutation(step, value, state)
            and not matches(value, old.get(step, ABSENT))
        }
        if isinstance(table.container, LISTS) and len(now) != len(old):
            # A list that has only grown is extended, so that a run keeps the items before.
            is_whole = len(now) < len(old) or any(position < len(old) for position in changed)
            items = [*table.container][0 if is_whole else len(old) :]
            yield Write(table.source, items, REPLACE if is_whole else EXTEND)
            return
        yield from (Write(table.source.at(step), value) for step, value in changed.items())
        for step, value in old.items():
            if step not in now and (not table.are_attributes or self._is_mutation(step, value)):
                yield Write(table.source.at(step), ABSENT)

    def start_backward(self) -> None:
        """Use the numbers that forward left in the state for the backward."""
        for number in self.numbers:
            if type(symbol := number.source.read()) is SymbolicNumber:
                number.source.write(at_backward(symbol, number.source))
        for table in self.tables:
            table.last = table.entries()

    def _is_mutation(
        self, step: Step, value: object, excluded: frozenset[int] = frozenset()
    ) -> bool:
        """Return whether runs write the entry: it is plain, or a tensor from the trace."""
        return step_name(step) not in KEPT_BY_TORCH and (
            is_plain(value)
            or any(
                isinstance(leaf, self.traced) and id(leaf) not in excluded
                for leaf in pytree.tree_leaves(opened(value))
            )
        )

    def guards(self, used: Container[int], operands: Container[int]) -> Guards:
        """Return the guards on read values, and on tables and objects that functions name.

        used: the inputs whose tensors the program uses. operands: the ids of other tensors that
        were passed to functions.
        """
        self.operands, self.uses = operands, uses_of_names(self.called)
        return Guards(self._guards(used))

    def _guards(self, used: Container[int]) -> Iterator[Guard]:
        recorded = self.recorder.entries if self.recorder is not None else {}
        for source, (value, then) in recorded.items():
            yield Guard(source, self._predicate_of_read(used, source, value, then))
        numbers = {number.source: number for number in self.numbers}
        for name, value in self.varying.items():
            number = numbers.get(source := Source(self.varying, (name,)))
            yield Guard(source, number.to_conditions() if number is not None else value)
        for source in self.changed:  # a read through type(self) is not recorded
            if isinstance(source.root, type) and source not in recorded:
                before = self.table_of[id(source.root)].initial.get(source.steps[0], ABSENT)
                yield Guard(source, self._predicate(before, used, self._uses_of(source)))
        for table, contents in self.named:
            if not table.are_attributes:
                uses = self._uses_of(table.source)
                yield Guard(table.source, self._predicate(contents, used, uses))
            elif any(self._is_used(leaf, used) for leaf in leaves_of(contents)):
                yield Guard(table.source, self._predicate(contents, used, _READ))

    def _predicate_of_read(
        self, used: Container[int], source: Source, value: object, then: object
    ) -> object:
        """Return the predicate for a guard on read values.

        value: the value when it was read. then: its snapshot.
        """
        table = self.table_of.get(id(source.root))
        steps = source.steps if table is None or table.steps is None else table.steps
        if (
            source.steps
            and table is not None
            and source.steps[0] in steps
            and not (isinstance(source.root, nn.Module) and source.name in KEPT_BY_TORCH)
        ):
            before = table.initial.get(source.steps[0], ABSENT)
            if type(before) is SymbolicNumber or self._is_stand_in(before):
                value = then = before  # the read may have come before the stand-in
            if before is not value:
                return ANY  # the program had written the entry before the read
        elif (
            source.steps
            and source.dict_entry() is None
            and not any(
                type(leaf) is SymbolicNumber or self._is_stand_in(leaf) for leaf in leaves_of(then)
            )
            and not matches(source.read(), then)
        ):
            warnings.warn(
                f"forward assigns '{source.name}' in a way that is not seen: runs of the program "
                "do not; keep it in an attribute of the module",
                stacklevel=2,
            )
            return ANY
        if source.read() is not value and not is_watched(value) and not is_table(value):
            return ANY  # an object that the trace replaced
        return self._predicate(then, used, self._uses_of(source))

    def _uses_of(self, source: Source) -> set[str]:
        """Return how functions use a source's value, by the names that lead to it."""
        if source.steps:
            steps = source.steps[1:]
            uses = self.uses.get(step_name(source.steps[0]), _READ)
            return uses if not steps else _inside(uses) if len(steps) == 1 else _READ
        value, names = source.root, set()
        for cell in (cell for function in self.called for cell in cell_sources(function)):
            if cell.read() is value:
                names.add(cell.name)
        uses = [self.uses.get(name, _READ) for name in names]
        return set().union(*uses) if uses else _READ

    def _predicate(self, value: object, used: Container[int], uses: set[str]) -> object:
        """Return a guard's predicate from a snapshot.

        uses: how functions use the value. Lists to which they only append have no guard.
        """

        def leaf(value: object) -> Any:
            if type(value) is SymbolicNumber:
                return conditions_of(value) or ANY
            if not isinstance(value, self.traced):
                return (
                    ANY if isinstance(value, Tensor) and id(value) not in self.operands else value
                )
            if id(value) in self.aliased:
                return self.aliased[id(value)]
            return self.stand_ins[id(value)][2] if self._is_used(value, used) else ANY

        if not isinstance(value, Contents):
            return leaf(value)
        added = {".append"} if issubclass(value.cls, LISTS) else {"[]="}
        # Adding items reads nothing, so the contents need no guard.
        if issubclass(value.cls, (dict, *LISTS)) and uses <= added:
            return ANY
        inside = [
            self.uses.get(key.name, _READ) if isinstance(key, Attribute) else _inside(uses)
            for key in value.keys or (None,) * len(value.items)
        ]
        items = map(self._predicate, value.items, repeat(used), inside)
        return replace(value, items=tuple(items))

    def _is_stand_in(self, value: object) -> bool:
        return id(value) in self.stand_ins or id(value) in self.aliased

    def _is_used(self, value: object, used: Container[int]) -> bool:
        """Return whether the value stands for an input whose tensor the program uses."""
        return id(value) in self.stand_ins and self.stand_ins[id(value)][1] in used

    def source_of(self, tensor: Tensor) -> Source | None:
        """Return the source that has a tensor, or the tensor behind a view."""
        # A view shares its base's storage.
        memory = tensor.untyped_storage()._cdata
        for table in self.tables:
            for step, value in table.before.items():
                tensors = [
                    x
                    for x in pytree.tree_leaves(value)
                    if isinstance(x, Tensor) and x.layout is torch.strided
                ]
                if step_name(step) not in KEPT_BY_TORCH and any(
                    x.untyped_storage()._cdata == memory for x in tensors
                ):
                    return table.source.at(step)
        return None


def _inside(uses: set[str]) -> set[str]:
    """Return how a value's items are used."""
    return {use[2:] for use in uses if use[:2] == "[]" and use != "[]="} | uses & _READ
