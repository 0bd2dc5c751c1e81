"""Changes of a function's text while a test runs."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from pytest import MonkeyPatch

import torchgspmd as gspmd
from torchgspmd.rules.registry import RULES
from torchgspmd.rules.rewrites import REWRITES, Rewrite

PutBack = Callable[[MonkeyPatch], None]


def edited(function: Callable[..., Any], today: str, before: str) -> PutBack:
    """Return a change that replaces a part of a function's text."""

    def put_back(patch: MonkeyPatch) -> None:
        source = textwrap.dedent(inspect.getsource(function))
        source = source[source.index("def ") :]  # without decorators, which fill tables
        assert source.count(today) == 1, f"{function.__name__} no longer has {today!r}"
        scope = dict[str, Any]()
        exec(source.replace(today, before), function.__globals__, scope)
        put_in_place(patch, function, scope[function.__name__])

    return put_back


def put_in_place(patch: MonkeyPatch, function: object, other: Callable[..., Any]) -> None:
    """Replace a function in modules, in classes and in the tables of rules and rewrites."""
    package = gspmd.__name__
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == package]
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    for owner in (*modules, *classes):
        for name, value in list(vars(owner).items()):
            if value is function:
                patch.setattr(owner, name, other)
    for op, rule in RULES.items():
        if rule is function:
            patch.setitem(RULES, op, other)
    for key, rows in REWRITES.items():
        changed = [Rewrite(*key, other) if row.apply is function else row for row in rows]
        if changed != rows:
            patch.setitem(REWRITES, key, changed)


def both(*changes: PutBack) -> PutBack:
    """Return several changes as one."""

    def put_back(patch: MonkeyPatch) -> None:
        for change in changes:
            change(patch)

    return put_back
