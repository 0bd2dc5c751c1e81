"""Which values pass from block to block, where a loop does more than x = block(x, ...).

for block in blocks:                            state: h, which is StateLeaf(0)
    h, weights = block(hidden=h, mask=mask)     route: result 0; result 1 is dropped

for block in blocks:                            state: h, first. Block 0 sets the second one,
    h, v = block(h, first)                      for the others it stays
    first = v if first is None else first

for block in blocks:                            state: h. No state enters bias (T5), so it is
    h, bias = block(h, bias)                    computed once before, and is an argument

for block in blocks:                            state: h, total, and kept [rows, columns, ...].
    h, loss = block(h)                          Blocks whose values follow from other results are
    total = total + loss                        one program, which chooses; each fills its column
    kept.append(h)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..capture.state.object_trees import leaves_with_paths
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .between_blocks import Origin, PickedRow, WorkFiller, one_hot
from .block_hooks import HookCall
from .state_routes import FinalPlace, Route, RouteChoice, RouteColumn, StateColumns, StateLeaf


class BlockResults(NamedTuple):
    """The results of a block.

    leaves: tensors like its own, and other values. reads: for each leaf, the numbers of the
    arguments' leaves that it is computed from. same: for each, the number of the argument that it
    is. fillers: numbers of those that nothing reads. seen: the calls of the block's hooks, whose
    leaves follow the leaves that `tree` has.
    """

    leaves: list[Any]
    tree: Any
    reads: list[frozenset[int]]
    same: list[int | None]
    fillers: frozenset[int] = frozenset()
    seen: tuple[HookCall, ...] = ()


class BlockCall(NamedTuple):
    """A block's call. leaves, tree: its (args, kwargs), and its works if there are any."""

    leaves: list[Any]
    tree: Any
    results: BlockResults

    def named(self) -> list[tuple[str, Any]]:
        """Return the arguments' leaves by their paths."""
        whole = pytree.tree_unflatten([*range(len(self.leaves))], self.tree)
        named = leaves_with_paths(whole)
        return [(pytree.keystr(path), self.leaves[i]) for path, i in named]


class RoutedCalls(NamedTuple):
    """state: its leaves before the first block. arguments: those of SharedArguments, by block.

    filled: blocks that get a value which they would compute alike. final: values that the last
    state has.
    """

    state: list[Tensor]
    arguments: list[tuple[Any, ...]]
    filled: frozenset[int]
    final: list[tuple[Origin, FinalPlace]]


class Runs(Protocol):
    """Runs blocks in a trace, with other leaves of their arguments."""

    def computed(self, number: int, call: BlockCall, leaves: Sequence[object]) -> list[Any]:
        """Return the leaves of a block's results."""
        ...

    def is_same(
        self, number: int, call: BlockCall, leaves: Sequence[object], results: Sequence[int]
    ) -> bool:
        """Return whether a block computes these results as it did, and reads no additions."""
        ...


def find_route(
    calls: Sequence[BlockCall],
    runs: Runs,
    wanted: Sequence[Origin] = (),
    groups: Sequence[int] | None = None,
) -> RoutedCalls | None:
    """Return the route of the values between calls; None for x = block(x, ...) alone.

    wanted: values that are read behind the loop. groups: of the blocks that run one program, which
    chooses whose results follow; None: each follows its own route.
    """
    if groups is None and _is_plain(calls):
        return None
    return _Search(calls, runs, wanted, groups).run()


def _is_plain(calls: Sequence[BlockCall]) -> bool:
    """Return whether each block's first argument is all of its predecessor's result."""
    first = pytree.tree_unflatten(calls[0].leaves, calls[0].tree)[0][:1]
    leaves, tree = pytree.tree_flatten(*first) if first else ([], None)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        return False
    for number, call in enumerate(calls):
        args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
        taken, of_taken = pytree.tree_flatten(args[0]) if args else ([], None)
        others = pytree.tree_leaves((args[1:], kwargs))
        if of_taken != tree or call.results.tree != tree or any(map(origin_of, others)):
            return False
        origins = [(number - 1, i) for i in range(len(leaves))]
        if number and [*map(origin_of, taken)] != origins:
            return False
    return True


def origin_of(leaf: object) -> Origin | None:
    """Return where a value between two blocks comes from; None for others."""
    return getattr(leaf, "origin", None) if isinstance(leaf, Tensor) else None


class _Search:
    def __init__(
        self,
        calls: Sequence[BlockCall],
        runs: Runs,
        wanted: Sequence[Origin],
        groups: Sequence[int] | None,
    ) -> None:
        self.calls, self.runs, self.wanted, self.groups = calls, runs, [*wanted], groups
        self.named = [dict(call.named()) for call in calls]
        paths = [*dict.fromkeys(path for named in self.named for path in named)]
        # Arguments that get values between blocks: of the state, or computed before the blocks.
        self.passing = [p for p in paths if any(origin_of(named.get(p)) for named in self.named)]
        if len(calls) == 1:
            self.passing = [p for p in paths if isinstance(self.named[0][p], Tensor)][:1]
        self.computed: dict[int, list[Any]] = {}  # by block, its results without a state
        self.stored: list[Origin] = []  # results that several blocks further on get

    def run(self) -> RoutedCalls:
        tensors = [p for p in self.passing if isinstance(self.named[0].get(p), Tensor)]
        if not tensors:
            raise ShardingError.here(
                "the first block of a stack or pipeline gets no tensor in place of the values that "
                "the next ones get from it",
                fix="call all blocks alike: the same arguments, by position or by name",
            )
        self.state = {*tensors[:1]}
        size = 0
        while size != len(self.state):
            size = len(self.state)
            known: dict[Origin, bool] = {}
            for path in self.passing:
                origins = [o for named in self.named if (o := origin_of(named.get(path)))]
                if any(self._has_state(origin, known) for origin in origins):
                    self.state.add(path)
        slots = [p for p in self.passing if p in self.state]
        routes: dict[str, list[Any]] = {}
        self.final: dict[Origin, FinalPlace] = {}
        for path in slots:
            if (route := self._results(path)) is not None:
                routes[path] = route
        slots = [*routes]
        x = self.named[0][tensors[0]]
        self.fill = {number: self._fill(number) for number in range(len(self.calls))}
        state = [self._start(path, x) for path in slots]
        lifted = [i for i, leaf in enumerate(state) if self._is_lifted(leaf, x)]
        for i, path in enumerate(slots):
            self._note_last(path, routes[path], FinalPlace(i, None, i in lifted))
        columns = self._columns(len(state), x)
        state += [each.start for each in columns]
        lifted += [len(slots) + i for i, each in enumerate(columns) if each.is_lifted]
        state = [
            leaf.expand(len(x), *leaf.shape) if i in lifted and i < len(slots) else leaf
            for i, leaf in enumerate(state)
        ]
        choices: list[list[Tensor]] = [[] for _ in self.calls]
        chosen = (
            [self._chosen(routes[p], choices) for p in slots]
            if self.groups
            else [routes[p] for p in slots]
        )
        chosen += [self._filled_columns(each, choices) for each in columns]
        arguments: list[tuple[Any, ...]] = []
        for number, results in enumerate(zip(*chosen)):
            args, kwargs, *works = self._arguments(number, slots)
            route = Route(tuple(results), frozenset(lifted))
            arguments.append((args, kwargs, route, *works, *[tuple(choices[number])] * len(works)))
        filled = frozenset(number for number, fill in self.fill.items() if fill)
        return RoutedCalls(state, arguments, filled, [*self.final.items()])

    def _is_lifted(self, leaf: Tensor, x: Tensor) -> bool:
        """Return whether a leaf has no batch rows. x: the first leaf."""
        return self.groups is not None and (not leaf.dim() or leaf.shape[0] % x.shape[0] != 0)

    def _note_last(self, path: str, results: Sequence[Any], place: FinalPlace) -> None:
        """Note which value a leaf of the last state is."""
        for block in reversed(range(len(results))):
            if results[block] is not None:
                self.final.setdefault((block, results[block]), place)
                return

    def _columns(self, start: int, x: Tensor) -> list[StateColumns]:
        """Return tensors for the values that are read behind the loop, or by blocks further on."""
        found: dict[Any, StateColumns] = {}
        for origin in dict.fromkeys([*self.wanted, *self.stored]):
            value = self.calls[origin[0]].results.leaves[origin[1]]
            if origin in self.final or not isinstance(value, Tensor):
                continue
            key = origin[1], value.shape, value.dtype
            is_lifted = self._is_lifted(value, x)
            each = found.setdefault(key, StateColumns(value, start + len(found), is_lifted, len(x)))
            self.final[origin] = FinalPlace(each.leaf, len(each.origins), is_lifted)
            each.origins.append(origin)
        return [*found.values()]

    def _filled_columns(self, each: StateColumns, choices: list[list[Tensor]]) -> list[Any]:
        """Return by block the result that a column follows from."""
        groups = self.groups or []
        number = each.origins[0][1]
        with_columns = {groups[block] for block, _ in each.origins}
        found: list[Any] = []
        for block, call in enumerate(self.calls):
            leaves = call.results.leaves
            like = leaves[number] if number < len(leaves) else None
            kind = None if each.like is None else (each.like.shape, each.like.dtype)
            is_like = isinstance(like, Tensor) and (like.shape, like.dtype) == kind
            if groups[block] not in with_columns or not is_like:
                found.append(None)
                continue
            origin = block, number
            column = each.origins.index(origin) if origin in each.origins else None
            found.append(RouteColumn(number))
            choices[block].append(one_hot(column, len(each.origins)))
        return found

    def _chosen(self, results: Sequence[Any], choices: list[list[Tensor]]) -> list[Any]:
        """Return one choice for the blocks of a group whose results differ."""
        assert self.groups is not None
        options: dict[int, list[Any]] = {}
        for group, result in zip(self.groups, results):
            options.setdefault(group, [])
            options[group] += [] if result in options[group] else [result]
        found: list[Any] = []
        for block, (group, result) in enumerate(zip(self.groups, results)):
            if len(options[group]) > 1:
                choices[block].append(torch.tensor(options[group].index(result)))
                result = RouteChoice(tuple(options[group]))
            found.append(result)
        return found

    def _has_state(self, origin: Origin, known: dict[Origin, bool]) -> bool:
        """Return whether a value is computed from the state."""
        if origin not in known:
            block, i = origin
            named = [*self.named[block].items()]
            read = [named[k] for k in self.calls[block].results.reads[i]]
            known[origin] = any(
                self._has_state(before, known)
                if (before := origin_of(leaf))
                else not block and path in self.state
                for path, leaf in read
            )
        return known[origin]

    def _source(self, origin: Origin) -> Origin:
        """Return where a value comes from that blocks pass on as it is."""
        block, i = origin
        same = self.calls[block].results.same[i]
        before = None if same is None else origin_of(self.calls[block].leaves[same])
        return origin if before is None else self._source(before)

    def _results(self, path: str) -> list[int | None] | None:
        """Return for each block the number of the result that a leaf of the state is behind it.

        None if it would have to be several values at once: they are stored in columns.
        """
        found: list[int | None] = []
        content: Origin | None = None
        for number in range(len(self.calls) - 1):
            leaves = (named.get(path) for named in self.named[number + 1 :])
            needed = next((self._source(o) for leaf in leaves if (o := origin_of(leaf))), content)
            if needed is not None and needed[0] != number and needed != content:
                if self.groups is not None:
                    origins = [o for named in self.named if (o := origin_of(named.get(path)))]
                    self.stored += [*map(self._source, origins)]
                    return None
                raise ShardingError.here(
                    f"a block gets the result of block {needed[0]}, behind block {number}, which "
                    "has left another value in its place",
                    why="the blocks of a stack or pipeline are one program, and a value that "
                    "passes through it has one place",
                    fix="pass it as another argument",
                )
            found.append(needed[1] if needed is not None and needed[0] == number else None)
            content = needed
        return [*found, self._last(path, found[-1] if found else 0)]

    def _last(self, path: str, usual: int | None) -> int | None:
        """Return the last block's result that is like its argument: usually this one."""
        x, results = self.named[-1].get(path), self.calls[-1].results.leaves
        if usual is None or not isinstance(x, Tensor):
            return None
        numbers = [i for i in (usual, *range(len(results))) if i < len(results)]
        fillers = self.calls[-1].results.fillers
        for i, y in ((i, results[i]) for i in numbers if i not in fillers):
            if isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype):
                return i
        return None

    def _start(self, path: str, x: Tensor) -> Tensor:
        """Return a leaf of the state before the first block, zeros if a block makes it."""
        leaf = self.named[0].get(path)
        if isinstance(leaf, Tensor):
            return leaf
        like = next(named[path] for named in self.named if origin_of(named.get(path)))
        if self.groups is None:
            return x.new_zeros(like.shape, dtype=like.dtype)
        # A work whose results nothing reads computes with it: its gradient has to be finite.
        if (like.shape, like.dtype) == (x.shape, x.dtype):
            return x.detach()
        return x.new_ones(like.shape, dtype=like.dtype)

    def _fill(self, number: int) -> dict[str, int]:
        """Return arguments for which a block may get its own result, by path: the result's number.

        T5's first block computes the bias that the next ones get. With the bias as an argument it
        does the same, and is like them.
        """
        found: dict[str, int] = {}
        for path in self.passing:
            if path not in self.state and self.named[number].get(path, 0) is None:
                origins = [o for named in self.named if (o := origin_of(named.get(path)))]
                sources = [i for block, i in map(self._source, origins) if block == number]
                if sources:
                    found[path] = sources[0]
        call = self.calls[number]
        if not found:
            return found
        leaves = [
            leaf if (i := found.get(path)) is None else call.results.leaves[i]
            for path, leaf in self.named[number].items()
        ]
        others = [
            i
            for i, x in enumerate(call.results.leaves)
            if isinstance(x, Tensor) and i not in found.values()
        ]
        return found if self.runs.is_same(number, call, leaves, others) else {}

    def _arguments(self, number: int, slots: Sequence[str]) -> Any:
        """Return a block's arguments, with a StateLeaf for each value of the state."""
        leaves: list[Any] = []
        for path, leaf in self.named[number].items():
            leaf, is_filler = (leaf.leaf, True) if isinstance(leaf, WorkFiller) else (leaf, False)
            origin = origin_of(leaf)
            if path in slots and (origin or not number and isinstance(leaf, Tensor)):
                leaf = StateLeaf(slots.index(path))
            elif origin and path in self.state:
                place = self.final[self._source(origin)]
                column = torch.tensor(0 if is_filler else place.column)
                leaf = PickedRow(StateLeaf(place.leaf), column)
            elif origin:
                leaf = self._computed(self._source(origin))
            elif path in self.fill[number]:
                leaf = self._computed((number, self.fill[number][path]))
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.calls[number].tree)

    def _computed(self, origin: Origin) -> Any:
        """Return a value that is computed before the blocks."""
        block, i = origin
        if block not in self.computed:
            leaves = [
                self._computed(self._source(before))
                if (before := origin_of(leaf)) and path not in self.state
                else leaf
                for path, leaf in self.named[block].items()
            ]
            self.computed[block] = self.runs.computed(block, self.calls[block], leaves)
        return self.computed[block][i]
