"""What a module's forward assigns to its attributes: buffers are results of the program, everything else is of the trace alone."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ShardingError, user_line
from .objects import opened


def rebound_buffers(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The buffers that forward gave another tensor (self.mean = 0.9 * self.mean + ...), by place among the inputs."""
    now = dict(module.named_buffers())
    found = {i: now[name] for i, (name, tensor) in enumerate(zip(names, inputs)) if name in now and now[name] is not tensor}
    for i, value in found.items():
        if value.shape != inputs[i].shape or value.dtype != inputs[i].dtype:
            raise ShardingError(f"forward gives buffer '{names[i]}' another shape or dtype: {value.dtype} {list(value.shape)} instead of "
                                f"{inputs[i].dtype} {list(inputs[i].shape)}", where=user_line(),
                                why="one program is made for all calls, and the next one would be another", fix="return the tensor")
    return found


@contextmanager
def kept_attributes(objects: Iterable[Any], traced: type[Tensor]) -> Iterator[None]:
    """Afterwards attributes that were assigned tensors of the trace, which have no values, are again what they were."""
    before = [(holder, _entries(holder)) for o in objects for holder in _holders(o.__dict__, {id(o.__dict__)})]
    try:
        yield
    finally:
        for holder, old in before:
            changed = [name for name, value in _entries(holder).items() if value is not old.get(name) and _holds(value, traced)]
            if isinstance(holder, list) and changed:
                holder[:] = old.values()
            elif isinstance(holder, dict):
                for name in changed:
                    if name in old:
                        holder[name] = old[name]
                    else:
                        del holder[name]


def _holders(holder: dict | list, seen: set[int]) -> Iterator[dict | list]:
    """A table of attributes, and the tables and lists in it: models keep what they computed once in such."""
    yield holder
    for value in _entries(holder).values():
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            yield from _holders(value, seen)


def _entries(holder: dict | list) -> dict:
    return dict(enumerate(holder)) if isinstance(holder, list) else dict(holder)


def _holds(value: Any, kind: type[Tensor]) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(opened(value)))
