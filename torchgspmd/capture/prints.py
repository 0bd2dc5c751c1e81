"""print() and logging on tensors in forward: every run prints the values that it computes.

    print("h", h)                           the run prints   h tensor([[0.3, ...]])
    print(f"loss {loss:.3f}")               loss 1.234
    logger.info("norm %s", h.norm())        rank 0's logger gets it

While a program is traced a tensor has no value. A printed line becomes a row in PRINTER, a list
that each run extends as it extends the user's own lists (state/writes.py). When the forward has
ended, rank 0 prints the rows in program order. A formatted tensor, f"{x:.3f}", is a
text with a stand-in until then. An exception behind a branch on a value is such a row, too.
"""

from __future__ import annotations

import builtins
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from ..compat.patches import Patch, setting
from ..compat.private_apis import (
    FunctionalTensor,
    get_proxy_mode,
    get_proxy_slot,
    is_functorch_wrapped_tensor,
)
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line, user_line_of
from .assumed_sizes import EMPTY_IS_NOTHING
from .state.source import Source
from .state.writes import EXTEND, Write, replace_tensors
from .trace_context import PATCHES
from .traced_values import is_transforming, unwrap

_NUMBERS = torch.SymInt, torch.SymFloat
_STAND_IN = re.compile("<value ([0-9]+) of a run>")
_now: ContextVar[Prints | None] = ContextVar("prints of the trace", default=None)


class Printer(list):
    """The list that runs extend by rows; it prints them and keeps none.

    A row has a kind with its options, a flag or None, and texts; some are (tensor, format).
    """

    def extend(self, rows: Iterable[Any]) -> None:
        """Print a run's rows, or raise. All ranks call it, since a value may be sharded."""
        is_silent = dist.is_initialized() and dist.get_rank() > 0
        for (kind, option), flag, pieces in rows:
            if flag is not None and not _whole(flag):
                continue
            if kind == "raise":
                option.raise_(pieces)
            text = "".join(map(_text, pieces))
            if kind == "print" and not is_silent:
                sys.stdout.write(text)
            elif not is_silent:
                logging.getLogger(kind).log(option, "%s", text)


PRINTER = Printer()
_SOURCE = Source(globals(), ("PRINTER",))


class Prints:
    """One trace's prints. ask: returns a tensor's values, if they are known."""

    def __init__(self, ask: Callable[[Tensor], Tensor | None]) -> None:
        self.ask = ask
        self.rows: list[Any] = []  # [kind and option, flag whether it counts or None, pieces]
        self.path: Tensor | None = None  # whether a run takes the side of a branch that is traced
        self.is_silent = False
        self.values: list[tuple[Tensor, str | None]] = []  # by stand-in: the value and its format
        self.used: set[int] = set()
        self.lines: list[str | None] = []  # by stand-in: the user's line
        mode = get_proxy_mode()
        self.tracer = None if mode is None else mode.tracer

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record prints while in this context."""
        with setting(_now, self):
            yield
        for i, (_, spec) in enumerate(self.values):
            if spec and i not in self.used:
                raise ShardingError(
                    f"forward formats a value that only a run knows as '{spec}', and neither "
                    "prints nor logs the text",
                    where=self.lines[i],
                    why="one program is made for all values, before any device computes",
                    fix="print() or log the text in forward, or return the number",
                )

    def writes(self, outputs: list[Tensor]) -> list[Write]:
        """Return the write that prints; its tensors are appended to the outputs."""
        return [Write(_SOURCE, replace_tensors(self.rows, outputs), EXTEND)] if self.rows else []

    def has_values(self, value: object) -> bool:
        """Return whether only a run knows a value, or a text, completely."""
        if isinstance(value, str):
            return _STAND_IN.search(value) is not None
        return any(map(_is_value, pytree.tree_leaves(value)))

    def stand_in(self, value: Any, spec: str | None) -> str:
        """Return the text that stands for a value, in a format. None: as print shows a tensor."""
        if isinstance(value, Tensor):
            kept = value.detach().clone()  # as it is now, without a gradient
        else:
            kept = torch.scalar_tensor(
                value, dtype=torch.int64 if isinstance(value, torch.SymInt) else torch.float64
            )
        self.values.append((kept, spec))
        self.lines.append(user_line())
        return f"<value {len(self.values) - 1} of a run>"

    def text(self, value: object) -> str:
        """Return a value as text, with stand-ins for numbers that only a run knows."""
        if isinstance(value, str) or not self.has_values(value):
            return str(value)
        # A container prints its items by repr().
        return str(pytree.tree_map(lambda x: _Shown(self, x) if _is_value(x) else x, value))

    def add(self, kind: str, option: object, text: str) -> None:
        """Add a row that prints a text, with values for its stand-ins."""
        self._add("a print or log", [kind, option], self.path, self._pieces(text))

    def _add(self, what: str, how: list, flag: Tensor | None, pieces: list) -> None:
        """Add a row; raise ShardingError within a loop's body or a transform."""
        if self.is_silent:
            return
        if (
            (mode := get_proxy_mode()) is None
            or mode.tracer is not self.tracer
            or is_transforming()
        ):
            raise ShardingError.here(
                f"{what} in the body of a transform has a value of each of its iterations",
                why="a loop, a pipeline and torch.vmap trace their body once for all of them",
                fix="return the value, and print or check it behind the loop",
            )
        self.rows.append([how, flag, pieces])

    def _pieces(self, text: str) -> list[Any]:
        """Return the parts of a text: a value and its format for each stand-in."""
        pieces: list[Any] = _STAND_IN.split(text)  # texts and numbers of stand-ins, in turn
        for i in range(1, len(pieces), 2):
            number = int(pieces[i])
            self.used.add(number)
            pieces[i] = [*self.values[number]]
        return pieces

    def refuse(self, flag: Tensor, error: Exception) -> None:
        """Add a row that raises an error if a run's flag [], bool, is True."""
        args = [self._pieces(a) if isinstance(a, str) else a for a in error.args]
        flag = flag if self.path is None else self.path.logical_and(flag)
        self._add(
            "an exception",
            ["raise", Raised(type(error), user_line_of(error) or user_line())],
            flag,
            args,
        )

    @contextmanager
    def on_side(self, flag: Tensor | None) -> Iterator[None]:
        """Count rows only in a run whose flag [], bool, is True. None: add no rows."""
        before = self.path, self.is_silent
        if flag is None:
            self.is_silent = True
        else:
            self.path = flag if self.path is None else self.path.logical_and(flag)
        try:
            yield
        finally:
            self.path, self.is_silent = before


@dataclass(frozen=True)
class Raised:
    """An exception that a run may raise."""

    kind: type[Exception]
    where: str | None

    def raise_(self, args: Iterable[Any]) -> NoReturn:
        """Raise it; args: its arguments, texts as their pieces."""
        texts = ["".join(map(_text, a)) if isinstance(a, list) else _whole(a) for a in args]
        error = self.kind.__new__(self.kind, *texts)  # a constructor takes others
        error.args = tuple(texts)
        raise error from ShardingError("the program raises this behind forward", where=self.where)


class Side:
    """A side of a branch on a value, for the prints of the trace: none while it recomputes."""

    @staticmethod
    def of(flag: Tensor | None) -> AbstractContextManager:
        """Return the context for a side, as `Prints.on_side`."""
        return nullcontext() if (prints := _now.get()) is None else prints.on_side(flag)

    @staticmethod
    def refuse(flag: Tensor, error: Exception) -> None:
        if (prints := _now.get()) is not None:
            prints.refuse(flag, error)


class _Shown:
    """A value in a container that is printed."""

    def __init__(self, prints: Prints, value: object) -> None:
        self.text = prints.stand_in(value, None if isinstance(value, Tensor) else "")

    def __repr__(self) -> str:
        return self.text


def _is_value(x: object) -> bool:
    return isinstance(x, (FunctionalTensor, *_NUMBERS)) or (
        isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)
    )


def _text(piece: Any) -> str:
    if isinstance(piece, str):
        return piece
    value, spec = _whole(piece[0]), piece[1]
    return str(value) if spec is None else format(value, spec)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _print(before: Callable[..., None]) -> Callable[..., None]:
    def print_(*values: Any, sep: Any = " ", end: Any = "\n", **options: Any) -> None:
        prints = _now.get()
        if prints is None or options.get("file") or not any(map(prints.has_values, values)):
            before(*values, sep=sep, end=end, **options)
        else:
            sep, end = " " if sep is None else sep, "\n" if end is None else end
            prints.add("print", None, sep.join(map(prints.text, values)) + end)

    return print_


def _log(before: Callable[..., None]) -> Callable[..., None]:
    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        prints, args = _now.get(), record.args
        if prints is None or not (prints.has_values(args) or prints.has_values(record.msg)):
            before(self, record)
            return
        if isinstance(args, tuple):
            record.args = tuple(prints.text(a) if prints.has_values(a) else a for a in args)
        prints.add(self.name, record.levelno, record.getMessage())

    return handle


def _format(before: Callable[..., str]) -> Callable[..., str]:
    def format_(self: object, spec: str) -> str:
        prints = _now.get()
        if prints is None or not (
            spec
            or isinstance(self, Tensor)
            or isinstance(self, _NUMBERS)
            and not self.node.has_hint()
        ):
            return before(self, spec)
        # The number of a loop's iteration, which names a module.
        if isinstance(self, Tensor) and not self.dim() and EMPTY_IS_NOTHING.get() is not None:
            if (number := prints.ask(self)) is not None:
                return format(number.item(), spec)
        return prints.stand_in(self, spec)

    return format_


_WHY = "a print would show a tensor without values, once"
PATCHES.extend(
    [
        Patch(builtins, "print", _print, _WHY),
        Patch(logging.Logger, "handle", _log, _WHY),
        Patch(FunctionalTensor, "__format__", _format, _WHY),
        Patch(torch.SymFloat, "__format__", _format, _WHY),
        Patch(torch.SymInt, "__format__", _format, _WHY),
    ]
)


VALUES = "breakpoint values"  # metadata on a traced node: its LocalValues


@dataclass
class LocalValue:
    """A tensor in a user's variable. name: its node's in the captured graph, if it has one."""

    name: str = ""


# While a program is traced a tensor has no value, so a breakpoint does not stop. It is recorded
# with its frame's variables; gspmd.debug stops in such a frame when a run has computed them.
@dataclass(frozen=True)
class Breakpoint:
    """A breakpoint() in forward; variables have a LocalValue in place of each tensor."""

    file: str
    line: int
    function: str
    space: dict[str, Any]  # the function's globals
    variables: dict[str, Any]

    def values(self) -> set[str]:
        """Return the captured graph's nodes that its variables hold."""
        leaves = pytree.tree_leaves(self.variables)
        return {leaf.name for leaf in leaves if isinstance(leaf, LocalValue) and leaf.name}

    def stop(self, values: Mapping[str, object], **more: object) -> None:
        """Call breakpoint() in a frame at this line of the user's file.

        values: by node name. more: further variables for the frame.
        """

        def known(leaf: LocalValue) -> object:
            return values.get(leaf.name, "<the program does not compute it>")

        variables = pytree.tree_map_only(LocalValue, known, self.variables)
        exec(self._code(), self.space, {**variables, **more})

    def _code(self) -> CodeType:
        # Empty lines before the call give it the user's line number.
        text = "\n" * (self.line - 1) + "breakpoint()"
        return compile(text, self.file, "exec").replace(co_name=self.function)


class Breakpoints:
    """One trace's breakpoints."""

    def __init__(self) -> None:
        self.found: list[Breakpoint] = []
        mode = get_proxy_mode()
        self.tracer = None if mode is None else mode.tracer

    def recorded(self) -> AbstractContextManager[Breakpoints | None]:
        """Record breakpoints while in this context."""
        return setting(_value_now, self)

    def add(self) -> None:
        # Frames: this method, the patched breakpoint, the user's function.
        frame, mode = sys._getframe(2), get_proxy_mode()
        if mode is None or mode.tracer is not self.tracer or is_transforming():
            _warn("breakpoint() in the body of a loop, a pipeline or torch.vmap does not stop")
            return
        if not wanted.get():
            _warn("breakpoint() in forward stops in a run under `with gspmd.debug(model):`")
        variables = pytree.tree_map_only(FunctionalTensor, _local_value, dict(frame.f_locals))
        code, line = frame.f_code, frame.f_lineno
        self.found.append(
            Breakpoint(code.co_filename, line, code.co_name, frame.f_globals, variables)
        )


_value_now: ContextVar[Breakpoints | None] = ContextVar("breakpoints of the trace", default=None)
wanted: ContextVar[bool] = ContextVar("whether runs will stop", default=False)


def _warn(text: str) -> None:
    warnings.warn(f"{user_line()}: {text}", stacklevel=4)


def _local_value(tensor: FunctionalTensor) -> LocalValue:
    value, mode = LocalValue(), get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(unwrap(tensor), mode.tracer, None)
    if slot is not None:
        slot.proxy.node.meta.setdefault(VALUES, []).append(value)
    return value


def name_values(new: Mapping[fx.Node, Any]) -> None:
    """Write the names of nodes in the captured graph. new: these by the traced nodes."""
    for node, named in new.items():
        for value in node.meta.get(VALUES, ()):
            value.name = named.name if isinstance(named, fx.Node) else ""


def _breakpoint(before: Callable[..., Any]) -> Callable[..., Any]:
    def breakpoint_(*args: object, **kwargs: object) -> Any:
        now = _value_now.get()
        return before(*args, **kwargs) if now is None else now.add()

    return breakpoint_


_WHY_NO_STOP = "a breakpoint would stop once, at tensors without values"
PATCHES.append(Patch(builtins, "breakpoint", _breakpoint, _WHY_NO_STOP))
