"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:            blocks 0 to n - 2 return values without numbers;
        x = block(x, mask)          block n - 1 runs all blocks on x, and returns the last result

    for block in blocks:            a block may return more than the next one takes, and take more
        x, first = block(x, first)  than one value of the blocks before: block_routes.py

A block that gets no value of its predecessor's raises. So does every operation on a value between
two blocks: no program computes it. Blocks may get arguments of their own (BlockArguments).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..capture import is_capturing
from ..capture.traced_values import (
    are_same_operations,
    is_computed_leaf,
    operands_read,
    reads_directly,
)
from ..compat.private_apis import DisableTorchFunction
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .block_calls import of_blocks
from .block_routes import BlockCall, BlockResults, Origin, Route, RoutedCalls, find_route

# Reads of a tensor's facts.
_FACTS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}
# By module: the loop whose results are known, while pipeline_model runs a forward again.
first_loops: ContextVar[dict[nn.Module, BlockLoop] | None] = ContextVar("first", default=None)
# The loops over a module by `blocks[i]`, until the last block has run.
_by_index: WeakKeyDictionary[nn.Module, BlockLoop] = WeakKeyDictionary()


def misused(what: str) -> ShardingError:
    return ShardingError.here(
        f"{what} in a loop over blocks that run as one",
        why="the loop of a stack or pipeline computes `x = block(x, ...)` for all blocks at once",
        fix="put what stands between two calls into the blocks, and pass all blocks the same",
    )


class _Between(Tensor):
    """A value between two blocks, which has a shape and no numbers.

    origin: the block, and the number of its result. value: a tensor like it, in a run that no
    program keeps.
    """

    origin: Origin
    value: Tensor
    loop: BlockLoop | None = None  # of a lone block, whose last call is known when it is read

    @staticmethod
    def like(x: Tensor, origin: Origin, rows: tuple[int, int] = (0, 0)) -> Tensor:
        """Return one with a tensor's shape and type. rows: (before, now), of the batch."""
        shape = [*x.shape]
        if shape and shape[0] == rows[0]:
            shape[0] = rows[1]
        between = Tensor._make_wrapper_subclass(_Between, shape, dtype=x.dtype, device=x.device)
        between.origin, between.value = origin, x
        return between

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _FACTS:
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Between)]
        if all(x.loop for x in read):
            args, kwargs = results_of_loops((args, kwargs or {}))
            return func(*args, **kwargs)
        raise misused(f"{getattr(func, '__name__', func)} reads a value between two blocks")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise misused(f"{func} reads a value between two blocks")


def results_of_loops(tree: Any) -> Any:
    """Return a tree with the results of a lone block's loops, which end here."""
    return pytree.tree_map_only(_Between, lambda x: x.loop.result(x) if x.loop else x, tree)


class SharedArguments(NamedTuple):
    """Arguments of a block, besides the previous block's result.

    route: None for `x = block(x, ...)`. Else the arguments are all, with a StateLeaf for each value
    that passes from block to block.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    route: Route | None = None


class EachArguments(tuple[SharedArguments, ...]):
    """The arguments of each block, as a loop over the blocks has passed them.

    filled: blocks that get a value which they would compute alike.
    """

    filled: frozenset[int] = frozenset()


class BlockLoop:
    """The calls of one loop over blocks.

    module: runs all blocks, on a value and EachArguments. kinds: by block; blocks of one kind have
    results alike. run_one: runs the block with a number.
    """

    def __init__(
        self,
        module: Any,
        what: str,
        kinds: Sequence[Hashable],
        run_one: Callable[..., Any],
    ) -> None:
        self.module, self.what, self.kinds, self.run_one = module, what, kinds, run_one
        self.calls: list[BlockCall] = []
        self.routed: RoutedCalls | None = None
        self.first: BlockLoop | None = None
        self.results: list[Any] | None = None  # of a lone block's last call, as leaves

    def call(self, number: int, *args: object, **kwargs: object) -> Any:
        if not is_capturing() or self.module.runs_in_turn():
            return self.run_one(number, *args, **kwargs)
        if self.module.is_repeated:
            number, args, kwargs = self._again(args, kwargs)
        # A recomputed call has its value already.
        del self.calls[number:]
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not number:
            loops = first_loops.get()
            first = self if loops is None else loops.setdefault(self.module, self)
            self.first = None if first is self else first
        before = {path: leaf for path, leaf in self.calls[-1].named()} if self.calls else {}
        call = BlockCall(leaves, tree, [], BlockResults([], None, [], []))
        passed = {path: leaf for path, leaf in call.named() if isinstance(leaf, _Between)}
        if number and not any(self._is_of(number - 1, leaf) for leaf in passed.values()):
            raise misused(f"block {number} does not get the result of block {number - 1}")
        for path, leaf in passed.items():
            if not self._is_of(leaf.origin[0], leaf):
                raise misused(f"block {number} gets a value that is no result of a block before")
            check_alike(self.what, before.get(path, leaf), leaf)
        results = self._results(number, call)
        rows = (0, 0)
        if self.first is not None:
            rows = _rows(self.first.calls[number].leaves), _rows(leaves)
        returned = [
            _Between.like(x, (number, i), rows) if isinstance(x, Tensor) else x
            for i, x in enumerate(results.leaves)
        ]
        self.calls.append(call._replace(returned=returned, results=results))
        if self.module.is_repeated:
            for x in returned:
                if isinstance(x, _Between):
                    x.loop = self
        elif number == len(self.kinds) - 1:
            return self._run_all()
        return pytree.tree_unflatten(returned, results.tree)

    def _again(self, args: Any, kwargs: Any) -> tuple[int, Any, Any]:
        """Return the number of a lone block's call, and its arguments."""
        if self.results is not None:
            args, kwargs = results_of_loops((args, kwargs))
        if not any(isinstance(x, _Between) for x in pytree.tree_leaves((args, kwargs))):
            self.calls, self.results = [], None
        return len(self.calls), args, kwargs

    def result(self, x: _Between) -> Any:
        """Return a result of a lone block's last call, behind which something reads it."""
        if x.origin[0] != len(self.calls) - 1:
            raise misused("an operation reads a value between two blocks")
        if self.results is None:
            self.results = pytree.tree_leaves(self._run_all())
        return self.results[x.origin[1]]

    def _is_of(self, number: int, leaf: _Between) -> bool:
        """Return whether a value is the last result of a block in this loop."""
        block, i = leaf.origin
        return block == number < len(self.calls) and self.calls[block].returned[i] is leaf

    def _results(self, number: int, call: BlockCall) -> BlockResults:
        """Return the results of a block, for a call."""
        if self.first is not None:
            return self.first.calls[number].results
        if number and (self.module.is_repeated or self.kinds[number] == self.kinds[number - 1]):
            before = self.calls[number - 1]
            pairs = zip(before.leaves, call.leaves)
            if before.tree == call.tree and all(_are_alike(a, b) for a, b in pairs):
                return before.results
        return self._run_alone(number, call)

    def _run(
        self, number: int, call: BlockCall, leaves: Sequence[object]
    ) -> Callable[[], tuple[list[Any], Any]]:
        """Return a run of a block in the trace. No program keeps what nothing reads of it."""
        values = [x.value if isinstance(x, _Between) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(values, call.tree)
        return lambda: pytree.tree_flatten(self.run_one(number, *args, **kwargs))

    def _run_alone(self, number: int, call: BlockCall) -> BlockResults:
        values = [x.value if isinstance(x, _Between) else x for x in call.leaves]
        with _apart(), torch.no_grad():
            (results, tree), reads = operands_read(self._run(number, call, values), values)
        return BlockResults(results, tree, reads, [_same(x, values) for x in results])

    def computed(self, number: int, call: BlockCall, leaves: Sequence[object]) -> list[Any]:
        """Return the leaves of a block's results."""
        with _apart():
            results, _ = self._run(number, call, leaves)()
        # A checkpoint's own zeros ask for a gradient, which nothing wants.
        return [x.detach() if is_computed_leaf(x) else x for x in results]

    def is_same(
        self, number: int, call: BlockCall, leaves: Sequence[object], results: Sequence[int]
    ) -> bool:
        """Return whether a block computes these results as it did, and reads no additions."""
        with _apart(), torch.no_grad():
            found, _ = self._run(number, call, leaves)()
        before = [call.results.leaves[i] for i in results]
        shared = are_same_operations(before, [found[i] for i in results])
        additions = [x for x in self.module.whole(number).parameters() if x is not None]
        own = additions if number in self.module.additions else []
        return shared is not None and not reads_directly(shared, own)

    def _run_all(self) -> Any:
        if self.first is not None:
            self.routed = self.first.routed
        else:
            self.routed = find_route(self.calls, self)
        _by_index.pop(self.module, None)
        if self.routed is None:
            each = [pytree.tree_unflatten(call.leaves, call.tree) for call in self.calls]
            shared = [SharedArguments(tuple(a[1:]), k) for a, k in each]
            return self.module(each[0][0][0], EachArguments(shared))
        shared = [SharedArguments(*arguments) for arguments in self.routed.arguments]
        each = EachArguments(shared)
        each.filled = self.routed.filled
        state = self.module(self.routed.state, each)
        returned = [*self.calls[-1].returned]
        for x, i in zip(state, self.routed.arguments[-1][2].results):
            if i is not None:
                returned[i] = x
        return pytree.tree_unflatten(returned, self.calls[-1].results.tree)


def loop_by_index(module: nn.Module, make: Callable[[], BlockLoop]) -> BlockLoop:
    """Return the loop that `blocks[i]` belongs to."""
    return _by_index.setdefault(module, make())


class BlockPlace(nn.Module):
    """A block in a loop. Its attributes are those of the block that stands for all."""

    def __init__(self, block: nn.Module, calls: BlockLoop, number: int) -> None:
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

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._calls.call(self._number, *args, **kwargs)


@contextmanager
def _apart() -> Iterator[None]:
    """Keep nothing of a run: operations behind it draw its numbers again, and cast weights anew."""
    state, is_cached = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # without gradients, a weight's cast has none
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        torch.set_rng_state(state)


def _rows(leaves: Sequence[object]) -> int:
    """Return the rows of the first tensor, the batch's."""
    return next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), 0)


def _same(result: object, values: Sequence[object]) -> int | None:
    """Return the number of the argument that a result is."""
    if not isinstance(result, Tensor):
        return None
    return next((i for i, value in enumerate(values) if value is result), None)


def _are_alike(one: object, other: object) -> bool:
    """Return whether a block's results have one structure for either argument."""
    if isinstance(one, _Between) and isinstance(other, _Between):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_same(one, other)


def is_same(one: object, other: object) -> bool:
    """Return whether two leaves are one tensor, or equal other values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one is other or bool(one == other)


def check_alike(what: str, taken: Any, returned: Any) -> None:
    """Raise unless a block returns a value that the next one can take in its place."""
    before, tree = pytree.tree_flatten(taken)
    after, other = pytree.tree_flatten(returned)
    if all(x is None for x in before):  # the first block makes the value
        return
    if tree != other or _text(before) != _text(after):
        raise ShardingError.here(
            f"a block of a {what} takes {_text(before)} and returns {_text(after)}",
            why="all blocks are one program: their value keeps its shape, dtype and structure",
            fix=f"leave out of the {what} what changes shape, dtype or structure; set param_dtype= "
            "in place of torch.autocast",
        )


def _text(leaves: Sequence[Any]) -> str:
    """Return the dtypes and sizes of leaves."""
    texts = [
        f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" if isinstance(x, Tensor) else repr(x)
        for x in leaves
    ]
    return ", ".join(texts)
