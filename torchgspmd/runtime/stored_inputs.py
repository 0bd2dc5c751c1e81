"""Marked tensors that a program changes in place, such as KV caches, are stored sharded.

    mark_sharding(cache.keys, mesh, "data model _ _")
    model(x, cache)                 # cache.keys is a DTensor from here on

They come as whole tensors. As such every call would gather changed values. So the first call
replaces them, in the list, dict or object that contains them, by DTensors with the marked layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..capture import ARGUMENT, MUTATION, OUTPUT, Captured, Source, tensor_sources
from ..comm.process_groups import ProcessGroups
from ..dtensor.storage import storable, stored_shape, wrap_local
from ..errors import user_line
from ..layout.mark import copy_mark
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec


class Stored(BaseException):
    """A call's inputs have become DTensors: it has another key now. It is no failure."""


class MarkedInputs:
    """The marked whole tensors that a call's program changes or replaces."""

    def __init__(self, captured: Captured, tensors: Sequence[Tensor], mesh: Mesh) -> None:
        """Find them. tensors: the arguments', then the state's."""
        arguments = (i for i, each in enumerate(captured.inputs) if each.kind == ARGUMENT)
        positions = {i: position for position, i in enumerate(arguments)}
        self.arguments = len(tensors) - len(captured.state_inputs)
        self.sources = [each.source for each in captured.state_inputs]
        self.names, self.specs, self.changed = {}, {}, set()
        for out in captured.outputs:
            position = positions.get(out.input, -1) if out.kind in (MUTATION, OUTPUT) else -1
            mark = captured.inputs[out.input].mark
            if position < 0 or mark is None or isinstance(tensors[position], DTensor):
                continue
            spec = storable(mark.closed(), captured.inputs[out.input].shape, mesh)
            if spec.sharding_axes:
                self.names[position] = captured.inputs[out.input].name
                self.specs[position] = spec
                if out.kind == MUTATION:
                    self.changed.add(position)

    def places(self, tensors: Sequence[Tensor], passed: Any) -> dict[int, Source]:
        """Return where they are, by position; warn about one that cannot be replaced there.

        passed: the call's (args, kwargs).
        """
        in_arguments, places = tensor_sources(passed), {}
        for position, spec in self.specs.items():
            # A later call may come without the state's tensors.
            if position >= len(tensors):
                break
            tensor = tensors[position]
            source = in_arguments.get(id(tensor))
            if position >= self.arguments:
                source = self.sources[position - self.arguments]
            why = _obstacle(tensor, source, position in self.changed)
            if why is None and source is not None:
                places[position] = source
                continue
            warnings.warn(
                f"'{self.names[position]}' is marked '{spec}' and changed in place, but gathered "
                f"by every call: {why} ({user_line()})",
                stacklevel=2,
            )
        return places

    def store(
        self, tensors: Sequence[Tensor], passed: object, mesh: Mesh, groups: ProcessGroups
    ) -> bool:
        """Put DTensors in their place. Return whether there was one.

        tensors: the arguments', with or without the state's.
        """
        places = self.places(tensors, passed)
        for position, source in places.items():
            source.write(_stored(tensors[position], self.specs[position], mesh, groups), passed)
        return bool(places)


def _obstacle(tensor: Tensor, source: Source | None, is_changed: bool) -> str | None:
    """Say why a DTensor cannot take a tensor's place, and how to mend it; None if it can.

    is_changed: in place, and not replaced by another tensor.
    """
    if source is None:
        return (
            "an argument itself stays the caller's tensor; pass it in a list, a dict or an "
            "object, or as a DTensor (torch's distribute_tensor)"
        )
    # A DTensor in its place would not change the tensor that it is a view of.
    if is_changed and tensor._base is not None:
        return "it is a view of another tensor; clone() it"
    return "it requires a gradient" if tensor.requires_grad else None


@torch.no_grad()
def _stored(tensor: Tensor, spec: ShardSpec, mesh: Mesh, groups: ProcessGroups) -> DTensor:
    """Return a whole tensor, the same on every rank, as a DTensor; nothing is sent."""
    local, shape = tensor, tuple(tensor.shape)
    rows_here = stored_shape(spec, shape, mesh, groups.coordinates)
    for dim, (size, rows, axes) in enumerate(zip(shape, rows_here, spec.dims)):
        start = mesh.index(axes, groups.coordinates) * -(-size // mesh.count(axes))
        local = local.narrow(dim, min(start, size), rows)
    # A view would keep the whole tensor alive.
    local = local.clone(memory_format=torch.contiguous_format)
    stored = wrap_local(local, spec, shape, mesh, groups.device_mesh)
    copy_mark(tensor, stored)
    return stored
