"""Like layers are one decision: a model is judged by one and by two of its layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

MIN_LAYERS = 4  # of a list that is shortened


def like_layers(model: nn.Module) -> tuple[list[nn.ModuleList], int]:
    """Return the lists of like layers of a model, all of one length, and that length.

    Lists inside of a layer are left alone. Without such a list the length is 0.
    """
    lists: list[nn.ModuleList] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inner:
            if len(module) >= MIN_LAYERS and len({_signature(child) for child in module}) == 1:
                lists.append(module)
                inner.update(id(each) for each in module.modules())
    length = max(map(len, lists), default=0)
    return [layers for layers in lists if len(layers) == length], length


def _signature(layer: nn.Module) -> tuple[object, ...]:
    return type(layer), *((name, tuple(p.shape)) for name, p in layer.named_parameters())


@contextmanager
def shortened(lists: list[nn.ModuleList], count: int) -> Generator[None]:
    """Have only the first layers of each list in the block."""
    saved = [layers._modules for layers in lists]
    for layers, modules in zip(lists, saved):
        layers._modules = OrderedDict(list(modules.items())[:count])
    try:
        yield
    finally:
        for layers, modules in zip(lists, saved):
            layers._modules = modules
