"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:        block 0 keeps x; blocks 0 to n - 2 return a value without numbers;
        x = block(x, mask)      block n - 1 runs all blocks on x and returns the last result

A block that gets another value than its predecessor's raises. So does every operation on a value
between two blocks: no program computes it. Blocks may get arguments of their own (BlockArguments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..capture import is_capturing
from ..compat.patches import setting
from ..compat.private_apis import DisableTorchFunction
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .alike import Own, keeps_own, numbers_of, own_names

_MISSING = object()
_OF_MODULES = frozenset(vars(nn.Module()))
_numbers: ContextVar[tuple[int, ...]] = ContextVar("numbers", default=())
# In a module's __dict__: attribute -> each block's value and its Column's number, by block.
_VALUES = "_values_of_blocks"

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}


def misused(what: str) -> ShardingError:
    return ShardingError.here(
        f"{what} in a loop over blocks that run as one",
        why="the loop of a stack or pipeline computes `x = block(x, ...)` for all blocks at once",
        fix="put what stands between two calls into the blocks, and pass all blocks the same",
    )


class _Between(Tensor):
    """A value between two blocks, which has a shape and no numbers."""

    @staticmethod
    def like(x: Tensor) -> Tensor:
        """Return one with a tensor's shape and type."""
        return Tensor._make_wrapper_subclass(_Between, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _FACTS:
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        raise misused(f"{getattr(func, '__name__', func)} reads a value between two blocks")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise misused(f"{func} reads a value between two blocks")


class SharedArguments(NamedTuple):
    """Arguments of a block, besides the previous block's result."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class EachArguments(tuple[SharedArguments, ...]):
    """The arguments of each block, as a loop over the blocks has passed them."""


class BlockCalls:
    """The calls of one loop over blocks.

    count: the blocks. run_all: runs all blocks, on a value and EachArguments. run_one: runs the
    block with a number.
    """

    def __init__(
        self, count: int, run_all: Callable[..., Any], run_one: Callable[..., Any]
    ) -> None:
        self.count, self.run_all, self.run_one = count, run_all, run_one
        self.first: Any = None
        self.arguments: list[SharedArguments] = []
        self.between: list[tuple[list[Any], Any]] = []

    def call(self, number: int, x: object, *args: object, **kwargs: object) -> Any:
        if not is_capturing():
            return self.run_one(number, x, *args, **kwargs)
        taken = pytree.tree_flatten(x)
        if not number:
            self.first, self.between = x, []
        elif len(self.between) < number or not _are_same(taken, self.between[number - 1]):
            raise misused(f"block {number} does not get the result of block {number - 1}")
        self.arguments[number:] = [SharedArguments(args, kwargs)]
        if number == self.count - 1:
            return self.run_all(self.first, EachArguments(self.arguments))
        leaves = [_Between.like(x) if isinstance(x, Tensor) else x for x in taken[0]]
        # A recomputed call has its value already.
        self.between[number:] = [(leaves, taken[1])]
        return pytree.tree_unflatten(leaves, taken[1])


class BlockPlace(nn.Module):
    """A block in a loop. Its attributes are those of the block that stands for all."""

    def __init__(self, block: nn.Module, calls: BlockCalls, number: int) -> None:
        super().__init__()
        # No submodule: a loop adds no modules to the model.
        vars(self).update(_block=block, _calls=calls, _number=number)
        self.training = block.training

    def __getattr__(self, name: str) -> Any:
        with of_blocks(vars(self)["_number"]):
            return getattr(vars(self)["_block"], name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardingError.here(
            f"block {self._number} of a loop over stacked blocks is asked for its parameters",
            why="all blocks' weights are rows of one parameter",
            fix="freeze blocks, and register hooks, before they are stacked",
        )

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        return self._calls.call(self._number, x, *args, **kwargs)


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Return whether two flat trees have the same tensors, and equal other leaves."""
    return one[1] == other[1] and all(map(is_same, one[0], other[0]))


def is_same(one: object, other: object) -> bool:
    """Return whether two leaves are one tensor, or equal other values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one is other or bool(one == other)


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
