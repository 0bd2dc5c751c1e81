"""Work between the blocks of a loop, as parts of the blocks' programs.

for block in blocks:                call k: block(x) and its works. Blocks of one kind run all works
    y = block(x)                    of their kind, so that they stay one program: a route chooses
    x = x + scale[k] * y            whose results follow (block_routes.py).
    if k in kept: x = norm(x)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.private_apis import _pytree as pytree
from .between_blocks import (
    Between,
    BlockWork,
    Origin,
    RecordedStep,
    StepOperand,
    WorkFiller,
    WorkRecipe,
    apart,
)
from .block_routes import BlockCall


class _OwnWork(NamedTuple):
    """A block's own work.

    outs: its results' numbers, by those that all recorded steps have. sizes: each step's results.
    """

    recipe: WorkRecipe
    inputs: list[Any]
    outs: dict[int, int]
    results: list[Any]
    sizes: list[int]


class CallsWithWorks:
    """The calls of a loop with the works behind them.

    steps: operations behind each block. kinds: by block. raw_wanted: values that are read behind
    the loop. In these all recorded results behind a block have numbers; in a program's call only
    those that are needed.
    """

    def __init__(
        self,
        calls: Sequence[BlockCall],
        steps: Sequence[Sequence[RecordedStep]],
        kinds: Sequence[Hashable],
        raw_wanted: Sequence[Origin],
    ) -> None:
        self.plain, self.steps, self.kinds, self.raw_wanted = calls, steps, kinds, raw_wanted

    def goes_on(self, step: RecordedStep) -> bool:
        """Return whether a step behind the last block is the next one behind the block before."""
        last = len(self.plain) - 1
        own, before = [*self.steps[last], step], self.steps[last - 1][: len(self.steps[last]) + 1]
        ones, others = (
            self._own(block, steps, range(len(steps)))
            for block, steps in ((last, own), (last - 1, before))
        )
        return len(own) == len(before) and ones.recipe == others.recipe

    def place_of(self, origin: Origin) -> tuple[int, int] | None:
        """Return the number of the step that computes a value outside of the blocks' program, and
        that of its first result; None for values of that program.
        """
        block, number = origin
        start = len(self.plain[block].results.leaves)
        if number < start or number in self._needed[block]:
            return None
        for place, step in enumerate(self.steps[block]):
            if number < start + len(step.results):
                return place, start
            start += len(step.results)
        raise KeyError(origin)

    @cached_property
    def _needed(self) -> list[set[int]]:
        """The recorded results that blocks, or values behind the loop, are computed from."""
        needed: list[set[int]] = [set() for _ in self.plain]
        left = [x.origin for call in self.plain for x in call.leaves if isinstance(x, Between)]
        left += [(block, n) for block, n in self.raw_wanted if block < len(self.plain)]
        last = len(self.plain) - 1
        while left:
            block, number = left.pop()
            start = len(self.plain[block].results.leaves)
            if number < start or number in needed[block]:
                continue
            for step in self.steps[block]:
                numbers = range(start, start + len(step.results))
                if number in numbers:
                    needed[block].update(numbers)
                    left += [x.origin for x in step.leaves if isinstance(x, Between)]
                start = numbers.stop
            # What later blocks need of the block before, is needed of the last one.
            if not left and self._ends_alike():
                left = [(last, n) for n in needed[last - 1] - needed[last]]
        return needed

    def _ends_alike(self) -> bool:
        """Return whether behind the last block are the operations behind the block before."""
        last, sizes = self.steps[-1], [len(call.results.leaves) for call in self.plain[-2:]]
        return bool(last) and len(last) == len(self.steps[-2]) and sizes[0] == sizes[1]

    def _own(self, block: int, steps: Sequence[RecordedStep], places: Sequence[int]) -> _OwnWork:
        """Return a block's work. places: of the steps that are needed."""
        call = self.plain[block]
        start = len(call.results.leaves)
        recorded: list[Any] = []
        inputs: list[Any] = []
        outs: dict[int, int] = {}
        results: list[Any] = []
        sizes: list[int] = []

        def operand(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if isinstance(x, Between) and x.origin[0] == block:
                number = x.origin[1]
                return (
                    StepOperand("result", number)
                    if number < start
                    else StepOperand("step", outs[number])
                )
            for kind, values in (("argument", call.leaves), ("input", inputs)):
                for i, value in enumerate(values):
                    if value is x or _origin(value) == _origin(x) != None:  # noqa: E711
                        return StepOperand(kind, i)
            inputs.append(x)
            return StepOperand("input", len(inputs) - 1)

        number = start
        for place, step in enumerate(steps):
            if place in places:
                recorded.append((step.function, tuple(map(operand, step.leaves)), step.tree))
                sizes.append(len(step.results))
                for i, x in enumerate(step.results):
                    outs[number + i] = len(results)
                    results.append(x)
            number += len(step.results)
        return _OwnWork(WorkRecipe(tuple(recorded)), inputs, outs, results, sizes)

    @cached_property
    def own(self) -> list[_OwnWork]:
        found: list[_OwnWork] = []
        for block, (call, steps) in enumerate(zip(self.plain, self.steps)):
            number, places = len(call.results.leaves), list[int]()
            for place, step in enumerate(steps):
                places += [place] if number in self._needed[block] else []
                number += len(step.results)
            found.append(self._own(block, steps, places))
        return _with_own_numbers(found)

    @cached_property
    def groups(self) -> list[int] | None:
        """Numbers of the blocks' groups, each with one program; None if a loop has no works."""
        if not self._known and not any(each.outs for each in self.own):
            return None
        keys: list[Any] = []
        for kind, call in zip(self.kinds, self.plain):
            key = kind, call.tree, len(call.results.leaves)
            keys += [] if key in keys else [key]
        return [
            keys.index((kind, call.tree, len(call.results.leaves)))
            for kind, call in zip(self.kinds, self.plain)
        ]

    def _works(self, block: int) -> list[int]:
        """Return, for the works of a block's group, the block that each is taken from."""
        assert self.groups is not None
        found: dict[int, WorkRecipe] = {}
        for other, group in enumerate(self.groups):
            recipe = self.own[other].recipe
            if group == self.groups[block] and recipe.steps and recipe not in found.values():
                found[other] = recipe
        return [*found]

    def origin(self, raw: Origin) -> Origin:
        """Return a value's origin among the results of its block's program."""
        block, number = raw
        start = len(self.plain[block].results.leaves)
        if number < start:
            return raw
        own = self.own[block]
        for other in self._works(block):
            if self.own[other].recipe == own.recipe:
                return block, start + own.outs[number]
            start += len(self.own[other].results)
        raise KeyError(raw)

    def raw(self, origin: Origin) -> Origin:
        block, number = origin
        own = self.own[block].outs
        found = (n for n in own if self.origin((block, n)) == origin)
        return origin if number < len(self.plain[block].results.leaves) else (block, next(found))

    @cached_property
    def wanted(self) -> list[Origin]:
        """Return the values that are read behind the loop."""
        return [*map(self.origin, self._known)]

    @cached_property
    def _known(self) -> list[Origin]:
        sizes = [len(call.results.leaves) for call in self.plain]
        known = [(block, n) for block, n in self.raw_wanted if block < len(sizes)]
        return [(b, n) for b, n in known if n < sizes[b] or n in self._needed[b]]

    @cached_property
    def calls(self) -> list[BlockCall]:
        """The calls of the blocks' programs, (args, kwargs, works)."""
        if self.groups is None:
            return [*self.plain]
        return [self._call(block) for block in range(len(self.plain))]

    def _call(self, block: int) -> BlockCall:
        call, results = self.plain[block], self.plain[block].results
        works, fillers = list[BlockWork](), set[int]()
        leaves, reads = [*results.leaves], [*results.reads]
        at = len(call.leaves)
        for other in self._works(block):
            own = self.own[other]
            is_own = own.recipe == self.own[block].recipe
            inputs = (self.own[block] if is_own else own).inputs
            if not is_own:
                inputs = [WorkFiller(self._converted(x)) for x in inputs]
            first = at + 1  # the recipe is a leaf, too

            def reads_of(ref: StepOperand, first: int = first) -> frozenset[int]:
                if ref.kind == "result":
                    return results.reads[ref.number]
                return frozenset([ref.number + (first if ref.kind == "input" else 0)])

            rows = _rows_of_inputs(own, self.plain[other])
            works.append(BlockWork(own.recipe, tuple(map(self._converted, inputs)), rows))
            at = first + len(inputs) + len(rows)
            fillers |= set() if is_own else {*range(len(leaves), len(leaves) + len(own.results))}
            leaves += own.results
            reads += own.recipe.reads(own.sizes, reads_of)
        given = [self._converted(x) for x in call.leaves]
        args, kwargs = pytree.tree_unflatten(given, call.tree)
        flat, tree = pytree.tree_flatten((args, kwargs, tuple(works)), is_leaf=_is_filler)
        same = [*results.same, *[None] * (len(leaves) - len(results.leaves))]
        return BlockCall(
            flat,
            tree,
            results._replace(leaves=leaves, reads=reads, same=same, fillers=frozenset(fillers)),
        )

    def _converted(self, x: Any) -> Any:
        return x.copy(self.origin(x.origin)) if isinstance(x, Between) else x


_OF_NUMBERS = {"add", "sub", "mul", "div", "truediv"}


def _with_own_numbers(works: Sequence[_OwnWork]) -> list[_OwnWork]:
    """Make inputs of numbers in which alike works differ: x * 0.5, and x * 0.25 in the next one."""

    def likeness(work: _OwnWork) -> list[Any]:
        return [
            (f, [None if _is_number(f, x) else x for x in operands], tree)
            for f, operands, tree in work.recipe.steps
        ]

    found: list[_OwnWork] = []
    for work in works:
        alike = [each for each in works if likeness(each) == likeness(work)]
        inputs, steps, at = [*work.inputs], list[Any](), 0
        for step, (function, operands, tree) in enumerate(work.recipe.steps):
            own: list[Any] = []
            for i, x in enumerate(operands):
                if any(each.recipe.steps[step][1][i] != x for each in alike):
                    like = work.results[at]
                    # A tensor [] does not change the type of others with dimensions.
                    dtype = like.dtype if not like.dim() else torch.float64
                    inputs.append(torch.tensor(x, dtype=dtype))
                    x = StepOperand("input", len(inputs) - 1)
                own.append(x)
            at += work.sizes[step]
            steps.append((function, tuple(own), tree))
        found.append(work._replace(recipe=WorkRecipe(tuple(steps)), inputs=inputs))
    return found


def _is_number(function: Any, x: object) -> bool:
    name = getattr(function, "__name__", "").partition(".")[0].strip("_")
    return type(x) in (int, float) and name.removeprefix("r") in _OF_NUMBERS


def _is_filler(x: object) -> bool:
    return isinstance(x, WorkFiller)


def _origin(x: object) -> Origin | None:
    return x.origin if isinstance(x, Between) else None


def _rows_of_inputs(own: _OwnWork, call: BlockCall) -> tuple[bool, ...]:
    """Return which outside inputs of a work have a row for each batch row.

    With twice the rows in all else, the work has twice the rows in its results: with these inputs
    as they are, or if they are doubled, too.
    """
    values = [_value(x) for x in call.leaves]
    batch = next((x.shape[0] for x in values if isinstance(x, Tensor) and x.dim()), 0)

    def doubled(x: Any) -> Any:
        x = _value(x)
        if not isinstance(x, Tensor) or not x.dim() or not batch or x.shape[0] % batch:
            return x
        return x.new_zeros((2 * x.shape[0], *x.shape[1:]))

    rows = [False] * len(own.inputs)
    open_ = [
        i
        for i, x in enumerate(own.inputs)
        if not isinstance(x, Between) and isinstance(doubled(x), Tensor) and doubled(x) is not x
    ]
    if not open_:
        return tuple(rows)
    given, results = [*map(doubled, call.leaves)], [*map(doubled, call.results.leaves)]
    expected = [doubled(x).shape for x in own.results]
    for choice in range(2 ** len(open_)):
        rows = [i in open_ and bool(choice >> open_.index(i) & 1) for i in range(len(own.inputs))]
        inputs = [x if i in open_ and not rows[i] else doubled(x) for i, x in enumerate(own.inputs)]
        try:
            with apart(), torch.no_grad():
                found = own.recipe.run(inputs, given, results)
        except Exception:  # noqa: BLE001 (shapes that do not fit each other)
            continue
        if [x.shape for x in found] == expected:
            break
    return tuple(rows)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Between) else x
