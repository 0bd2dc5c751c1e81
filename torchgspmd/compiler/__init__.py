"""From a module to a Plan: options, programs, decisions and their reasons."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

TOOLS: list[Callable[[], type]] = []  # one that returns the class with the methods


def add_tool(define: Callable[[], type]) -> None:
    """Register a function that returns the class with the methods; it runs when one is called."""
    TOOLS.append(define)


class ToolMethod:
    """A method of Plan, loaded when it is called: planning needs no report."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: object, owner: type | None = None) -> Callable[..., Any]:
        (define,) = TOOLS
        method = getattr(define(), self._name)
        return method if plan is None else MethodType(method, plan)
