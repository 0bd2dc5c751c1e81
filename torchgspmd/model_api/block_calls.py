"""Attributes in which like blocks differ, and what of a block no other block can stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..capture import is_capturing
from ..compat.patches import setting
from ..errors import ShardingError
from .alike import Own, keeps_own, numbers_of, own_names

_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))
_numbers: ContextVar[tuple[int, ...]] = ContextVar("numbers", default=())
# In a module's __dict__: attribute -> each block's value and its Column's number, by block.
_VALUES = "_values_of_blocks"


# blocks[0].layer_idx = 0; blocks[1].layer_idx = 1    ->    block.layer_idx: 0, 1
# A loop over the blocks and eager code read each block's own value. In a program for several
# blocks a read raises, unless these have one value.
def of_blocks(*numbers: int) -> AbstractContextManager[tuple[int, ...]]:
    """Give differing attributes the value that the blocks with these numbers have."""
    return setting(_numbers, numbers)


class Column(NamedTuple):
    """An attribute's value in each of some blocks, and numbers, equal for those that are alike."""

    values: list[Any]
    numbers: list[int]


def differing_attributes(blocks: Sequence[nn.Module]) -> dict[str, dict[str, Column]]:
    """Return the attributes in which like blocks differ: by module, attribute and block."""
    named = [dict(each.named_modules()) for each in blocks]
    owns = [own_names(each) for each in blocks]
    found = {name: _differing([each[name] for each in named], owns) for name in named[0]}
    return {name: differing for name, differing in found.items() if differing}


def description(block: nn.Module) -> dict[str, object]:
    """Return the types of a block's modules, and shapes of its tensors, by their names."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    types = {name or type(m).__name__: type(m) for name, m in block.named_modules()}
    return {**types, **{name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}}


def without_additions(
    blocks: Sequence[nn.Module],
) -> tuple[list[nn.Module], dict[int, nn.Module]]:
    """Take the modules and tensors from blocks that other blocks lack.

    Returns:
        The blocks, and by number those that have more, without the parameters that all have.
    """
    described = [description(block) for block in blocks]
    alike, additions = [*blocks], dict[int, nn.Module]()
    for number, (block, own) in enumerate(zip(blocks, described)):
        smaller = [each for each in described if each.items() < own.items()]
        if smaller:
            least = min(smaller, key=len)
            alike[number], rest = (_shared_copy(block) for _ in range(2))
            for table, last in _entries(alike[number], own.keys() - least.keys()):
                del table[last]
            shared = {name for name, _ in block.named_parameters()} & least.keys()
            for table, last in _entries(rest, shared):
                # functional_call puts a tensor in the place of a parameter that is None.
                table[last] = None
            additions[number] = rest
    return alike, additions


def _shared_copy(block: nn.Module) -> nn.Module:
    """Return a copy of a block that has the block's parameters."""
    return copy.deepcopy(block, {id(x): x for x in block.parameters()})


def _entries(block: nn.Module, names: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables of a block's modules that have these names, and the key of each."""
    modules = dict(block.named_modules())
    for owner, _, last in (name.rpartition(".") for name in names):
        tables = (vars(modules[owner])[key] for key in ("_parameters", "_modules", "_buffers"))
        yield from ((table, last) for table in tables if last in table)


def hooks_of(block: nn.Module) -> list[object]:
    """Return the hooks of a block's modules, numbered in each module as they were registered."""
    found: list[object] = []
    for name, module in block.named_modules():
        tables = {key: value for key, value in vars(module).items() if _is_of_hooks(key)}
        order = sorted({number for table in tables.values() for number in table or ()})
        found += [
            (name, key, [(order.index(number), table[number]) for number in table])
            for key, table in tables.items()
            if table
        ]
    return found


def check_weights(blocks: Sequence[nn.Module], what: str) -> None:
    """Raise ShardingError if rows of stacked weights cannot stand for the blocks' own weights."""
    owner: dict[int, str] = {}
    for number, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            before = owner.setdefault(id(weight), named := f"{number}.{name}")
            if before != named:
                raise ShardingError.here(
                    f"blocks of a {what} share a weight: {named} is {before}",
                    why="each block has a row of the stacked weights, which a step changes alone",
                    fix="call a block that all share in a loop (for _ in range(n): x = block(x)), "
                    f"or make a weight that they share an argument of the {what}",
                )
            # Tensor has no public way to ask for its hooks.
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise ShardingError.here(
                    f"{named} of a {what} has a hook for its gradient",
                    why=f"the {what} has other parameters, in which all blocks' weights are rows",
                    fix=f"register it on the parameters of the {what}",
                )
        _check_closures(block, f"block {number} of a {what}")


def _check_closures(block: nn.Module, what: str) -> None:
    """Raise ShardingError if a function that replaces a method, or a hook, has the block itself."""
    own = own_names(block)
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            functions = value.values() if isinstance(value, dict) else (value,)
            if any(keeps_own(each, own) for each in functions):
                raise ShardingError.here(
                    f"{f'{name}.{key}'.lstrip('.')} of {what} is a function that keeps the block",
                    why="a copy of the block, with other weights, runs in its place",
                    fix="write it into the class, or bind it: types.MethodType(function, module)",
                )


def _is_of_hooks(key: str) -> bool:
    return "_hooks" in key and key in _OF_MODULES


def separate(block: nn.Module, blocks: Mapping[int, nn.Module], what: str) -> None:
    """Give a block, which stands for others, the attributes in which they differ.

    blocks: these, by number. what: the name of the module that runs them.
    """
    owns = [own_names(each) for each in blocks.values()]
    for name, differing in differing_attributes([*blocks.values()]).items():
        module = block.get_submodule(name)
        for key in differing:
            vars(module).pop(key, None)
        vars(module)[_VALUES] = {
            key: {
                number: (_rebound(value, own, block), kind)
                for number, own, value, kind in zip(blocks, owns, *column)
            }
            for key, column in differing.items()
        }
        paths = {key: f"{name}.{key}".lstrip(".") for key in differing}
        _watch(module, type(module), {key: _Differing(path, what) for key, path in paths.items()})


def _rebound(value: object, own: Own, block: nn.Module) -> object:
    """Bind a method of a part of a block to the same part of the block that stands for it."""
    if not isinstance(value, MethodType) or (name := own.get(id(value.__self__))) is None:
        return value
    return MethodType(value.__func__, block.get_submodule(name))


def _watch(module: nn.Module, kind: Any, attributes: Mapping[str, _Differing]) -> None:
    """Give a module a class of its own, as torch's fully_shard does: it watches attributes."""
    names = {**attributes, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), names) if attributes else kind


def _differing(modules: Sequence[nn.Module], owns: Sequence[Own]) -> dict[str, Column]:
    """Return the attributes in which modules differ, with the value of each."""
    found: dict[str, Column] = {}
    for key in dict.fromkeys(key for module in modules for key in vars(module)):
        if not _is_of_hooks(key):
            values = [vars(module).get(key, _MISSING) for module in modules]
            if any(numbers := numbers_of(values, owns)):
                found[key] = Column(values, numbers)
    return found


class _Differing:
    """Reads the attribute of the block that runs; raises in a program for all blocks."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        self.key = path.rpartition(".")[2]

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        values: dict[int, tuple[Any, int]] = vars(module)[_VALUES][self.key]
        asked = [values[number] for number in _numbers.get()] or [*values.values()]
        if is_capturing() and len({number for _, number in asked}) > 1:
            shown = ("none" if v is _MISSING else _short(v) for v, _ in values.values())
            different = [*dict.fromkeys(shown)]
            raise ShardingError.here(
                f"the blocks of a {self.what} read {self.path}, which differs: "
                f"{', '.join(different[:4])}{', ...' * (len(different) > 4)}",
                why="blocks at one place of their groups run one program",
                fix="make it a parameter or an argument, set it alike in all blocks, or leave out "
                "what reads it, such as a cache (use_cache=False)",
            )
        value, _ = asked[0]
        return getattr(super(self.owner, module), self.key) if value is _MISSING else value

    def __set__(self, module: nn.Module, value: object) -> None:
        # All blocks have it from now on, as an attribute like others.
        watching = type(module)
        rest = {k: v for k, v in vars(watching).items() if isinstance(v, _Differing)}
        del rest[self.key], vars(module)[_VALUES][self.key]
        _watch(module, watching.__bases__[0], rest)
        vars(module)[self.key] = value


def _short(value: object) -> str:
    if isinstance(value, Tensor):  # a trace refuses to print its numbers
        return f"a tensor {[*value.shape]}"
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."
