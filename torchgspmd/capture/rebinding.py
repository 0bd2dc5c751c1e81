"""What a module's forward assigns to its attributes: buffers and other tensors are results of the program, the rest is of the trace."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ShardingError, user_line
from .effects import Effect, made
from .objects import ATTRIBUTE, ITEM, opened
from .reads import ABSENT, overwritten


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


class Attributes:
    """Those of a module and the ones inside of it, while its forward is traced."""

    def __init__(self, module: nn.Module, traced: type[Tensor]):
        self.traced, self.modules = traced, dict(module.named_modules())
        self.before: dict[str, dict[str, Any]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Meanwhile tensors that earlier runs have assigned are not there, whatever a program does with them; afterwards attributes,
        and entries of tables and lists in them, that were assigned tensors of the trace, which have no values, are what they were."""
        hidden = [(m, name, m.__dict__[name]) for m in self.modules.values() for name in overwritten.get(m, ())
                  if _holds(m.__dict__.get(name), Tensor)]
        for module, name, _ in hidden:
            _put(module, name, overwritten[module][name])
        self.before = {path: dict(m.__dict__) for path, m in self.modules.items()}
        holders = [(holder, _entries(holder)) for m in self.modules.values() for holder in _holders(m.__dict__, {id(m.__dict__)})]
        try:
            yield
        finally:
            for holder, old in holders:
                self._restore(holder, old)
            for module, name, value in hidden:
                _put(module, name, value)

    def assigned(self, outputs: list[Tensor]) -> list[Effect]:
        """The tensors that forward has assigned, which are added to the outputs of the program."""
        found = []
        for path, module in self.modules.items():
            changed = {name: value for name, value in module.__dict__.items()
                       if value is not self.before[path].get(name) and _holds(value, self.traced)}
            if changed:
                before = overwritten.setdefault(module, {})
                for name in changed:
                    before.setdefault(name, self.before[path].get(name, ABSENT))
                found.append(Effect(((ITEM, 2), *((ATTRIBUTE, name) for name in path.split(".") if name)),
                                    {(ATTRIBUTE, name): made(value, outputs) for name, value in changed.items()}))
        return found

    def _restore(self, holder: dict | list, old: dict) -> None:
        changed = [name for name, value in _entries(holder).items() if value is not old.get(name) and _holds(value, self.traced)]
        if isinstance(holder, list) and changed:
            holder[:] = old.values()
        elif isinstance(holder, dict):
            for name in changed:
                if name in old:
                    holder[name] = old[name]
                else:
                    del holder[name]


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is ABSENT:
        del module.__dict__[name]
    else:
        module.__dict__[name] = value


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
