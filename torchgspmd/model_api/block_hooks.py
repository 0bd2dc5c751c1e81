"""Forward hooks in blocks, which note values for the code around: transformers' attentions.

A hook that returns nothing is called when its block is called, with values between two blocks.
They are further results of the block. Other hooks run in the block's program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..capture import is_capturing
from ..compat.private_apis import _pytree as pytree
from ..compat.private_apis import is_functorch_wrapped_tensor
from ..errors import ShardingError


class HookCall(NamedTuple):
    """A call of a hook. leaves, tree: of the module's (arguments, results)."""

    hook: Callable[..., Any]
    module: nn.Module
    leaves: list[Any]
    tree: Any


@contextmanager
def seen_by_hooks(block: nn.Module, inner: Sequence[object] | None) -> Iterator[list[HookCall]]:
    """Call no hooks in the block; note their arguments. inner: hooks that are called; None: all."""
    found: list[HookCall] = []

    def noting(hook: Callable[..., Any]) -> Callable[..., Any]:
        def note(module: nn.Module, args: Any, results: Any) -> None:
            found.append(HookCall(hook, module, *pytree.tree_flatten((args, results))))

        return hook if any(hook is each for each in inner or ()) else note

    modules = [] if inner is None else [*block.modules()]
    hooked = [module for module in modules if module._forward_hooks]
    tables = [module._forward_hooks for module in hooked]
    for module, table in zip(hooked, tables):
        others = {*module._forward_hooks_with_kwargs, *module._forward_hooks_always_called}
        module._forward_hooks = OrderedDict(
            (key, hook if key in others else noting(hook)) for key, hook in table.items()
        )
    before = [(module, dict(vars(module))) for module in block.modules()]
    try:
        yield found
        if is_capturing():
            _check_attributes(block, before)
    finally:
        for module, table in zip(hooked, tables):
            module._forward_hooks = table


def _check_attributes(block: nn.Module, before: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Raise ShardingError if a block has set an attribute to a stages' value; take it away."""
    names = {id(module): name for name, module in block.named_modules()}
    for module, old in before:
        for key, value in [*vars(module).items()]:
            is_new = not key.startswith("_") and old.get(key, block) is not value
            leaves = pytree.tree_leaves(value) if is_new else ()
            if any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in leaves):
                vars(module).pop(key)
                vars(module).update({key: old[key]} if key in old else {})
                name = f"{names.get(id(module), '')}.{key}".lstrip(".")
                raise ShardingError.here(
                    f"a block of a stack or pipeline sets its attribute '{name}' to a tensor",
                    why="one program computes all blocks, and a value of it has no place there",
                    fix="return it with the block's result, x, loss = block(x): the loop may add "
                    "such values or collect them",
                )


def leaves_of(seen: Sequence[HookCall]) -> list[Any]:
    return [leaf for each in seen for leaf in each.leaves]


def call_hooks(seen: Sequence[HookCall], leaves: Sequence[Any]) -> list[object]:
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
