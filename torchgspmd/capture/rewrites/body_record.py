"""Record the outside values that a loop body uses, and whether it draws random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...compat.private_apis import TorchDispatchMode, is_functorch_wrapped_tensor
from ...compat.private_apis import _pytree as pytree
from ...rules import has_own_seed


class Record(TorchFunctionMode):
    """Notes operands that need a gradient and that nothing has computed since its start.

    draws: whether random numbers are drawn without a seed of ours. seeds: whether with one.
    """

    def __init__(self, own: Sequence[Tensor], every: bool) -> None:
        super().__init__()
        self.outer: dict[int, Tensor] = {}
        self.results: list[Tensor] = []
        self.draws = self.seeds = False
        self.every = every
        self.of_the_body = {id(x): x for x in own}

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.use(pytree.tree_leaves((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        self.add(pytree.tree_leaves(result))
        return result

    def use(self, operands: Sequence[object]) -> None:
        for x in operands:
            if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x):
                continue  # torch.vmap wraps values that are noted
            if (self.every or x.requires_grad) and id(x) not in self.of_the_body:
                self.outer.setdefault(id(x), x)

    def add(self, results: Sequence[Any]) -> None:
        self.of_the_body.update((id(x), x) for x in results if id(x) not in self.outer)


class Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.record.draws |= not has_own_seed(func)
            self.record.seeds = True
        return func(*args, **(kwargs or {}))
