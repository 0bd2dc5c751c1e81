"""Forward hooks in blocks, which note values for the code around: transformers' attentions.

A hook that returns nothing is called when its block is called, with values between two blocks.
They are further results of the block. Other hooks run in the block's program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError


class Seen(NamedTuple):
    """What a hook is called with. leaves, tree: of the module's (arguments, results)."""

    hook: Callable[..., Any]
    module: nn.Module
    leaves: list[Any]
    tree: Any


@contextmanager
def seen_by_hooks(block: nn.Module, inner: Sequence[object] | None) -> Iterator[list[Seen]]:
    """Call no hooks in the block; note their arguments. inner: hooks that are called; None: all."""
    found: list[Seen] = []

    def noting(hook: Callable[..., Any]) -> Callable[..., Any]:
        def note(module: nn.Module, args: Any, results: Any) -> None:
            found.append(Seen(hook, module, *pytree.tree_flatten((args, results))))

        return hook if any(hook is each for each in inner or ()) else note

    modules = [] if inner is None else [*block.modules()]
    hooked = [module for module in modules if module._forward_hooks]
    tables = [module._forward_hooks for module in hooked]
    for module, table in zip(hooked, tables):
        others = {*module._forward_hooks_with_kwargs, *module._forward_hooks_always_called}
        module._forward_hooks = OrderedDict(
            (key, hook if key in others else noting(hook)) for key, hook in table.items()
        )
    try:
        yield found
    finally:
        for module, table in zip(hooked, tables):
            module._forward_hooks = table


def leaves_of(seen: Sequence[Seen]) -> list[Any]:
    return [leaf for each in seen for leaf in each.leaves]


def call_hooks(seen: Sequence[Seen], leaves: Sequence[Any]) -> list[object]:
    """Call hooks with other leaves; return those that have to run in the block's program."""
    remaining, inner = iter(leaves), list[object]()
    for each in seen:
        own = [next(remaining) for _ in each.leaves]
        args, results = pytree.tree_unflatten(own, each.tree)
        try:
            changed = each.hook(each.module, args, results)
        except ShardingError:  # it reads numbers, or writes them
            changed = True
        if changed is not None:
            inner.append(each.hook)
    return inner
