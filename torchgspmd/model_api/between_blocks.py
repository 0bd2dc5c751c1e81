"""Values between two blocks of a loop, and the operations on them.

for block in blocks:            block k's work: layer_norm(add(argument 0, result 0)); its results
    x = norm(x + block(x))      are those of the block, and those of the work

A value between two blocks has a shape and no numbers. An operation on such values is recorded, and
runs in the program of the block that was called last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..compat.private_apis import DisableTorchFunction
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}
_VIEWS = {"T", "mT", "H", "mH", "real", "imag", "data"}  # attributes that are tensors
Origin = tuple[int, int]  # a block, and the number of its result


def misused(what: str, fix: str = "") -> ShardingError:
    return ShardingError.here(
        f"{what} in a loop over blocks that run as one",
        why="the loop of a stack or pipeline computes `x = block(x, ...)` for all blocks at once",
        fix=fix
        or "put what stands between two calls into the blocks, and pass all blocks the same",
    )


class LoopOfBlocks(Protocol):
    """A loop that has values between its blocks."""

    def record(self, step: RecordedStep) -> Any:
        """Return the results of an operation between two blocks."""
        ...

    def result(self, x: Between) -> Tensor:
        """Return a value behind the loop."""
        ...


class Between(Tensor):
    """A value between two blocks, which has a shape and no numbers.

    origin: the block, and the number of its result; results of its work follow those of the block.
    value: a tensor like it, in a run that no program keeps.
    """

    origin: Origin
    value: Tensor
    loop: LoopOfBlocks

    @staticmethod
    def like(
        x: Tensor, origin: Origin, loop: LoopOfBlocks, rows: tuple[int, int] = (0, 0)
    ) -> Between:
        """Return one with a tensor's shape and type. rows: (before, now), of the batch."""
        shape = [*x.shape]
        if rows[0] and shape and shape[0] % rows[0] == 0:
            shape[0] = shape[0] // rows[0] * rows[1]
        between = Tensor._make_wrapper_subclass(Between, shape, dtype=x.dtype, device=x.device)
        between.origin, between.loop = origin, loop
        between.value = x if shape == [*x.shape] else x.new_zeros(shape)
        return between

    def copy(self, origin: Origin | None = None) -> Between:
        """Return another one, which the caller's code does not have."""
        return Between.like(self.value, origin or self.origin, self.loop)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if (
            name in _FACTS
            and getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
        ):
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        loops = {id(x.loop): x.loop for x in leaves if isinstance(x, Between)}
        step = RecordedStep(func, tuple(leaves), tree)
        # The values of several loops are those behind all but the last.
        return [*loops.values()][-1].record(step)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise misused(f"{func} reads a value between two blocks")


def results_of_loops(tree: Any) -> Any:
    """Return a tree with the results of loops, which end here."""
    return pytree.tree_map_only(Between, lambda x: x.loop.result(x), tree)


class RecordedStep(NamedTuple):
    """A call of a function: leaves of its (args, kwargs), and leaves like its results."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    results: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function))

    def run(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten([*leaves], self.tree)
        return self.function(*args, **kwargs)

    def like_values(self) -> Any:
        """Run it on values like its own; raise unless it returns tensors and changes none."""
        found = self.run([x.value if isinstance(x, Between) else x for x in self.leaves])
        results = pytree.tree_leaves(found)
        if self._is_in_place() or not all(isinstance(x, Tensor) for x in results):
            raise misused(
                f"{self.name} reads a value between two blocks",
                "return the value from the loop's model and read it there, or write a change in "
                "place as an operation: x = x + y",
            )
        return found

    def _is_in_place(self) -> bool:
        _, kwargs = pytree.tree_unflatten([*self.leaves], self.tree)
        is_method = self.name.endswith("_") and not self.name.endswith("__")
        return is_method or "out" in kwargs or bool(kwargs.get("inplace"))

    def unit(self) -> Any:
        """Return the operand that a sum is, where the others are the number zero: sum(losses)."""
        values = [x for x in self.leaves if isinstance(x, Tensor)]
        zeros = [x for x in self.leaves if type(x) in (int, float) and x == 0]
        is_sum = self.name.strip("_") in ("add", "radd")
        return values[0] if is_sum and len(values) == len(zeros) == 1 else None


class StepOperand(NamedTuple):
    """An operand of a work's step. kind: "input", "argument", "result" (of the block), "step"."""

    kind: str
    number: int


@dataclass(frozen=True)
class WorkRecipe:
    """The steps of a work: (function, operands, tree)."""

    steps: tuple[tuple[Any, tuple[Any, ...], Any], ...]

    def run(
        self, inputs: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any]
    ) -> list[Tensor]:
        """Return all tensors that the steps compute."""
        found: list[Tensor] = []
        values = {"input": inputs, "argument": arguments, "result": results, "step": found}
        for function, operands, tree in self.steps:
            leaves = [
                values[x.kind][x.number] if isinstance(x, StepOperand) else x for x in operands
            ]
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            found += pytree.tree_leaves(function(*args, **kwargs))
        return found

    def reads(
        self, step_sizes: Sequence[int], reads_of: Callable[[StepOperand], frozenset[int]]
    ) -> Any:
        """Return for each result the numbers of the leaves that it is computed from."""
        found: list[frozenset[int]] = []
        for (_, operands, _), size in zip(self.steps, step_sizes):
            refs = [x for x in operands if isinstance(x, StepOperand)]
            read = [found[x.number] if x.kind == "step" else reads_of(x) for x in refs]
            found += [frozenset[int]().union(*read)] * size
        return found


class BlockWork(NamedTuple):
    """A computation that a block's program has behind the block.

    inputs: its operands from elsewhere. rows: which of them have a row for each batch row.
    """

    recipe: WorkRecipe
    inputs: tuple[Any, ...]
    rows: tuple[bool, ...]

    @staticmethod
    def all_results(works: Any, arguments: object, results: Sequence[Any]) -> list[Any]:
        """Return a block's results, and behind them those of its works."""
        given = pytree.tree_leaves(arguments)
        found = [
            x
            for each in pytree.tree_leaves(works, is_leaf=BlockWork.is_one)
            for x in each.recipe.run(each.inputs, given, results)
        ]
        return [*results, *found]

    @staticmethod
    def is_one(x: object) -> bool:
        return isinstance(x, BlockWork)


class WorkFiller(NamedTuple):
    """Stands for an input of another block's work, whose results are not read."""

    leaf: Any


class PickedRow(NamedTuple):
    """One of the columns of a tensor [rows, columns, ...]. number: an integer tensor []."""

    rows: Any
    number: Any

    def value(self) -> Tensor:
        return self.rows.index_select(1, self.number.view(1)).squeeze(1)

    @staticmethod
    def all_values(tree: Any) -> Any:
        return pytree.tree_map(
            lambda x: x.value() if isinstance(x, PickedRow) else x,
            tree,
            is_leaf=lambda x: isinstance(x, PickedRow),
        )


def one_hot(number: int | None, size: int) -> Tensor:
    return torch.tensor([i == number for i in range(size)])


@contextmanager
def apart() -> Iterator[None]:
    """Keep nothing of a run: operations behind it draw its numbers again, and cast weights anew."""
    state, is_cached = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # without gradients, a weight's cast has none
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        torch.set_rng_state(state)
