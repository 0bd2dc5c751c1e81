"""Writes: values that a program leaves in arguments' containers, modules and others.

    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, self.key(x)], 1)    # args[1].keys = output 1
        self.loss = cache.keys.square().mean()                  # self.loss = output 2

The program is traced on copies of the caller's containers (object_trees.py). These are compared
before and after the trace, and every run repeats the writes on its own arguments. In attributes,
and in everything else that is no argument, tensors and plain values are written (mutations.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from .object_trees import closed, is_object, opened, taken_apart
from .source import ABSENT, ARGUMENTS, LISTS, Attribute, Source, Step, components, set_component
from .symbolic_numbers import Computed, source_of, specialize_tree, to_computed

_PLAIN = (bool, int, float, complex, str, type(None))
SET, EXTEND, REPLACE = "set", "extend", "replace"


@dataclass(frozen=True)
class FromOutput:
    """A tensor that the program computes: the index of its output."""

    output: int


@dataclass(frozen=True)
class Write:
    """A value that every run writes to a source.

    The value is a pytree with FromOutput in place of tensors, Computed in place of numbers. A
    Source stands for a value that the arguments had before. ABSENT removes the present value. A
    list is extended by the value, or all its items are replaced.
    """

    source: Source
    value: Any
    how: str = SET

    def resolve_numbers(self, is_late: bool) -> Write:
        """Return the write without symbolic numbers: with Computed, or with numbers.

        is_late: the backward writes it, after forward's writes.
        """
        if not is_late:
            return replace(self, value=to_computed(self.value))
        is_same = self.how == SET and source_of(self.value) == self.source
        return replace(self, value=(to_computed if is_same else specialize_tree)(self.value))

    def output_sources(self) -> Iterator[tuple[Source, int]]:
        """Yield source and output index for each tensor that the program computes."""
        if self.how == SET:
            yield from _output_sources(self.source, self.value)


def apply_writes(
    writes: Sequence[Write], outputs: Sequence[object], arguments: object = None
) -> None:
    """Repeat a program's writes. arguments: this call's (args, kwargs).

    All values are computed before any is written.
    """

    def fill_leaf(leaf: object) -> object:
        if isinstance(leaf, FromOutput):
            return outputs[leaf.output]
        return leaf.now() if isinstance(leaf, Computed) else leaf

    def fill(value: object) -> Any:
        if isinstance(value, Source):
            return value.read(arguments)
        return closed(pytree.tree_map(fill_leaf, value), arguments)

    filled = []
    for write in writes:
        # Only an argument's list mixes items from before with new ones.
        has_sources = write.how == REPLACE and write.source.root is ARGUMENTS
        value = [*map(fill, write.value)] if has_sources else fill(write.value)
        source = write.source
        filled.append(
            (source.holder(arguments), source.steps[-1], value)
            if write.how == SET
            else (source.read(arguments), write.how, value)
        )
    # Nothing is read from here on, so a write cannot change another one's value.
    for write, (container, step, value) in zip(writes, filled):
        if write.how == SET:
            set_component(container, step, value)
        else:
            _set_items(container, value, write.how == REPLACE)


def _set_items(container: Any, items: list, is_whole: bool) -> None:
    if is_whole:
        container.clear()
    container.extend(items)


class WatchedArguments:
    """The containers in a trace's arguments, and their components before it."""

    def __init__(self, tree: object) -> None:
        self.before = [
            (source, container, components(container))
            for source, container in _containers(tree, Source(ARGUMENTS), set())
        ]
        self.origins = {
            id(container): source
            for source, container, _ in self.before
            if not isinstance(container, (tuple, dict, *LISTS))
        }

    def writes(self, outputs: list[Tensor]) -> list[Write]:
        """Return the program's writes to the containers.

        Tensors are appended to the program's outputs if they are none yet.
        """
        writes = []
        for source, container, old in self.before:
            steps = {
                id(value): step for step, value in old.items() if not isinstance(value, _PLAIN)
            }

            def resolve(value: object, steps: dict = steps, source: Source = source) -> Any:
                # A value from before is each run's own, so its place is written, not the value.
                if id(value) in steps:
                    return source.at(steps[id(value)])
                return replace_tensors(specialize_tree(value), outputs, self.origins)

            items, changed = _difference(container, old, components(container))
            if items is not None:
                writes.append(Write(source, [*map(resolve, items)], REPLACE))
            writes += [
                Write(source.at(step), value if value is ABSENT else resolve(value))
                for step, value in changed.items()
            ]
        return writes

    def tensors(self) -> dict[Source, Tensor]:
        """Return the tensors that were in the containers, by their sources."""
        return {
            source.at(step): value
            for source, _, old in self.before
            for step, value in old.items()
            if isinstance(value, Tensor)
        }

    def restore(self) -> None:
        for _, container, old in self.before:
            items, changed = _difference(container, components(container), old)
            if items is not None:
                _set_items(container, items, True)
            for step, value in changed.items():
                set_component(container, step, value)


def tensor_sources(arguments: tuple[tuple, dict]) -> dict[int, Source]:
    """Return a source for each tensor, by its id, that another tensor can replace.

    It is in a list, a dict or an object; an argument itself is the caller's variable.
    """
    return {
        id(value): source.at(step)
        for source, container in _containers(arguments, Source(ARGUMENTS), set())
        if len(source.steps) > 1 and not isinstance(container, tuple)
        for step, value in components(container).items()
        if isinstance(value, Tensor)
    }


def replace_tensors(
    value: object, outputs: list[Tensor], origins: Mapping[int, Source] | None = None
) -> object:
    """Return the value with FromOutput in place of tensors, which are appended to the outputs."""
    return pytree.tree_map_only(
        Tensor,
        lambda tensor: FromOutput(_output_index(tensor, outputs)),
        opened(taken_apart(value), origins),
    )


def _output_sources(source: Source, value: object) -> Iterator[tuple[Source, int]]:
    if isinstance(value, FromOutput):
        yield source, value.output
    elif isinstance(value, (dict, tuple, *LISTS)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _output_sources(source.at(key), item)


def _containers(value: object, source: Source, seen: set[int]) -> Iterator[tuple[Source, object]]:
    if not (isinstance(value, (dict, tuple, *LISTS)) or is_object(value)) or id(value) in seen:
        return
    seen.add(id(value))
    yield source, value
    for step, item in components(value).items():
        yield from _containers(item, source.at(step), seen)


def _difference(
    container: object, old: dict[Step, Any], new: dict[Step, Any]
) -> tuple[list | None, dict[Step, object]]:
    """Return (items, components) that turn old into new, ABSENT for components to remove.

    A list's items are written together. They are None if none has changed.
    """
    changed = {
        step: new.get(step, ABSENT)
        for step in (*new, *(step for step in old if step not in new))
        if step not in old or step not in new or not _is_same(new[step], old[step])
    }
    attributes = {step: value for step, value in changed.items() if isinstance(step, Attribute)}
    if not isinstance(container, LISTS) or len(attributes) == len(changed):
        return None, changed
    return [value for step, value in new.items() if not isinstance(step, Attribute)], attributes


def _is_same(now: object, old: object) -> bool:
    return now is old or type(now) is type(old) and isinstance(now, _PLAIN) and now == old


def _output_index(tensor: Tensor, outputs: list[Tensor]) -> int:
    """Return a tensor's index among the outputs; append it if it is none."""
    place = next((i for i, output in enumerate(outputs) if output is tensor), len(outputs))
    if place == len(outputs):
        outputs.append(tensor)
    return place


def rebound_parameters(
    module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return the parameters that forward rebinds, by input index.

        self.weight = nn.Parameter(0.9 * self.weight + ...)

    Raises ShardingError if forward adds or removes a parameter.
    """
    now = dict(module.named_parameters())
    for name in now.keys() ^ names:
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._parameters.pop(last, None)  # no fake tensor stays
        raise ShardingError.here(
            f"forward {'makes' if name in now else 'takes away'} parameter '{name}'",
            why="a program has those that the module has before",
            fix="make it in __init__, and keep it",
        )
    rebound: dict[int, Tensor] = {
        i: now[name]
        for i, (name, tensor) in enumerate(zip(names, inputs))
        if now[name] is not tensor
    }
    for i, tensor in rebound.items():
        check_alike(f"parameter '{names[i]}'", inputs[i], tensor)
    return rebound


def rebound_buffers(
    module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return the buffers that forward rebinds to a tensor with the same shape and type.

        self.mean = 0.9 * self.mean + ...

    The keys are input indices. A tensor with another shape or type counts as a new attribute.
    """
    now = dict(module.named_buffers())
    return {
        i: now[name]
        for i, (name, tensor) in enumerate(zip(names, inputs))
        if name in now
        and now[name] is not tensor
        and now[name].shape == tensor.shape
        and now[name].dtype == tensor.dtype
    }


def check_alike(what: str, old: Tensor, new: Tensor) -> None:
    """Raise ShardingError if a tensor cannot take another tensor's data."""
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShardingError.here(
            f"{what}, {old.dtype} of shape {list(old.shape)}, is given data of {new.dtype} "
            f"and shape {list(new.shape)}",
            why="a tensor of a program keeps its type and shape",
            fix="cast it before: call the model once on one device, or its module's to()"
            if new.shape == old.shape
            else "register a buffer, and assign a new tensor to it",
        )
