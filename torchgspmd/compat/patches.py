"""Patches to torch, one row each: the replaced name, why, and in which torch releases.

A program that computes on meshes patches torch's DTensor while a wrapped module lives
(dtensor/install.py). A capture patches library code (capture/trace_context.py).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .private_apis import CHECKED, release

T = TypeVar("T")
ABSENT = object()  # stands for an attribute that its owner inherits, or does not have


@dataclass(frozen=True)
class Patch:
    """A replaced attribute in a class, module or object, or a replaced entry in a dict.

    replace: takes the present value, None if there is none, and returns the new one. why: the fault
    without the patch. versions: the checked torch releases that need it. feature: the folder in
    features/ that the row belongs to; "core" for none.
    """

    owner: Any
    name: Any
    replace: Callable[[Any], Any]
    why: str
    versions: tuple[str, ...] = CHECKED
    feature: str = "core"

    def is_needed(self) -> bool:
        """Whether this torch needs it. A release between checked ones counts as the next."""
        return _nearest(torch.__version__) in map(release, self.versions)

    def value(self) -> Any:
        """Return the owner's own value, not an inherited one; ABSENT without any."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, ABSENT)
        if isinstance(getattr(type(self.owner), self.name, None), property):
            return getattr(self.owner, self.name)
        return vars(self.owner).get(self.name, ABSENT)

    def __str__(self) -> str:
        if isinstance(self.owner, dict):
            return str(self.name)
        owner = self.owner if hasattr(self.owner, "__name__") else type(self.owner)
        return f"{owner.__name__}.{self.name}"

    def apply(self) -> Callable[[], None]:
        """Replace the value; return a function that puts it back, unless it is another by then."""
        before = self.value()
        # The replacement wraps an inherited method, but undoing must delete it from the owner.
        inherited = None if isinstance(self.owner, dict) else getattr(self.owner, self.name, None)
        after = self.replace(inherited if before is ABSENT else before)
        self._set(after)

        def undo() -> None:
            now = self.value()
            # Another library may have patched it since: its patch stays.
            if now is not before and (now is after or now is ABSENT):
                self._set(before)

        return undo

    def _set(self, value: object) -> None:
        is_dict = isinstance(self.owner, dict)
        if value is not ABSENT:
            self.owner.__setitem__(self.name, value) if is_dict else setattr(
                self.owner, self.name, value
            )
        else:
            self.owner.pop(self.name, None) if is_dict else delattr(self.owner, self.name)


@functools.cache
def _nearest(version: str) -> tuple[int, int]:
    """Return the checked release whose patches a torch version needs."""
    checked, now = [*map(release, CHECKED)], release(version)
    return min((c for c in checked if c >= now), default=max(checked))


def wrapping(function: Callable) -> Callable[..., Callable]:
    """Return a `replace` whose value calls `function` with the one before it, and the arguments."""

    def replace(before: Callable) -> Callable:
        @functools.wraps(before)
        def call(*args: object, **options: object) -> object:
            return function(before, *args, **options)

        return call

    return replace


def apply(patches: Iterable[Patch]) -> ExitStack:
    """Apply the patches that this torch needs, in order; closing the stack undoes them."""
    with ExitStack() as stack:
        for patch in patches:
            if patch.is_needed():
                stack.callback(patch.apply())
        return stack.pop_all()


def table(patches: Iterable[Patch]) -> str:
    """Return the reasons for patches, each below the first attributes that are replaced for it."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for patch in patches:
        rows.setdefault((patch.why, patch.versions), []).append(str(patch))
    return "\n".join(
        ", ".join(names[:2])
        + (", ..." if len(names) > 2 else "")
        + ("" if versions == CHECKED else f" (torch {', '.join(versions)})")
        + f"\n    {why}"
        for (why, versions), names in rows.items()
    )


class Installation:
    """Patches that are applied while any holder lives."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.finalize] = {}  # by id
        self._applied: ExitStack | None = None
        self._thread = 0  # Some torch flags belong to a thread, which has to undo them.
        self._lock = threading.RLock()

    @property
    def is_active(self) -> bool:
        """Whether the patches are applied."""
        return self._applied is not None

    def hold(self, patches: Sequence[Patch], *holders: object) -> None:
        """Apply the patches, unless they are applied, until all holders have been collected."""
        with self._lock:
            for holder in holders:
                if id(holder) not in self._holders:
                    finalizer = weakref.finalize(holder, self._release, id(holder))
                    # At exit nobody needs the patches undone, and torch may be half gone.
                    finalizer.atexit = False
                    self._holders[id(holder)] = finalizer
            if self._holders and self._applied is None:
                self._applied, self._thread = apply(patches), threading.get_ident()

    def end(self) -> None:
        """Undo the patches, whoever holds them."""
        for holder in [*self._holders]:
            self._release(holder)

    def _release(self, holder: int) -> None:
        with self._lock:
            if (finalizer := self._holders.pop(holder, None)) is not None:
                finalizer.detach()
            applied = self._applied
            if applied and not self._holders and self._thread == threading.get_ident():
                self._applied = None
                applied.close()


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Set a context variable for the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
