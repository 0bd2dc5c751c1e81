"""The submodules that can be wrapped alone, if a model branches on its arguments' values.

branches in     layers.0.mlp.experts, a Mixture
wrapped alone   embed, layers.*.attention, layers.*.mlp.router, head: no Mixture is in these
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType

from torch import nn

_MOST = 5  # names in a message


def wrapped_alone(trace: TracebackType | None) -> str | None:
    """Return the names of the largest submodules that do not branch; None if there are none.

    trace: the error's traceback, whose innermost forward belongs to the module that branches.
    """
    modules = list(modules_in(trace))
    if not modules:
        return None
    root, kind = modules[0], type(modules[-1])
    names = dict.fromkeys(_names(root, "", kind)) if kind is not type(root) else {}
    if modules[-1] is root:
        names = dict.fromkeys(name for name, child in root.named_children() if _is_large(child))
    listed = ", ".join(f"'{name}'" for name in list(names)[:_MOST])
    return f"{listed} and {len(names) - _MOST} more" if len(names) > _MOST else listed or None


def modules_in(trace: TracebackType | None) -> Iterator[nn.Module]:
    """Yield the modules whose forward is in a traceback, except torchgspmd's own."""
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        own = str(frame.f_globals.get("__name__")).startswith(__name__.partition(".")[0] + ".")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and not own:
            yield module
        trace = trace.tb_next


def name_of_innermost(trace: TracebackType | None) -> str | None:
    """Return the innermost module's name in the outermost module of a traceback, or None."""
    modules = list(modules_in(trace))
    names = modules[0].named_modules() if modules else ()
    return next((name for name, module in names if name and module is modules[-1]), None)


def _names(module: nn.Module, prefix: str, kind: type) -> Iterator[str]:
    """Yield the names of the largest submodules that contain no module of the kind."""
    for name, child in module.named_children():
        if not any(isinstance(each, kind) for each in child.modules()):
            if _is_large(child):
                # Numbers become *, so that layers with one structure are listed once.
                yield re.sub(r"(?<![^.])\d+(?![^.])", "*", prefix + name)
        else:
            yield from _names(child, f"{prefix}{name}.", kind)


def _is_large(module: nn.Module) -> bool:
    """Return whether a module has weights with more than one dimension."""
    return any(p.dim() > 1 for p in module.parameters())
