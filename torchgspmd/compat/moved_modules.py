"""Modules that have moved. A public name's old path works for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

MOVED = {
    "annotate": "layout.annotate",
    "api": "compiler.api",
    "blocks": "nn",
    "calibrate": "tools.calibrate",
    "collectives": "model_api.collectives",
    "compare_with_xla": "tools.compare_with_xla",
    "doctor": "tools.doctor",
    "evaluation": "tools.evaluation",
    "hardware": "comm.hardware",
    "layout_rules": "layout.layout_rules",
    "manual": "model_api.manual",
    "mesh": "layout.mesh",
    "moe": "model_api.moe",
    "plan": "compiler.plan",
    "report.visualize": "tools.report.visualize",
    "runtime.train_step": "model_api.train_step",
    "spec_notation": "layout.spec_notation",
    "suggest": "tools.suggest",
}


class MovedModule(ModuleType):
    """The module at an old path: its names come from the new path."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Moved to {new}.")
        self._new = new

    def __getattr__(self, name: str) -> Any:
        # Import machinery asks for these: they must not load the new module.
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(self._new), name)
        message = f"{self.__name__} has moved: import {name} from {self._new}, or from torchgspmd"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value


def install(package: str) -> None:
    """Redirect imports from old paths to the new ones; the package's attributes stay."""
    for old, new in MOVED.items():
        names = old.split(".")
        for i in range(1, len(names) + 1):
            path = ".".join([package, *names[:i]])
            # A folder that still exists has other modules too: it stays importable.
            is_here = i == 1 < len(names) and PathFinder.find_spec(
                path, [*sys.modules[package].__path__]
            )
            if path not in sys.modules and not is_here:
                sys.modules[path] = MovedModule(path, f"{package}.{new if i == len(names) else ''}")
