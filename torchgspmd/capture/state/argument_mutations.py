"""What a program changes besides tensors: entries of lists and tables, attributes of objects among
its arguments, of its modules.

    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, self.key(x)], 1)                # an effect: attribute keys of argument 1
        self.loss = cache.keys.square().mean()                              # another: attribute loss of the module

It is traced on containers that stand for the caller's (objects.py). What it does to them is written
down, and every run does it to those that are passed then. Of attributes and whatever else is no
argument it is tensors and plain values (rebinding.py).
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
    """A part that the container had before."""

    key: Key


@dataclass(frozen=True)
class FromOutput:
    """A tensor that the program computes: which of its outputs."""

    output: int


@dataclass(frozen=True)
class ArgumentMutation:
    """What becomes of a container: its new parts, each Kept or a pytree with Made in the place of
    tensors; and those it has no more.
    """

    path: Path  # in (args, kwargs)
    changed: dict[Key, Any]  # of a list all, if one of them changes
    gone: tuple[Key, ...] = ()


@dataclass(frozen=True)
class StateMutation:
    """What a program leaves in a table or list that is no argument of it: pytrees with Made in the
    place of tensors.
    """

    root: Table  # attributes of a module, or a table that a function names
    path: tuple  # from there to the table or list: keys
    entries: dict
    gone: tuple  # entries that are there no more
    added: list  # to a list
    whole: bool = False  # whether the list consists of these then

    def fill(self, outputs: Sequence[Any]) -> StateMutation:
        """With what this run has computed."""
        return replace(
            self,
            entries={name: _fill(value, outputs, None) for name, value in self.entries.items()},
            added=_fill(self.added, outputs, None),
        )

    def write(self) -> None:
        container: Any = self.root
        for key in self.path:
            container = container[key]
        for name, value in self.entries.items():
            if isinstance(container, LISTS) and name >= len(
                container
            ):  # it has been emptied meanwhile
                continue
            container[name] = value
        for name in self.gone:
            container.pop(name, None)
        if self.whole:
            container.clear()
        if self.added:
            container.extend(self.added)

    def resolve_numbers(self, is_late: bool) -> StateMutation:
        """With Computed or numbers in the place of each Count. is_late: it is written by the
        backward, after what forward writes.
        """
        if is_late:
            entries = {
                name: to_computed_at(value, self.root, (*self.path, name))
                for name, value in self.entries.items()
            }
            return replace(self, entries=entries, added=specialize_tree(self.added))
        return replace(self, entries=to_computed(self.entries), added=to_computed(self.added))

    def output_paths(self) -> Iterator[tuple[tuple, int]]:
        """Where below the root entries hold tensors that the program computes, and which of its
        outputs.
        """
        for name, value in self.entries.items():
            yield from _output_paths(value, (*self.path, name))


class WatchedArguments:
    """The containers in a structure, and what they consist of at first."""

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

    def effects(self, outputs: list[Tensor]) -> list[ArgumentMutation]:
        """What has changed; the tensors in it are added to the outputs of the program, if they are
        none yet.
        """
        mutations = []
        for path, container, old in self.before:
            changed, gone = _difference(container, old, components(container))
            if changed or gone:
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
                        gone,
                    )
                )
        return mutations

    def restore(self) -> None:
        """All containers as they were."""
        for _, container, old in self.before:
            changed, gone = _difference(container, components(container), old)
            if changed or gone:
                _write(container, changed, gone)


def apply_mutations(
    effects: Sequence[ArgumentMutation], outputs: Sequence[Any], arguments: tuple[tuple, dict]
) -> None:
    """Does to the containers in what is given, (args, kwargs), what the program did to those that
    it was traced with.
    """
    writes = []
    for effect in effects:
        container = follow(effect.path, arguments)
        old = (
            components(container)
            if any(isinstance(part, Unchanged) for part in effect.changed.values())
            else {}
        )
        writes.append(
            (
                container,
                {
                    key: old[part.key]
                    if isinstance(part, Unchanged)
                    else _fill(part, outputs, arguments)
                    for key, part in effect.changed.items()
                },
                effect.gone,
            )
        )
    for write in writes:
        _write(*write)


def replace_tensors(
    value: Any, outputs: list[Tensor], origins: Mapping[int, Path] | None = None
) -> Any:
    """The value with Made in the place of tensors, which are added to the outputs."""
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
    """The parts that are to be written to make new of old, and those to be taken away. A list is
    written as a whole.
    """
    changed = {
        key: value for key, value in new.items() if key not in old or not _is_same(value, old[key])
    }
    gone = tuple(key for key in old if key not in new)
    if isinstance(container, list) and any(kind == ITEM for kind, _ in (*changed, *gone)):
        changed = {key: value for key, value in new.items() if key in changed or key[0] == ITEM}
    return changed, gone


def _output_index(tensor: Tensor, outputs: list[Tensor]) -> int:
    """Where it is among the outputs, as the last one if it was not there."""
    place = next((i for i, output in enumerate(outputs) if output is tensor), len(outputs))
    if place == len(outputs):
        outputs.append(tensor)
    return place


def _write(container: Any, changed: Mapping[Key, Any], gone: Sequence[Key]) -> None:
    if isinstance(container, list) and any(kind == ITEM for kind, _ in (*changed, *gone)):
        container[:] = [value for (kind, _), value in changed.items() if kind == ITEM]
    for kind, name in gone:
        if kind == ATTRIBUTE:
            object.__delattr__(container, name)
        elif not isinstance(container, list):
            del container[name]
    for (kind, name), value in changed.items():
        if kind == ATTRIBUTE:
            object.__setattr__(container, name, value)  # also of a frozen dataclass
        elif not isinstance(container, list):
            container[name] = value
