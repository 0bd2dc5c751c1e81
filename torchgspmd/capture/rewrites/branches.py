"""Python branches on values that only a run knows, as torch.cond.

    if x.mean() < 0:            x = branch(x.mean() < 0, side 0, side 1)        branch_code.py
        x = layer(x)

A trace that fails at a branch is repeated with the function compiled anew. Both sides are traced,
and a run computes one. A name that both assign alike keeps its value, tensors and numbers are
results of the cond, and any other name is unusable behind the branch. So are tensors in attributes
and buffers that a side assigns or changes in place (BatchNorm in training). A cond's results have
one size: where sizes differ that only a run knows, both sides are computed. Where a side raises,
the other is traced, and a run raises when its forward has ended. So it is where a side loops over
values, as no trace can.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...compat.private_apis import (
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
)
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError, innermost_frame_of, user_line_of
from ...rules.rewrites import rewrite_of
from ..stand_in_sizes import expression_of, same_sizes
from .branch_code import HELPERS, compiled
from .branch_effects import TRACE, Effects, effect, owned

_UNKNOWN = DataDependentOutputException, GuardOnDataDependentSymNode


class Branches:
    """The functions that branch on values in the traces so far."""

    def __init__(self) -> None:
        self.lines: dict[FunctionType, set[int]] = {}  # of the tests
        self.of_code: dict[CodeType, FunctionType] = {}  # by a code that was compiled anew

    def learn(self, error: BaseException | None) -> bool:
        """Return whether another trace can pass the branch at which a trace has failed."""
        if (found := self._branch_of(error)) is None:
            return False
        function, line = found
        self.lines[function] = {*self.lines.get(function, ()), line}
        return True

    def is_passed_by_none(self, error: BaseException) -> bool:
        """Return whether a trace failed at a value with which no trace can go on."""
        return isinstance(error, _UNKNOWN) and self._branch_of(error) is None

    def _branch_of(self, error: BaseException | None) -> tuple[FunctionType, int] | None:
        """Return the function and the line of the branch at which a trace has failed."""
        if error is None or not isinstance(error, _UNKNOWN):
            return None
        if (trace := innermost_frame_of(error)) is None:
            return None
        code, line = trace.tb_frame.f_code, trace.tb_lineno
        if (function := self.of_code.get(code)) is None:  # among all objects, which takes long
            found = (f for f in gc.get_referrers(code) if isinstance(f, FunctionType))
            if (function := next((f for f in found if f.__code__ is code), None)) is not None:
                self.of_code[code] = function
        if function is None or line in (lines := self.lines.get(function, set())):
            return None
        is_compiled = compiled(function.__code__, {*lines, line}) is not None
        return (function, line) if is_compiled else None

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Run the functions with their branches as calls."""
        changed = list[tuple[FunctionType, CodeType]]()
        try:
            for function, lines in self.lines.items():
                if (code := compiled(function.__code__, lines)) is not None:
                    changed.append((function, function.__code__))
                    self.of_code |= dict.fromkeys(_with_inner(code), function)
                    function.__globals__[HELPERS] = _NAMESPACE
                    function.__code__ = code
            yield
        finally:
            for function, code in changed:
                function.__code__ = code
                function.__globals__.pop(HELPERS, None)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)


class _Absent:
    """The value of a name that is not assigned."""


class Differing:
    """The value of a name that is no tensor or number, and other on either side of a branch."""

    def __init__(self, error: ShardingError) -> None:
        self.__dict__["_error"] = error

    def _raise(self, *_: object) -> NoReturn:
        raise self.__dict__["_error"]

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        self._raise()

    __setattr__ = __bool__ = __iter__ = __getitem__ = __call__ = __len__ = _raise
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _raise


ABSENT = _Absent()


def branch(
    test: object,
    yes: Callable[..., tuple],
    no: Callable[..., tuple],
    reads: Sequence[Callable[[], object]],
    names: Sequence[str],
    changed: Iterable[str] = (),
) -> tuple:
    """Return the values of names behind a branch.

    reads: return their values before it. changed: names whose tensors the sides change in place, of
    which they have copies.
    """
    before = values(reads)
    if (goes := _unknown(test)) is None:
        after = (yes if test else no)(*before)
    else:
        after = _traced(test, goes, yes, no, before, names)
    return tuple(
        _written(x, y) if name in changed else y for name, x, y in zip(names, before, after)
    )


def _written(before: object, after: object) -> object:
    """Return a tensor that was there before a branch, with the values behind it."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return after
    return before if after is before else before.copy_(after)


def copied(value: object) -> object:
    """Return a value that a side may change in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if value is ABSENT or _is_plain(value) or isinstance(value, tuple):
        return value
    raise effect("changes a list, a table or an object")


def _traced(
    test: object,
    goes: Tensor,
    yes: Callable[..., tuple],
    no: Callable[..., tuple],
    before: tuple,
    names: Sequence[str],
) -> tuple:
    """Return the values of names behind a branch on a value that only a run knows."""
    taken, sides, errors = TRACE.get()[2], list[Any](), list[Exception]()
    effects, names = Effects(), [*names]
    flags = goes, goes.logical_not()
    for side, flag in zip((yes, no), flags):
        try:
            with taken.of(flag):
                sides.append(effects.run(side, before))
        except Exception as error:
            if _is_raised_by_program(error):
                taken.refuse(flag, error)
            elif TRACE.get()[3](error):
                taken.refuse(flag, _without_program(error))
            else:
                raise
            errors.append(error.with_traceback(None))  # whose frames hold traced tensors
            sides.append(None)
    if len(errors) == 2:
        raise errors[1]
    if errors:  # nothing else is computed: the other side goes on
        with taken.of(None):
            return no(*before) if sides[0] is None else yes(*before)
    count = len(names)
    names += effects.names()
    sides = [_leaves_of([*side, *effects.values(kept)]) for side, kept in sides]
    results, differ, is_sized = list[Any](), list[tuple[int, int]](), False
    for i, (name, one, other) in enumerate(zip(names, *sides)):
        if one[1] != other[1]:
            results.append(_differing(name))
            continue
        leaves = list[Any]()
        for k, (a, b) in enumerate(zip(one[0], other[0])):
            if not (is_same := a is b or _is_plain(a) and type(a) is type(b) and a == b):
                is_sized |= _needs_both(a, b)
                if _sized_dim(a, b) is None and _type_of(a, b) is None:
                    leaves = [_differing(name)]
                    break
                differ.append((i, k))
            leaves.append(a if is_same else ABSENT)
        results.append(leaves)
    types = {(i, k): _type_of(sides[0][i][0][k], sides[1][i][0][k]) for i, k in differ}

    def tensors(side: Callable[..., tuple]) -> list[Tensor]:
        values, kept = effects.run(side, before, is_traced=True)
        leaves = [each for each, _ in _leaves_of([*values, *effects.values(kept)])]
        return [_as_tensor(leaves[i][k], types[i, k]) for i, k in differ]

    if differ:
        cond = rewrite_of("body", torch.ops.higher_order.cond)
        assert cond is not None
        with taken.of(None):
            if is_sized:
                outs = [_chosen(goes, a, b) for a, b in zip(tensors(yes), tensors(no))]
            else:
                outs = cond(goes, lambda: tensors(yes), lambda: tensors(no), ())
        for (i, k), out in zip(differ, outs):
            results[i][k] = out
    after = tuple(
        leaves if isinstance(leaves, Differing) else _rebuilt(leaves, one[1])
        for leaves, one in zip(results, sides[0])
    )
    for value in after[count:]:
        if isinstance(value, Differing):
            value._raise()
    effects.apply(after[count:])
    return after[:count]


def _is_raised_by_program(error: Exception) -> bool:
    """Return whether a `raise` of the program raised an error, or `torch._assert` in it."""
    if isinstance(error, ShardingError) or (trace := innermost_frame_of(error)) is None:
        return False
    last = [frame for frame, _ in traceback.walk_tb(trace)][-1]  # torch._check calls another
    return trace.tb_next is None or last.f_code.co_filename == torch.__file__


def _without_program(error: Exception) -> ShardingError:
    """Return the error of a run that takes a side which no trace can pass."""
    return ShardingError(
        "a run takes a side of a branch that needs numbers which are known only when it runs",
        where=user_line_of(error),
        why="the program is made for all values, and has the other side alone",
        fix="use a mask instead of the loop or `if` on this side, or give sizes that never take it",
    )


def choose(test: object, yes: Callable[[], object], no: Callable[[], object]) -> object:
    """Return `yes() if test else no()`."""
    return branch(test, lambda _: (yes(),), lambda _: (no(),), (lambda: None,), ("the value",))[0]


def no(value: object) -> object:
    return not value if (truth := _unknown(value)) is None else truth.logical_not()


def both(*parts: Callable[[], object]) -> object:
    """Return `a and b`; all parts are computed from the first on that only a run knows."""
    return _joined(parts, torch.logical_and, True)


def either(*parts: Callable[[], object]) -> object:
    return _joined(parts, torch.logical_or, False)


def _joined(parts: Sequence[Callable[[], object]], join: Callable, goes_on: bool) -> object:
    value: Any = goes_on
    for i, part in enumerate(parts):
        value = part()
        if (truth := _unknown(value)) is not None:
            for each in parts[i + 1 :]:
                other = _unknown(value := each())
                truth = join(truth, torch.tensor(bool(value)) if other is None else other)
            return truth
        if bool(value) is not goes_on:
            return value
    return value


def _unknown(test: object) -> Tensor | None:
    """Return a truth value [] that only a run knows; None for another test."""
    if isinstance(test, torch.SymBool):
        test = test.node.maybe_as_bool() if test.node.has_hint() else _of_symbol(test)
    if not isinstance(test, Tensor) or test.numel() != 1 or TRACE.get()[0](test) is not None:
        return None
    return (test.detach().reshape(()) != 0) if test.dtype != torch.bool else test.reshape(())


def _of_symbol(test: torch.SymBool) -> Tensor:
    return torch.scalar_tensor(torch.sym_ite(test, 1, 0), dtype=torch.int64) != 0


def values(reads: Sequence[Callable[[], object]]) -> tuple:
    """Return the values of names, ABSENT for one that is not assigned."""
    results = list[object]()
    for read in reads:
        try:
            results.append(read())
        except NameError:
            results.append(ABSENT)
    return tuple(results)


def _leaves_of(values: Sequence[object]) -> list[tuple[list[Any], Any]]:
    return [pytree.tree_flatten(value) for value in values]


def _rebuilt(leaves: list[Any], tree: Any) -> object:
    differing = [x for x in leaves if isinstance(x, Differing)]
    return differing[0] if differing else pytree.tree_unflatten(leaves, tree)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _type_of(a: Any, b: Any) -> torch.dtype | None:
    """Return the dtype of a result that two tensors or numbers have in common, else None."""
    one, other = (x if isinstance(x, Tensor) else None for x in (a, b))
    if one is not None and other is not None:
        return (
            one.dtype if one.dtype == other.dtype and same_sizes(one.shape, other.shape) else None
        )
    tensor, number = (one, b) if one is not None else (other, a)
    if not isinstance(number, bool | int | float):
        return None
    if tensor is not None:
        return tensor.dtype if tensor.dim() == 0 else None
    return torch.tensor(a).dtype if type(a) is type(b) else None


def _as_tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)


def _sized_dim(a: object, b: object) -> int | None:
    """Return the only dimension in which sizes differ that a run knows; None for other values."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if a.dtype != b.dtype or a.dim() != b.dim():
        return None
    pairs = [*zip(a.shape, b.shape)]
    dims = [d for d, (m, n) in enumerate(pairs) if expression_of(m) != expression_of(n)]
    known = len(dims) != 1 or all(type(n) is int for n in pairs[dims[0]])
    return None if known else dims[0]


def _needs_both(a: object, b: object) -> bool:
    """Return whether a loop that runs once or not at all cannot have a result of a branch.

    Its gradients are zeros where it does not run, and zeros need a size.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.requires_grad or b.requires_grad):
        return not all(type(n) is int for n in (*a.shape, *b.shape))
    return _sized_dim(a, b) is not None


def _chosen(goes: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `a` where a branch goes that way, else `b`."""
    if (dim := _sized_dim(a, b)) is None:
        return torch.where(goes, a, b)
    parts = [
        x.index_select(dim, (flag & flag.new_ones(x.shape[dim])).nonzero().reshape(-1))
        for x, flag in ((a, goes), (b, goes.logical_not()))
        if not (type(x.shape[dim]) is int and x.shape[dim] == 0)
    ]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _differing(name: str) -> Differing:
    return Differing(
        ShardingError.here(
            f"the program depends on values: '{name}' is of another kind on either side of a "
            "branch on a value",
            why="what comes after is one program for both sides",
            fix="give it tensors of one shape and dtype on both sides",
        ),
    )


_NAMESPACE = {
    "branch": branch,
    "choose": choose,
    "no": no,
    "both": both,
    "either": either,
    "values": values,
    "copied": copied,
    "owned": owned,
    "ABSENT": ABSENT,
}
