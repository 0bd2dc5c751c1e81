"""Build models narrow and shallow whose classes take no widths: every layer's widths are divided.

A constructor that writes its widths down (512 channels, 4,096 features) runs as it is. Meanwhile
the layers of torch that it creates divide the widths that they get, and parameters of its own are
cut. Numbers that no factor divides, such as three colors, stay.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

Built = tuple[nn.Module, dict[str, Any]]  # a model and the arguments of a call
BATCH, LARGEST = 4, 30_000_000  # rows, and parameters
LEAST = 4  # of a divided width
CONVOLUTION, NORM = ("in_channels", "out_channels"), ("num_features",)
WIDTHS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Embedding: ("embedding_dim",),
    nn.LayerNorm: ("normalized_shape",),
    nn.GroupNorm: ("num_channels",),
    nn.MultiheadAttention: ("embed_dim", "kdim", "vdim"),
} | {
    getattr(nn, f"{kind}{n}d"): names
    for kind, names in (("Conv", CONVOLUTION), ("ConvTranspose", CONVOLUTION), ("BatchNorm", NORM))
    for n in (1, 2, 3)
}


def divided(width, by: int):
    if isinstance(width, tuple | list):
        return type(width)(divided(w, by) for w in width)
    fits = type(width) is int and width % by == 0 and width // by >= LEAST
    return width // by if fits else width


@contextmanager
def narrowed(by: int) -> Iterator[None]:
    """Divide the widths of all layers that are created meanwhile."""
    inside: list[nn.Module] = []  # layers whose constructors run

    def wrapped(cls: type[nn.Module], names: tuple[str, ...]):
        init, signature = cls.__init__, inspect.signature(cls.__init__)

        def create(self, *args, **kwargs):
            given = signature.bind(self, *args, **kwargs)
            if not inside:
                wide = dict(given.arguments)
                given.arguments |= {n: divided(wide[n], by) for n in names if n in wide}
                parts = [v for n in names if type(v := given.arguments.get(n)) is int]
                for key in ("groups", "num_groups", "num_heads"):
                    if key in wide and wide[key] == wide.get("in_channels"):
                        given.arguments[key] = given.arguments["in_channels"]  # one a channel
                    elif key in wide:
                        given.arguments[key] = math.gcd(wide[key], *parts)
            inside.append(self)
            try:
                init(*given.args, **given.kwargs)
            finally:
                inside.pop()

        return patch.object(cls, "__init__", create)

    register = nn.Module.register_parameter

    def registered(self, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not inside and not hasattr(parameter, "_narrow"):
            if type(self) not in WIDTHS:
                cut = tuple(slice(divided(n, by)) for n in parameter.shape)
                parameter.data = parameter.data[cut].clone()
            parameter._narrow = True
        register(self, name, parameter)

    with ExitStack() as all_patches:
        for cls, names in WIDTHS.items():
            all_patches.enter_context(wrapped(cls, names))
        all_patches.enter_context(patch.object(nn.Module, "register_parameter", registered))
        yield


def shallower(model: nn.Module, most: int = 2) -> None:
    """Leave `most` of the children of a list or sequence that follow each other and are alike."""
    for module in list(model.modules()):
        if type(module) not in (nn.Sequential, nn.ModuleList):
            continue
        left, run, last = [], 0, None
        for name, child in module._modules.items():
            kind = type(child), [(n, p.shape) for n, p in child.named_parameters()]
            run, last = (run + 1 if kind == last else 1), kind
            if run <= most or not kind[1]:
                left.append((name, child))
        if len(left) < len(module):
            keep = isinstance(module, nn.Sequential)
            module._modules = {n if keep else str(i): c for i, (n, c) in enumerate(left)}
