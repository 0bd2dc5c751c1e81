"""RecordedGraphs: CUDA graphs without a card. They record what runs, and replay it on its memory.

    graphs = RecordedGraphs()
    graphs.captures, graphs.replays             how often

A capture notes PyTorch's operations with the memory that each reads and writes. Afterwards all that
it allocated is poison, and inputs have their old values: nothing has run. A replay calls the same
operations on the same memory; no Python of the program runs again. Memory that a capture frees is
poison after the next one in its pool has run. Reading a value is an error, as on a card.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchgspmd.runtime.step_graphs import Capture

WAIT = torch.ops._c10d_functional.wait_tensor.default
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


def tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def poison(memory: Tensor) -> None:
    """Fill a tensor's bytes: NaN where they are floats, indices out of range elsewhere."""
    whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
    whole.fill_(0xFF if memory.is_floating_point() else 0x7F)


class Tape(TorchDispatchMode):
    """Operations of one capture. before: the values of memory that it did not allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, Tensor] = {}  # memory that it allocates
        self.holders: dict[int, list[Callable[[], Any]]] = {}  # the program's tensors on it
        self.freed: list[Tensor] = []  # memory of earlier captures that it may have taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for value, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tensors(value):
                    if address(x) not in self.own:
                        self.before.setdefault(address(x), (x.detach(), x.detach().clone()))
        given = {address(x) for x in tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for x in tensors(out):
            if address(x) not in given:
                self.own[address(x)] = x.detach()
            self.holders.setdefault(address(x), []).append(weakref.ref(x))
        # Aliases, so that memory which the program frees is seen.
        self.calls.append((func, *tree_map(self._alias, (args, kwargs, out)), given))
        return out

    @staticmethod
    def _alias(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    def end(self, earlier: list[Tape]) -> None:
        for memory, value in self.before.values():
            memory.copy_(value)
        for tape in earlier:
            for place, holders in tape.holders.items():
                if place in tape.own and all(holder() is None for holder in holders):
                    self.freed.append(tape.own[place])
        self.poison()

    def poison(self) -> None:
        for memory in self.own.values():
            poison(memory)

    def replay(self) -> None:
        self.poison()
        for func, args, kwargs, out, given in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(out), tensors(again)):
                if address(old) not in given:
                    old.copy_(WAIT(new) if func.namespace == WAIT.namespace else new)
        for memory in self.freed:
            poison(memory)


class RecordedGraphs:
    """Stands for CudaGraphs."""

    def __init__(self) -> None:
        self.warm_ups = self.captures = self.replays = self.freed = 0
        self.tape: Tape | None = None

    def is_capturing(self) -> bool:
        return self.tape is not None

    def new_pool(self) -> list[Tape]:
        return []

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return run()

    def capture(self, run: Callable[[], Any], pool: list[Tape]) -> Capture:
        self.captures += 1
        self.tape = Tape()
        tape = self.tape
        try:
            with tape:
                results = run()
        finally:
            self.tape = None
        tape.end(pool)
        self.freed += len(tape.freed)
        pool.append(tape)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                tape.replay()

        return Capture(replay, results)
