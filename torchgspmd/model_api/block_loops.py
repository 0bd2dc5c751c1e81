"""A loop over stacked blocks: its calls have to be a chain, since all of them run as one.

    for block in blocks:            blocks 0 to n - 2 return values without numbers;
        x = block(x, mask)          block n - 1 runs all blocks on x, and returns the last result

    for block in blocks:            a block may return more than the next one takes, and take more
        x, first = block(x, first)  than one value of the blocks before: block_routes.py

A block that gets no value of the blocks before raises. An operation on a value between two blocks
is a part of the program of the block before it (block_works.py). Values that are read behind the
loop are a part of the state. Blocks may get arguments of their own (BlockArguments).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..capture import is_capturing
from ..capture.state.state_inputs import Retrace
from ..capture.trace_context import current_sites
from ..capture.traced_values import (
    are_same_operations,
    is_computed_leaf,
    operands_read,
    reads_directly,
)
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .between_blocks import (
    Between,
    BlockWork,
    Origin,
    RecordedStep,
    apart,
    misused,
    results_of_loops,
)
from .block_calls import of_blocks
from .block_hooks import call_hooks, leaves_of, seen_by_hooks
from .block_routes import BlockCall, BlockResults, RoutedCalls, find_route
from .block_works import CallsWithWorks
from .state_routes import EachArguments, SharedArguments, check_alike, is_same

# By module: the loop whose results are known, while pipeline_model runs a forward again.
first_loops: ContextVar[dict[nn.Module, BlockLoop] | None] = ContextVar("first", default=None)
# The loops over a module by `blocks[i]`, until the last block has run.
_by_index: WeakKeyDictionary[nn.Module, BlockLoop] = WeakKeyDictionary()
_WANTED = "between"  # begins a key of a value that is read behind its loop


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
        self.steps: list[list[RecordedStep]] = []  # of the operations behind each block
        self.works = CallsWithWorks([], [], kinds, ())
        self.routed: RoutedCalls | None = None
        self.first: BlockLoop | None = None
        self.results: list[Any] | None = None  # of a lone block's last call, as leaves
        self.found: dict[Origin, Any] | None = None  # values behind the loop, which has run
        # The values that the caller's code has.
        self.values = WeakSet[Between]()

    def call(self, number: int, *args: object, **kwargs: object) -> Any:
        if not is_capturing() or self.module.runs_in_turn():
            return self.run_one(number, *args, **kwargs)
        has_run = self.found is not None and not number
        args, kwargs = pytree.tree_map_only(
            Between,
            lambda x: x if x.loop is self and not has_run else x.loop.result(x),
            (args, kwargs),
        )
        if self.module.is_repeated:
            number, args, kwargs = self._again(args, kwargs)
        if number > len(self.calls):
            raise misused(
                f"block {number} is called before block {len(self.calls)}",
                "pass the blocks in the order in which forward calls them, and call each",
            )
        if number < len(self.calls) and number and self.found is None:
            raise misused(f"block {number} is called a second time", "call each block once")
        # A recomputed call has its value already.
        del self.calls[number:], self.steps[number:]
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not number:
            loops, self.found = first_loops.get(), None
            first = self if loops is None else loops.setdefault(self.module, self)
            self.first = None if first is self else first
        before = {path: leaf for path, leaf in self.calls[-1].named()} if self.calls else {}
        own = [x.copy() if isinstance(x, Between) else x for x in leaves]
        call = BlockCall(own, tree, BlockResults([], None, [], []))
        passed = {path: leaf for path, leaf in call.named() if isinstance(leaf, Between)}
        if number and not passed:
            raise misused(
                f"block {number} does not get the result of block {number - 1}",
                "pass it as a tensor, or in a tuple, list or dict; a dataclass after "
                "torch.export.register_dataclass(its class)",
            )
        for path, leaf in passed.items():
            if leaf.origin[0] >= number:
                raise misused(f"block {number} gets a value that is no result of a block before")
            check_alike(self.what, before.get(path, leaf), leaf)
        results = self._results(number, call)
        is_again = self.found is not None and bool(number)
        rows = (0, 0)
        if self.first is not None:
            rows = _rows(self.first.calls[number].leaves), _rows(leaves)
        self.calls.append(call._replace(results=results))
        self.steps.append([])
        returned = self._between(results.leaves, number, 0, rows)
        count = results.tree.num_leaves
        if results.seen and not is_again:
            inner = call_hooks(results.seen, returned[count:])
            if inner and self.first is None:
                learn = partial(self.module.inner_hooks.extend, inner)
                raise Retrace("hooks of its blocks change values", learn)
        returned = returned[:count]
        if number < len(self.kinds) - 1 or self.module.is_repeated:
            return pytree.tree_unflatten(returned, results.tree)
        # The operations behind the last block may be those behind the others.
        if not self.steps[number - 1 :][0]:
            self._run_all()
            returned = [self.found_or(x) for x in returned]
        return pytree.tree_unflatten(returned, results.tree)

    def _between(
        self, results: Sequence[Any], number: int, start: int, rows: tuple[int, int] = (0, 0)
    ) -> list[Any]:
        """Return values that stand for results of a block, or of the work behind it."""
        found = [
            Between.like(x, (number, start + i), self, rows) if isinstance(x, Tensor) else x
            for i, x in enumerate(results)
        ]
        self.values.update(x for x in found if isinstance(x, Between))
        return found

    def _again(self, args: Any, kwargs: Any) -> tuple[int, Any, Any]:
        """Return the number of a lone block's call, and its arguments."""
        if self.results is not None:
            args, kwargs = results_of_loops((args, kwargs))
        if not any(isinstance(x, Between) for x in pytree.tree_leaves((args, kwargs))):
            self.calls, self.steps, self.results = [], [], None
        return len(self.calls), args, kwargs

    def record(self, step: RecordedStep) -> Any:
        """Return the results of an operation between two blocks."""
        is_open = not self.module.is_repeated and self.found is None
        own = [
            x.loop.result(x) if isinstance(x, Between) and x.loop is not self else x
            for x in step.leaves
        ]
        step = step._replace(leaves=tuple(own))
        if is_open and (unit := step.unit()) is not None:
            return unit
        copied = [x.copy() if isinstance(x, Between) else x for x in own]
        copied = step._replace(leaves=tuple(copied))
        is_last = len(self.calls) == len(self.kinds)
        if is_open and is_last and not self.works_now().goes_on(copied):
            self._run_all()
            is_open = False
        if not is_open:
            return step.run(results_of_loops(own))
        with apart(), torch.no_grad():
            results = step.like_values()
        leaves, tree = pytree.tree_flatten(results)
        number = len(self.calls) - 1
        start = len(self.calls[-1].results.leaves) + sum(len(s.results) for s in self.steps[-1])
        self.steps[-1].append(copied._replace(results=tuple(leaves)))
        returned = self._between(leaves, number, start)
        if is_last and len(self.steps[-1]) == len(self.steps[-2]):
            self._run_all()
            returned = [self.found_or(x) for x in returned]
        return pytree.tree_unflatten(returned, tree)

    def works_now(self) -> CallsWithWorks:
        return CallsWithWorks(self.calls, self.steps, self.kinds, self._wanted())

    def found_or(self, x: Any) -> Any:
        """Return a value that is known behind the loop; itself, if it is none of these."""
        return x if not isinstance(x, Between) else (self.found or {}).get(x.origin, x)

    def result(self, x: Between) -> Any:
        """Return a value behind the loop."""
        block, number = x.origin
        if self.module.is_repeated:
            if block != len(self.calls) - 1:
                raise misused("an operation reads a value between two blocks")
            if self.results is None:
                self.results = pytree.tree_leaves(self._run_all())
            return self.results[number]
        if self.found is None:
            if len(self.calls) < len(self.kinds):
                raise misused(
                    f"a value is read, and block {len(self.calls)} is not called",
                    "leave out of the list the blocks that forward does not call",
                )
            self._run_all()
        assert self.found is not None
        if x.origin not in self.found:
            if not self._is_computable(x.origin):
                raise self._not_found(x)
            place = self.works.place_of(x.origin)
            assert place is not None
            step = self.steps[block][place[0]]
            results = step.run(results_of_loops(step.leaves))
            for i, each in enumerate(pytree.tree_leaves(results)):
                self.found[block, place[1] + i] = each
        return self.found[x.origin]

    def _is_computable(self, origin: Origin) -> bool:
        """Return whether a value behind the loop is known, or computed from others that are."""
        if origin in (self.found or {}):
            return True
        if (place := self.works.place_of(origin)) is None:
            return False
        leaves = self.steps[origin[0]][place[0]].leaves
        return all(self._is_computable(x.origin) for x in leaves if isinstance(x, Between))

    def _wanted(self) -> list[Origin]:
        """Return the values that a trace before has read behind the loop."""
        sites = current_sites()
        keys = [key.split() for key in sites.kept] if sites else []
        of_self = [key for key in keys if key[:2] == [_WANTED, str(id(self.module))]]
        return sorted((int(block), int(number)) for _, _, block, number in of_self)

    def _not_found(self, x: Between) -> BaseException:
        """Return the error for a value that the blocks' program does not return yet."""
        sites, known = current_sites(), {*self._wanted()}
        if sites is None or x.origin in known:
            return misused("an operation reads a value between two blocks")
        # A list of the values that all blocks return is read one by one.
        origins = {y.origin for y in self.values if y.origin[1] == x.origin[1]} | {x.origin}
        keys = {f"{_WANTED} {id(self.module)} {block} {number}" for block, number in origins}
        kept = sites.kept
        return Retrace("it reads results of blocks behind their loop", lambda: kept.update(keys))

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
        values = [x.value if isinstance(x, Between) else x for x in leaves]
        args, kwargs, *works = pytree.tree_unflatten(values, call.tree)

        def run() -> tuple[list[Any], Any]:
            with seen_by_hooks(self.module.whole(number), self._inner()) as seen:
                leaves, tree = pytree.tree_flatten(self.run_one(number, *args, **kwargs))
            leaves += leaves_of(seen)
            return BlockWork.all_results(works, (args, kwargs), leaves), (tree, seen)

        return run

    def _inner(self) -> Any:
        """Return the hooks that run in the blocks' program; None for all."""
        return None if self.module.is_repeated else self.module.inner_hooks

    def _run_alone(self, number: int, call: BlockCall) -> BlockResults:
        values = [x.value if isinstance(x, Between) else x for x in call.leaves]
        with apart(), torch.no_grad():
            (results, (tree, seen)), reads = operands_read(self._run(number, call, values), values)
        same = [_same(x, values) for x in results]
        return BlockResults(results, tree, reads, same, frozenset(), tuple(seen))

    def computed(self, number: int, call: BlockCall, leaves: Sequence[object]) -> list[Any]:
        """Return the leaves of a block's results."""
        with apart():
            results, _ = self._run(number, call, leaves)()
        # A checkpoint's own zeros ask for a gradient, which nothing wants.
        return [x.detach() if is_computed_leaf(x) else x for x in results]

    def is_same(
        self, number: int, call: BlockCall, leaves: Sequence[object], results: Sequence[int]
    ) -> bool:
        """Return whether a block computes these results as it did, and reads no additions."""
        with apart(), torch.no_grad():
            found, _ = self._run(number, call, leaves)()
        before = [call.results.leaves[i] for i in results]
        shared = are_same_operations(before, [found[i] for i in results])
        additions = [x for x in self.module.whole(number).parameters() if x is not None]
        own = additions if number in self.module.additions else []
        return shared is not None and not reads_directly(shared, own)

    def _run_all(self) -> Any:
        """Run all blocks; return the last one's results."""
        if self.first is not None:
            self.routed, self.works = self.first.routed, self.first.works
        else:
            self.works = self.works_now()
            self.routed = find_route(self.works.calls, self, self.works.wanted, self.works.groups)
        _by_index.pop(self.module, None)
        last = self.calls[-1].results
        if self.routed is None:
            each = [pytree.tree_unflatten(call.leaves, call.tree) for call in self.calls]
            has_seen = any(call.results.seen for call in self.calls)
            shared = [SharedArguments(tuple(a[1:]), k, has_called_hooks=has_seen) for a, k in each]
            whole = self.module(each[0][0][0], EachArguments(shared))
            leaves = pytree.tree_leaves(whole)
            self.found = {(len(self.calls) - 1, i): x for i, x in enumerate(leaves)}
            return whole
        hooked = not self.module.is_repeated
        shared = [
            SharedArguments(*arguments)._replace(has_called_hooks=hooked)
            for arguments in self.routed.arguments
        ]
        each = EachArguments(shared)
        each.filled = self.routed.filled
        state = self.module(self.routed.state, each)
        self.found = {
            self.works.raw(origin): place.read(state) for origin, place in self.routed.final
        }
        number = len(self.calls) - 1
        returned = self._between(last.leaves, number, 0)[: last.tree.num_leaves]
        return pytree.tree_unflatten([self.found_or(x) for x in returned], last.tree)


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
    if isinstance(one, Between) and isinstance(other, Between):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_same(one, other)
