"""Audit: values that ranks have in common, compared every few calls by one small message.

    a parameter, buffer or optimizer state   ranks that differ only along axes which do not shard
                                             it have equal bits
    its gradient of the call before          they have nearly equal norms
    the loss of the call before              all ranks have nearly the same
    a parameter that is trained              it has no NaN

A rank's words are sums of hashes, one per set of sharding axes: as many words as the mesh has such
sets. Which tensor and which rank differs is asked only when words do.

On the CPU values are read before the forward, and the ranks meet behind it. A GPU's values are read
behind the forward, and the ranks meet at the next call, so that no rank waits for its kernels.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..capture import PARAMETER
from ..capture.state.dependencies import named_tensors
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck
from ..comm.value_check import hash_of_bits
from ..compat.operators import aten
from ..compat.private_apis import _pytree as pytree
from ..dtensor.storage import local_of, spec_of
from .audit_reading import Item, Reading, axes_of
from .joint_program import JointProgram
from .mesh_module import ModuleCall

_LOSS = "the loss"
_LARGEST_LOSS = 16  # elements of a result that may be a loss


class Audit:
    """One module's comparisons on a mesh. every: calls from one to the next."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, every: int) -> None:
        self.model, self.groups, self.every, self.calls = model, groups, every, 0
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.axes = axes_of(groups.mesh)
        self._loss: list[Tensor] = []
        self._norms: tuple[list[str], Tensor | None] = [], None
        self._reading: Reading | None = None
        # Weak: the hook is global, and would keep the module alive.
        own = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: object) -> None:
            if (audit := own()) is not None and audit._updates(optimizer):
                audit.optimizers.add(optimizer)

        # An optimizer is found when it steps: nothing else says which ones train this module.
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def of_copy(self, model: nn.Module) -> Audit:
        return Audit(model, self.groups, self.every)

    def _updates(self, optimizer: Optimizer) -> bool:
        first = next((p for g in optimizer.param_groups for p in g["params"]), None)
        return first is not None and any(first is p for p in self.model.parameters())

    def run(self, program: JointProgram, call: ModuleCall, rank_check: RankCheck) -> object:
        """Run a call, and compare its audit's values."""
        self._begin(program)
        result = program(call.leaves, call.passed, rank_check)
        self._end_forward(pytree.tree_leaves(result))
        return result

    def _begin(self, program: JointProgram) -> None:
        """Compare if this is a k-th call; note gradients at the call before it."""
        self._finish()
        self.calls += 1
        program.on_gradients = None
        if self.calls % self.every == 0:
            self._reading = Reading(
                self.groups, self._items(), *self._nans(), self.calls, self.every
            )
            if self.groups.device_type == "cpu":
                self._reading.read()
        elif (self.calls + 1) % self.every == 0:
            program.on_gradients = weakref.WeakMethod(self._take_gradients)
        self._loss, self._norms = [], ([], None)
        if self.every == 1:
            program.on_gradients = weakref.WeakMethod(self._take_gradients)

    def _end_forward(self, results: Sequence[object]) -> None:
        """Read the CPU's message, or send a GPU's. results: the call's."""
        if self._reading is not None:
            if self.groups.device_type == "cpu":
                self._finish()
            else:
                self._reading.read()
        # A loss is small and whole; comparing larger results would cost time.
        small = (r for r in results if isinstance(r, Tensor) and not isinstance(r, DTensor))
        self._loss = [
            r.detach() for r in small if r.is_floating_point() and r.numel() <= _LARGEST_LOSS
        ]

    def _finish(self) -> None:
        """Read the message that was sent; raise RankError if ranks differ."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.finish()

    def _take_gradients(self, program: JointProgram, gradients: Sequence[object]) -> None:
        inputs = program.captured.inputs
        named = [
            (inputs[i].name, local_of(g))
            for i, g in zip(program.gradient_inputs, gradients)
            if inputs[i].kind == PARAMETER and isinstance(g, Tensor) and g.numel()
        ]
        if named:
            # One kernel for all, in float32: half-precision sums would differ by rounding alone.
            norms = aten._foreach_norm.Scalar([g.float() for _, g in named], 2)
            self._norms = [name for name, _ in named], torch.stack(list(norms))

    def _items(self) -> list[Item]:
        found = dict(self._tensors())
        items = [
            Item(name, axes, local, hash_of_bits(local)) for name, (axes, local) in found.items()
        ]
        names, norms = self._norms
        for i, name in enumerate(names if norms is not None else ()):
            if name in found:
                axes, local = found[name]
                # The root: replicas sum their terms in other orders.
                tolerance = math.sqrt(torch.finfo(local.dtype).eps)
                value = norms[i].double()  # pyright: ignore[reportOptionalSubscript]
                items.append(Item(f"the gradient of {name}", axes, local, value, tolerance))
        for loss in self._loss:
            value = loss.double().norm()
            items.append(Item(_LOSS, 0, loss, value, math.sqrt(torch.finfo(loss.dtype).eps)))
        return items

    def _nans(self) -> tuple[list[str], list[Tensor]]:
        """Return trained parameters' names, and for each shard whether it has a NaN."""
        trained = [
            (name, local_of(p.detach()))
            for name, p in self.model.named_parameters()
            if p.requires_grad and p.is_floating_point() and local_of(p).numel()
        ]
        if not trained:
            return [], []
        # A norm is NaN if any element is, and all norms take one pass.
        norms = aten._foreach_norm.Scalar([local for _, local in trained], 2)
        return [name for name, _ in trained], [norm.isnan().long() for norm in norms]

    def _tensors(self) -> Iterator[tuple[str, tuple[int, Tensor]]]:
        """Yield each tensor that has replicas: its name, the axes that shard it, its shard."""
        names = dict[int, str]()
        for name, tensor in named_tensors(self.model):
            # Tied tensors are one value.
            if id(tensor) in names:
                continue
            names[id(tensor)] = name
            if (axes := self._axes_of(tensor, None)) is not None:
                yield name, (axes, local_of(tensor))
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                owner = names.get(id(parameter), "")
                for kind, value in state.items() if owner else ():
                    if isinstance(value, Tensor):
                        axes = self._axes_of(value, parameter)
                        if axes is not None:
                            yield f"{kind} of {owner}", (axes, local_of(value))

    def _axes_of(self, tensor: Tensor, parameter: Tensor | None) -> int | None:
        """Return the axes that shard a tensor, as bits; None if no other rank has the same.

        parameter: the one that an optimizer state belongs to. A plain state has the layout of the
        parameter's shard if it has its shape.
        """
        if not isinstance(tensor, DTensor) and parameter is not None and tensor.dim():
            is_shard = local_of(parameter).shape == tensor.shape
            return self._axes_of(parameter, None) if is_shard else None
        sharding: set[str] = set()
        if isinstance(tensor, DTensor):
            if tensor.device_mesh != self.groups.device_mesh:
                return None
            sharding = {*spec_of(tensor, self.groups.mesh).sharding_axes}
        elif parameter is None:
            return None
        bits = sum(1 << i for i, name in enumerate(self.axes) if name in sharding)
        # Sharded over all axes: no other rank has the same rows.
        return None if bits == (1 << len(self.axes)) - 1 or not local_of(tensor).numel() else bits
