"""breakpoint() in forward: its place, and the graph's values that are local there.

While a program is traced a tensor has no value, so a breakpoint does not stop. It is recorded with
its frame's variables; gspmd.debug stops in such a frame when a run has computed them.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import fx

from ..compat.patches import Patch, setting
from ..compat.private_apis import FunctionalTensor, get_proxy_mode, get_proxy_slot
from ..compat.private_apis import _pytree as pytree
from ..errors import user_line
from .trace_context import PATCHES
from .traced_values import is_transforming, unwrap

VALUES = "breakpoint values"  # metadata on a traced node: its LocalValues


@dataclass
class LocalValue:
    """A tensor in a user's variable. name: its node's in the captured graph, if it has one."""

    name: str = ""


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
        return setting(_now, self)

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


_now: ContextVar[Breakpoints | None] = ContextVar("breakpoints of the trace", default=None)
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
        now = _now.get()
        return before(*args, **kwargs) if now is None else now.add()

    return breakpoint_


_WHY = "a breakpoint would stop once, at tensors without values"
PATCHES.append(Patch(builtins, "breakpoint", _breakpoint, _WHY))
