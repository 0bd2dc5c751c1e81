"""Check the abilities of the installed torch: `python -m torchgspmd doctor`."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..compat.private_apis import CHECKED, TABLE, PrivateApi, is_checked, is_newer, is_there
from ..rules.registry import RULES, is_registered
from ..rules.rewrites import SKIPPED


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor()`, which prints as the command's text.

    torch: the version. is_checked: the tests were run on that release. missing: private APIs that
    this torch lacks. operators: operators with a rule here that this torch lacks. later: operators
    in libraries that are not imported yet. backends: (backend for parallelize, its platform).
    """

    torch: str
    is_checked: bool
    missing: tuple[PrivateApi, ...]
    operators: tuple[str, ...]
    later: tuple[str, ...]
    backends: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        state = (
            "checked"
            if self.is_checked
            else f"{'newer than' if is_newer() else 'not among'} the checked"
        )
        lines = [f"torch      {self.torch}: {state} ({', '.join(CHECKED)})"]
        # Without XLA's: to look for these would import torch_xla.
        apis = [api for api in TABLE if not api.is_of_xla]
        lines += [f"private    {len(apis) - len(self.missing)} of {len(apis)} APIs found"]
        for api in self.missing:
            lost = f"no {api.needed_for}" if api.needed_for else f"lost: {api.lost}"
            lines.append(f"           {api.path} is missing: {lost}")
        lines += [
            f"operators  {len(RULES)} with rules; of those known here this torch lacks "
            f"{', '.join(self.operators) or 'none'}"
        ]
        lines += [f"           not imported yet: {', '.join(self.later)}"] * bool(self.later)
        lines += [f"backend    {name}: {what}" for name, what in self.backends]
        return "\n".join(lines)

    __repr__ = __str__


def doctor() -> Diagnosis:
    """Check which parts of the installed torch can be used.

    It communicates nothing and starts no XLA client.

    Returns:
        A Diagnosis, which prints as a few lines: torch's version, missing private APIs and the loss
        with each, missing operators, backends.

    Example:
        >>> import torchgspmd
        >>> torchgspmd.doctor().missing
        ()
    """
    missing = tuple(
        api for api in TABLE if not api.is_of_xla and not (is_there(api) or _is_expected(api))
    )
    later = [name for name in RULES if isinstance(name, str) and not is_registered(name)]
    return Diagnosis(
        torch.__version__,
        is_checked(),
        missing,
        # Several rows may name one operator.
        tuple(sorted({*SKIPPED})),
        tuple(sorted(later)),
        tuple(_backends()),
    )


def _is_expected(api: PrivateApi) -> bool:
    """True if a checked release with this number lacks the API as well: it passed the tests."""
    number = ".".join(torch.__version__.split(".")[:2])
    return number in CHECKED and number not in api.versions


def _backends() -> list[tuple[str, str]]:
    available = [n for n in ("gloo", "nccl") if getattr(dist, f"is_{n}_available", bool)()]
    gpus = torch.cuda.device_count()
    # inductor writes C++ for a CPU, and Triton for a GPU.
    compiler = shutil.which("g++") or shutil.which("clang++")
    libraries = ", ".join(available) or "torch.distributed is not available"
    return [
        ("torch", f"{libraries}; {gpus or 'no'} GPU{'s' * (gpus != 1)}"),
        ("inductor", "at hand" if compiler or gpus else "no C++ compiler found"),
        ("xla", _version("torch_xla") or "torch_xla is not installed"),
    ]


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
