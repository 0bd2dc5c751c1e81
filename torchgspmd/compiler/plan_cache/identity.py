"""The key for a plan's text: everything the plan depends on that its guards do not compare."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...capture.state.bytecode_names import is_installed
from ...capture.state.dependencies import CALL, START, TABLES, facts_of
from ...comm.kinds import KINDS
from ...layout.mesh import Mesh
from .contents import content
from .guard_text import module_names
from .values import Stale, Unshareable

_FORMAT = 3
_OWN = __name__.partition(".")[0]
# Variables that change no plan, or differ between hosts, as those of an elastic job's copies do.
_NO_OPTIONS = tuple(
    f"TORCHGSPMD_{name}" for name in ("CACHE", "DUMP", "CHECK", "COPIES", "BUG_REPORT", "HOST")
)


@dataclass(frozen=True)
class Identity:
    """A plan's key.

    call: the call, the same on all ranks. code: a checksum for each loaded user module, and a
    version for each installed package.
    """

    call: str
    code: dict[str, str]

    @property
    def text(self) -> str:
        """Return the whole key as text."""
        return json.dumps([self.call, self.code], sort_keys=True)

    def check_code(self, code: dict[str, str]) -> None:
        """Raise Stale if a module loaded here differs there, or is not loaded."""
        # These alone: the other process may have loaded more modules.
        for name, version in self.code.items():
            if code.get(name) != version:
                raise Stale(f"module {name} is another")


def identity_of(model: nn.Module, mesh: Mesh, text: str, options: dict[str, object]) -> Identity:
    """Return the key for the plan of a model's call.

    text: the call, and the model's modes. options: those for parallelize.

    Raises:
        Unshareable: A hook or an option has no text.
    """
    names = module_names(model)
    rows = [
        _FORMAT,
        [torch.__version__, platform.python_version(), platform.machine(), _own_code()],
        [*map(str, _settings()), *sorted(KINDS)],
        [str(mesh), text],
        content(options, names),
        [*_description(model, names)],
    ]
    return Identity(json.dumps(rows), _loaded_code())


def _settings() -> Iterator[object]:
    """Yield the torch settings that decide its traces."""
    yield torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():  # torch 2.9 advises another way to set it
        warnings.simplefilter("ignore")
        yield torch.get_float32_matmul_precision()
    yield torch.backends.cudnn.enabled
    yield torch.backends.mkldnn.enabled
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        yield getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
    if torch.cuda.is_available():
        # torch chooses kernels by the GPU, too.
        yield torch.cuda.get_device_properties(0)
    for name, value in sorted(os.environ.items()):
        if name.startswith("TORCHGSPMD_") and name not in _NO_OPTIONS:
            yield f"{name}={value}"


def _description(model: nn.Module, names: dict[int, str]) -> Iterator[Any]:
    """Yield a model's facts, by the rows of dependencies.py."""
    names = {**names, id(model): "the model"}
    for name, value in facts_of(model, TABLES, CALL, START):
        yield [name, value if isinstance(value, str) else content(value, names)]


@cache
def _own_code() -> str:
    """Return a checksum over this package's files."""
    files = sorted(Path(str(sys.modules[_OWN].__file__)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _loaded_code() -> dict[str, str]:
    """Return a checksum for each user module, and a version for each installed package.

    Raises:
        Unshareable: Code was typed in, so that nobody can compare it.
    """
    code: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top in sys.stdlib_module_names or top in ("torch", _OWN):
            if name != "__main__":
                continue
        if name == "__main__" and file is None:
            raise Unshareable("its code was typed in")
        # A version and the size of one file, not all content: an installed package has many files.
        if file is None or is_installed(name):
            if name == top and file is not None:
                size = os.path.getsize(file) if os.path.exists(file) else 0
                code[name] = f"{vars(module).get('__version__', '')} {size}"
        elif os.path.isfile(file):
            code[name] = _checksum(file, os.stat(file).st_mtime_ns)
    return code


@cache
def _checksum(file: str, time: int) -> str:
    """Return a file's checksum at a time of change."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
