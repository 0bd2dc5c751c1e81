"""Reach: the functions that a program may call, and the objects that it may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .bytecode_names import called_functions, class_names, reachable_values
from .dependencies import hooks_of
from .recorder import ReachedObjects


class Reach:
    """Functions and objects to which forward, its hooks or a function lead, by names.

    functions: forwards, hooks, and functions in attributes. called: these and the Python functions
    that they name, and so on. objects: of a module only.
    """

    def __init__(self, fn: Callable | nn.Module) -> None:
        self.modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        forwards = [module.forward for module in self.modules]
        roots: list[Any] = [fn, *forwards, *(hooks_of(self.modules) if self.modules else ())]
        reach, before = ReachedObjects(self.modules), -1
        # Objects lead to further functions, and these to further objects.
        while len(reach.objects) != before:
            before = len(reach.objects)
            self.functions = [*roots, *reach.functions.values()]
            self.called = called_functions(
                self.functions, map(type, (*self.modules, *reach.objects.values()))
            )
            reach.add(
                (
                    value
                    for function in (*self.functions, *self.called)
                    for value in reachable_values(function)
                ),
                are_named=True,
            )
        self._objects = [*reach.objects.values()]
        self.objects = self._objects if self.modules else []

    def classes(self) -> Iterator[type]:
        """Yield the classes of modules and objects, and those that functions name."""
        yield from map(type, (*self.modules, *self._objects))
        for function in self.called:
            yield from (cls for cls, _ in class_names(function))
