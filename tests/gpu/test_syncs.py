"""No operation of ours makes the host wait for a card, but those that `plan.uncapturable` lists.

The functions behind the operations run on tensors of a card without values: reading one is an
error, and copies to it are seen. `tests/gpu/test_steps.py` forbids waits on a card.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from meta_card import CUDA, NO_VALUES, MetaCard
from samples import SAMPLES
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import torchgspmd.features.tables  # noqa: F401 (registers the operations)
from torchgspmd.rules.custom_ops import random, updates

ours = torch.ops.torchgspmd
UNSAFE = torch.Tag.cudagraph_unsafe
# Operations without a kernel on the card; experts have one in bfloat16 alone.
EXPERTS = {"grouped_mm", "grouped_outer", "block_mm", "block_outer"}
WAITING = {*EXPERTS, "ctc_losses", "flex_attention", "flex_attention_backward", "token_order"}
WAITING |= {"linear_sum_assignment"}  # SciPy's, on the host
WAITING |= {f"flex_attention_backward_{count}" for count in range(1, 5)}  # learned buffers


class Copies(TorchDispatchMode):
    """Copies from the host to the card for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func._opname in ("_to_copy", "copy_") and isinstance(out, Tensor) and out.is_meta:
            source = args[0] if func._opname == "_to_copy" else args[1]
            blocks = not (kwargs.get("non_blocking") or func._opname == "copy_" and args[2:])
            self.count += source.device.type == "cpu" and source.dim() > 0 and blocks
        return out


@pytest.fixture(scope="module", autouse=True)
def caches_without_meta() -> Iterator[None]:
    """Empty the package's caches, which may have tensors without values."""
    yield
    for name, module in [*sys.modules.items()]:
        for value in vars(module).values() if name.startswith("torchgspmd.") else ():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def cases() -> list[Any]:
    """Return samples of our operations, without draws that read a seed of the CPU."""
    found = []
    for target, made in SAMPLES.items():
        for i, make in enumerate(made if f"{target.name()}" in OPDEFS else ()):
            args = make()[0]
            if target is not ours.uniform.default or torch.float64 not in args and not args[-1]:
                found.append(pytest.param(target, make, id=f"{target.name()}-{i}"))
    return found


@functools.cache
def waits(target: Any, make: Callable[[], Any]) -> str:
    """Return the operation for which the host waits in the second call, or ""."""
    hopper = patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0))
    adam = {name: lambda *args, **options: None for name in ("_fused_adam_", "_fused_adamw_")}
    draws = patch.object(random, "_kernel", lambda: lambda *_: True)
    with MetaCard(), draws, hopper, patch.multiple(updates, **adam):
        args, kwargs = make()

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(CUDA)
            return CUDA if isinstance(value, torch.device) else value

        args, kwargs = tree_map(moved, (args, kwargs))
        function = OPDEFS[target.name()]._init_fn
        for _ in range(2):
            with Copies() as copies:
                try:
                    function(*args, **kwargs)
                except NO_VALUES as error:
                    return f"a value: {error}"
        return f"{copies.count} copies" if copies.count else ""


@pytest.mark.parametrize("target, make", cases())
def test_the_host_waits_for_listed_operations_alone(target: Any, make: Callable) -> None:
    assert not (found := waits(target, make)) or UNSAFE in target.tags, found


def test_listed_operations_wait() -> None:
    found = {case.values[0]._opname for case in cases() if waits(*case.values)}
    assert found == WAITING
