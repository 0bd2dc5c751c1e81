"""Operations and methods that torch's DTensor computes wrong, or not at all, for our DTensors.

Each is for the row in install.py that names the fault. A plain tensor beside a DTensor is the whole
tensor, the same on every rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..compat.operators import aten
from ..compat.patches import wrapping
from ..compat.private_apis import OpOverload
from ..errors import ShardingError
from .local_lists import is_replicated_number, local_tensors, matched, tensor_lists
from .ours import Handler, as_before, is_called_by, is_ours
from .parts import is_by_parts, parts_of
from .replicated_fallback import distribute_like, full_tensor, is_distributed, run_replicated
from .view_writeback import replace_data

_MEAN, _SUM = 1, 2  # values of the argument `reduction` of losses
_ADDITIVE = aten.add_.Tensor, aten.sub_.Tensor
_LINEAR = *_ADDITIVE, aten.mul_.Tensor, aten.div_.Tensor


@wrapping
def data_method(get: Callable, self: DTensor) -> Tensor:
    """Return the getter of `data`: a DTensor on the same memory, without propagation."""
    if type(self) is not DTensor or hasattr(self, "_view_of") or not is_ours(self):
        return get(self)
    return DTensor.__new__(DTensor, self._local_tensor, self._spec, requires_grad=False)


def set_data(self: DTensor, value: Tensor) -> None:
    """Set `data` to a DTensor or a whole tensor; nothing is sent unless layouts differ.

    Raise ShardingError for another shape, dtype or mesh.
    """
    if value.shape != self.shape or value.dtype != self.dtype:
        raise ShardingError.here(
            f"the data of a DTensor, {self.dtype} of shape {list(self.shape)}, "
            f"is set to {value.dtype} of shape {list(value.shape)}",
            why="programs were made for the one that was there",
            fix="change types by model.to(dtype), and shapes before the model is wrapped",
        )
    if not isinstance(value, DTensor):
        value = distribute_like(self, value)
    elif value.device_mesh != self.device_mesh:
        raise ShardingError.here(
            f"the data of a DTensor on {self.device_mesh} is set to one on {value.device_mesh}",
            fix="give it a DTensor on its own mesh, or the whole tensor",
        )
    else:
        value = value.redistribute(placements=self.placements)
    replace_data(self, value)


def in_place(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run an operation in place; reduce a pending DTensor first unless its sum can stay pending.

    A plain tensor stays plain.
    """
    if isinstance(args[0], DTensor):
        return (as_before if op in _LINEAR and _can_stay_pending(op, args) else reduce_first)(
            op, args, kwargs
        )
    return op(
        args[0], *(full_tensor(a) if isinstance(a, DTensor) else a for a in args[1:]), **kwargs
    )


def _can_stay_pending(op: OpOverload, args: tuple) -> bool:
    """Whether a pending sum stays valid under an in-place operation."""
    # A sum of terms commutes with linear operations: the terms can be changed one by one.
    pending = [p for p in args[0].placements if p.is_partial()]
    if not pending or any(p != Partial() for p in pending):
        return not pending
    other = args[1].placements if isinstance(args[1], DTensor) else None
    return other == args[0].placements if op in _ADDITIVE else not isinstance(args[1], Tensor)


def out(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Compute into `out`; DTensor looks for its mesh only among the operands."""
    result = op.overloadpacket(
        *args, **{name: value for name, value in kwargs.items() if name != "out"}
    )
    return (
        kwargs["out"].copy_(result)
        if kwargs["out"].shape == result.shape
        else as_before(op, args, kwargs)
    )


def reduce_first(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Reduce all pending operands, then run an operation in place."""
    return as_before(op, without_pending(args), kwargs)


def without_pending(args: tuple) -> tuple:
    """Return an in-place operation's arguments, one or more DTensors, reduced."""
    is_list = isinstance(args[0], (list, tuple))
    first = [*map(_reduce_in_place, args[0])] if is_list else _reduce_in_place(args[0])
    return first, *map(_reduce, args[1:])


def foreach_in_place() -> Iterator[Any]:
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            packet = getattr(aten, name)
            yield from (getattr(packet, o) for o in packet.overloads() if o != "out")


def foreach_step(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Reduce pending operands, then run an operation in place on lists of local tensors."""
    args = without_pending(args)
    numbers = [a for a in args if isinstance(a, Tensor)]
    # A scale, for example: each rank has to have the same one.
    if all(is_replicated_number(a) for a in numbers) and matched(*tensor_lists(args)):
        # torch's own function parses lists of tensors in half the time.
        call = getattr(torch, op.overloadpacket.__name__)
        call(*map(local_tensors, args), **kwargs)
        increment_version(args[0])
        return None  # as the operator does; torch's function returns the list
    return as_before(op, args, kwargs)


def _reduce(value: object) -> Any:
    """Return a DTensor, or a list with DTensors, without pending reductions."""
    if isinstance(value, (list, tuple)):
        return [*map(_reduce, value)]
    if (
        not isinstance(value, DTensor)
        or not any(p.is_partial() for p in value.placements)
        or not is_ours(value)
    ):
        return value
    return value.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in value.placements]
    )


def _reduce_in_place(tensor: DTensor) -> DTensor:
    reduced = _reduce(tensor)
    if reduced is not tensor:
        # The same object, since the caller keeps a reference to it.
        tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec
    return tensor


def scan(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Scan along a dimension counted from the start: DTensor mistakes negative ones."""
    tensor, dim, *rest = args
    return as_before(op, (tensor, dim % max(tensor.dim(), 1), *rest), kwargs)


def gather(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Gather along a replicated dimension; on a sharded one DTensor's result is unusable."""
    tensor, dim, *rest = args
    if isinstance(tensor, DTensor):
        along = dim % max(tensor.dim(), 1)
        placements: Any = tensor.placements
        shards = [parts_of(p) and p.dim == along for p in placements]
        if any(shards):
            tensor = tensor.redistribute(
                placements=[Replicate() if s else p for s, p in zip(shards, tensor.placements)]
            )
    return as_before(op, (tensor, dim, *rest), kwargs)


@wrapping
def replicate_parts(before: Handler | None, op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Wrap torch's handler for an operation that refuses tensors by parts: compute on the whole."""
    if is_by_parts(args[0]):
        return run_replicated(op, args, kwargs, args[0])
    return (before or as_before)(op, args, kwargs)


def replicate_first(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Compute a reduction on whole tensors if its operand is sharded."""
    return (
        run_replicated(op, args, kwargs, args[0])
        if is_distributed(args[0])
        else as_before(op, args, kwargs)
    )


def convolution(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Convolve whole tensors unless only the batch is sharded: DTensor gets the rest wrong."""
    is_backward = op is aten.convolution_backward.default  # Its first operand is a gradient.
    *inputs, weight = args[: 3 if is_backward else 2]
    batch_only = all(
        p == Shard(0) or p.is_replicate()
        for t in inputs
        if isinstance(t, DTensor)
        for p in t.placements
    )
    if batch_only and not (isinstance(weight, DTensor) and is_distributed(weight)):
        return as_before(op, args, kwargs)
    return run_replicated(
        op, args, kwargs, next(t for t in (*inputs, weight) if isinstance(t, DTensor))
    )


def mean_from_sum(gradients: int) -> Handler:
    """Return a handler that computes a mean loss, or its gradient, from the summed loss.

    gradients: how many gradients stand before the operands.
    """

    def compute(op: OpOverload, args: tuple, kwargs: dict) -> Any:
        arguments = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
        if arguments.get("reduction", _MEAN) != _MEAN:
            return as_before(op, args, kwargs)
        # Operands broadcast, and the mean divides by the elements of the result.
        count = math.prod(
            torch.broadcast_shapes(*(t.shape for t in args[gradients : gradients + 2]))
        )
        arguments["reduction"] = _SUM
        if gradients:
            # The gradient of a mean is that of the sum over the count.
            arguments["grad_output"] = args[0] / count
        result = as_before(op, (), arguments)
        return result if gradients else result / count

    return compute


@wrapping
def with_refusal(before: Callable, name: str, parameter: nn.Parameter) -> None:
    """Wrap FSDP2's check on a parameter that it is about to shard; it has sent nothing then."""
    if is_ours(parameter):
        raise ShardingError.here(
            "fully_shard (FSDP2) is around a module on a mesh",
            why=f"the mesh stores '{name}', gathers it where it is used and reduces its gradient",
            fix="leave it out: parallelize(..., shard_updates='data') stores parameters in "
            "parts, param_dtype and reduce_dtype take the place of MixedPrecisionPolicy; "
            "what is around the module may have it: "
            "fully_shard(..., ignored_params={*module.parameters()})",
        )
    before(name, parameter)


# Pickling for our DTensors: one that every device has whole is an ordinary tensor, and a sharded
# one is refused, since each rank would write its own part.
#
# torch.save(model.state_dict(), path)            on one rank, in every second training script
# safetensors.torch.save_file(model.state_dict(), path)

_OF_PARTS = "torch.distributed.checkpoint"  # writes each rank's part, and knows it
_FILES = "safetensors"


@wrapping
def reduce_method(before: Callable, self: DTensor, protocol: object) -> Any:
    """Wrap DTensor.__reduce_ex__: our whole DTensors are pickled as ordinary tensors.

    Raise ShardingError for a sharded one.
    """
    # copy.copy's result stays in this process.
    copies = sys._getframe(2).f_globals.get("__name__") == "copy"
    if not is_ours(self) or copies or is_called_by(_OF_PARTS):
        return before(self, protocol)
    return ordinary(self).__reduce_ex__(protocol)


@wrapping
def storage_method(before: Callable, self: DTensor) -> Any:
    """Wrap DTensor.untyped_storage for safetensors, which asks it for the values."""
    is_asked_for = is_ours(self) and is_called_by(_FILES)
    return before(ordinary(self) if is_asked_for else self)


@wrapping
def pointer_method(before: Callable, self: DTensor) -> int:
    """Wrap DTensor.data_ptr: the values' for safetensors, and 0 for others.

    torch's is a gradient's offset in a bucket. copy.deepcopy takes it for memory unless it is 0.
    """
    if not is_ours(self):
        return before(self)
    return before(ordinary(self)) if is_called_by(_FILES) else 0


def ordinary(tensor: DTensor) -> Tensor:
    """Return a DTensor that every device has whole as this device's tensor.

    Raise ShardingError if this device has a part, or a term in a sum.
    """
    if is_sharded(tensor):
        raise _error(tensor)
    local = tensor._local_tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(local, tensor.requires_grad)
    return local.requires_grad_(tensor.requires_grad)


def is_sharded(tensor: DTensor) -> bool:
    """Return whether a device has a DTensor's part, or a term in a sum."""
    # An axis with one device leaves a tensor whole, whatever its placement.
    sizes = zip(tensor.placements, tensor.device_mesh.shape)
    return any(p.is_partial() or not p.is_replicate() and size > 1 for p, size in sizes)


def _error(tensor: DTensor) -> ShardingError:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    axes = [
        f"{n}={size}"
        for n, p, size in zip(names, tensor.placements, mesh.shape)
        if p != Replicate()
    ]
    return ShardingError.here(
        f"one process saves or pickles a tensor of shape {list(tensor.shape)}, which is sharded "
        f"over {','.join(axes)}",
        why=f"this process has {tensor._local_tensor.numel()} of its {tensor.numel()} elements, "
        "and torch.save, pickle or safetensors would write these alone",
        fix="run `state = gspmd.full_state_dict(model)` on every rank, and `torch.save(state, "
        "path)` on rank 0; or run `torch.distributed.checkpoint.save(model.state_dict(), "
        "checkpoint_id=path)` on every rank; for one tensor, call `tensor.full_tensor()` on "
        "every rank",
    )
