"""Mutations besides those of tensors: lists, tables and attributes of arguments and modules.

    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, self.key(x)], 1)    # attribute `keys` of argument 1
        self.loss = cache.keys.square().mean()                  # attribute `loss` of the module

The program is traced on copies of the caller's containers (object_trees.py). Mutations of these are
recorded, and every run repeats them on its own arguments. Of attributes, and of everything else
that is no argument, tensors and plain values are written (mutations.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from .object_trees import ATTRIBUTE, ITEM, Key, Path, closed, components, follow, is_object, opened
from .places import LISTS
from .symbolic_numbers import Computed, specialize_tree, to_computed, to_computed_at
from .variable_tables import Table

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Unchanged:
    """A component that the container had before."""

    key: Key


@dataclass(frozen=True)
class FromOutput:
    """A tensor that the program computes: the index of its output."""

    output: int


@dataclass(frozen=True)
class ArgumentMutation:
    """The mutation of one container among the arguments.

    Each new component is Unchanged, or a pytree with FromOutput in place of tensors.
    """

    path: Path  # from (args, kwargs) to the container
    changed: dict[Key, Any]  # all items of a list if one of them changes
    removed: tuple[Key, ...] = ()


@dataclass(frozen=True)
class StateMutation:
    """The mutation of one table or list that is no argument.

    Entries are pytrees with FromOutput in place of tensors.
    """

    root: Table  # attributes of a module, or a table that a function names
    path: tuple  # from there to the table or list: keys
    entries: dict
    removed: tuple  # keys of removed entries
    appended: list  # new items at the end of a list
    is_whole_list: bool = False  # whether the list becomes `appended`

    def fill(self, outputs: Sequence[Any]) -> StateMutation:
        """Return the mutation with the values of this run."""
        return replace(
            self,
            entries={name: _fill(value, outputs, None) for name, value in self.entries.items()},
            appended=_fill(self.appended, outputs, None),
        )

    def write(self) -> None:
        """Write the entries into the table."""
        container: Any = self.root
        for key in self.path:
            container = container[key]
        for name, value in self.entries.items():
            if isinstance(container, LISTS) and name >= len(container):
                continue  # the list has been emptied since the trace
            container[name] = value
        for name in self.removed:
            container.pop(name, None)
        if self.is_whole_list:
            container.clear()
        if self.appended:
            container.extend(self.appended)

    def resolve_numbers(self, is_late: bool) -> StateMutation:
        """Return the mutation without symbolic numbers: with Computed, or with numbers.

        is_late: the backward writes it, after what forward writes.
        """
        if is_late:
            entries = {
                name: to_computed_at(value, self.root, (*self.path, name))
                for name, value in self.entries.items()
            }
            return replace(self, entries=entries, appended=specialize_tree(self.appended))
        return replace(self, entries=to_computed(self.entries), appended=to_computed(self.appended))

    def output_paths(self) -> Iterator[tuple[tuple, int]]:
        """Yield (path from the root, output index) for each tensor that the program computes."""
        for name, value in self.entries.items():
            yield from _output_paths(value, (*self.path, name))


class WatchedArguments:
    """The containers in the arguments of a trace, and their components before it."""

    def __init__(self, tree: Any) -> None:
        self.before = [
            (path, container, components(container))
            for path, container in _containers(tree, (), set())
        ]
        self.origins = {
            id(container): path
            for path, container, _ in self.before
            if not isinstance(container, (list, tuple, dict))
        }

    def mutations(self, outputs: list[Tensor]) -> list[ArgumentMutation]:
        """Return the mutations of the containers.

        Tensors in them are appended to the outputs of the program if they are none yet.
        """
        mutations = []
        for path, container, old in self.before:
            changed, removed = _difference(container, old, components(container))
            if changed or removed:
                keys = {
                    id(value): key for key, value in old.items() if not isinstance(value, _PLAIN)
                }
                mutations.append(
                    ArgumentMutation(
                        path,
                        {
                            key: Unchanged(keys[id(value)])
                            if id(value) in keys
                            else replace_tensors(specialize_tree(value), outputs, self.origins)
                            for key, value in changed.items()
                        },
                        removed,
                    )
                )
        return mutations

    def restore(self) -> None:
        """Restore all containers."""
        for _, container, old in self.before:
            changed, removed = _difference(container, components(container), old)
            if changed or removed:
                _write(container, changed, removed)


def apply_mutations(
    mutations: Sequence[ArgumentMutation], outputs: Sequence[Any], arguments: tuple[tuple, dict]
) -> None:
    """Repeat the mutations on the containers of this call's (args, kwargs)."""
    writes = []
    for mutation in mutations:
        container = follow(mutation.path, arguments)
        old = (
            components(container)
            if any(isinstance(part, Unchanged) for part in mutation.changed.values())
            else {}
        )
        writes.append(
            (
                container,
                {
                    key: old[part.key]
                    if isinstance(part, Unchanged)
                    else _fill(part, outputs, arguments)
                    for key, part in mutation.changed.items()
                },
                mutation.removed,
            )
        )
    for write in writes:
        _write(*write)


def replace_tensors(
    value: Any, outputs: list[Tensor], origins: Mapping[int, Path] | None = None
) -> Any:
    """Return the value with FromOutput in place of tensors, which are appended to the outputs."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: FromOutput(_output_index(tensor, outputs)), opened(value, origins)
    )


def _output_paths(value: Any, path: tuple) -> Iterator[tuple[tuple, int]]:
    if isinstance(value, FromOutput):
        yield path, value.output
    elif isinstance(value, (dict, tuple, *LISTS)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _output_paths(item, (*path, key))


def _fill(part: Any, outputs: Sequence[Any], arguments: Any) -> Any:
    def fill(leaf: Any) -> Any:
        return (
            outputs[leaf.output]
            if isinstance(leaf, FromOutput)
            else leaf.now()
            if isinstance(leaf, Computed)
            else leaf
        )

    return closed(pytree.tree_map(fill, part), arguments)


def _containers(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if not (isinstance(value, (dict, list, tuple)) or is_object(value)) or id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    for key, part in components(value).items():
        yield from _containers(part, (*path, key), seen)


def _is_same(now: Any, old: Any) -> bool:
    return now is old or type(now) is type(old) and isinstance(now, _PLAIN) and now == old


def _difference(
    container: Any, old: dict[Key, Any], new: dict[Key, Any]
) -> tuple[dict[Key, Any], tuple[Key, ...]]:
    """Return the components to write and those to remove to turn old into new.

    A list is written as a whole.
    """
    changed = {
        key: value for key, value in new.items() if key not in old or not _is_same(value, old[key])
    }
    removed = tuple(key for key in old if key not in new)
    if isinstance(container, list) and any(kind == ITEM for kind, _ in (*changed, *removed)):
        changed = {key: value for key, value in new.items() if key in changed or key[0] == ITEM}
    return changed, removed


def _output_index(tensor: Tensor, outputs: list[Tensor]) -> int:
    """Return the index of a tensor among the outputs; append it if it is none."""
    place = next((i for i, output in enumerate(outputs) if output is tensor), len(outputs))
    if place == len(outputs):
        outputs.append(tensor)
    return place


def _write(container: Any, changed: Mapping[Key, Any], removed: Sequence[Key]) -> None:
    if isinstance(container, list) and any(kind == ITEM for kind, _ in (*changed, *removed)):
        container[:] = [value for (kind, _), value in changed.items() if kind == ITEM]
    for kind, name in removed:
        if kind == ATTRIBUTE:
            object.__delattr__(container, name)
        elif not isinstance(container, list):
            del container[name]
    for (kind, name), value in changed.items():
        if kind == ATTRIBUTE:
            object.__setattr__(container, name, value)  # also of a frozen dataclass
        elif not isinstance(container, list):
            container[name] = value
