"""Fix what torch's DTensor lacks or silently gets wrong in programs written for one device.

p.data = other                      sets the DTensor's metadata, not its local shard
p.grad.norm().item()                is this device's term of a pending reduction
w[3] = 0, w.chunk(3)[0].zero_()     are lost if dimension 0 is sharded (view_writeback.py)
p.normal_(), torch.randn_like(p)    draw the same numbers in every shard on CPUs (random.py)
torch.linalg.qr(p)                  is an error, as all ops without layouts (replicated_fallback.py)
g.norm(dim=0).square_()             is an error, as all nonlinear ops in place on pending tensors
loss + 0.01 * p.pow(2).sum()        is an error, a plain tensor beside a DTensor; so is loss += ...
f"{clip_grad_norm_(...):.2f}"       is an error, and so are numpy() and tolist()
y.gather(-1, index).square()        is an error if dimension -1 is sharded
y.cumsum(-1)                        is per shard (2.13: for a sharded dim counted from the end)
F.conv1d(x, w)                      is per shard if another dimension than the batch is sharded
y.mean(), y.max(0).indices          are means of uneven shards, and indices in each shard (2.9)
F.mse_loss(sharded, target)         has n times the gradient over n devices, as other mean losses
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..compat.operators import aten, find
from ..compat.private_apis import OpOverload
from ..errors import ShardingError, user_line
from .op_handlers import as_before, handle, is_ours
from .random import install_random
from .replicated_fallback import (
    distribute_like,
    full_tensor,
    install_fallback,
    is_distributed,
    run_replicated,
)
from .view_writeback import install_views, replace_data

_DATA, _NUMPY, _TOLIST = Tensor.data, Tensor.numpy, Tensor.tolist
_ITEM = aten._local_scalar_dense.default
_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_NOT_LINEAR = (aten.pow_.Scalar, aten.clamp_.default, aten.sqrt_.default, aten.rsqrt_.default)
_SCANS = tuple(getattr(aten, name).default for name in ("cumsum", "cumprod", "logcumsumexp"))
_CONVOLUTIONS = aten.convolution.default, aten.convolution_backward.default
_WRONG_ON_UNEVEN_SHARDS = tuple(
    getattr(getattr(aten, name), overload)
    for name, overload in (("max", "dim"), ("min", "dim"), ("mean", "default"), ("mean", "dim"))
)  # wrong in torch 2.9 only
_MEAN, _SUM = 1, 2  # values of the argument `reduction` of losses
_IN_PLACE = tuple(
    getattr(getattr(aten, name), overload)
    for overload, names in {
        "Tensor": "add_ sub_ mul_ div_ lerp_",
        "Scalar": "lerp_",
        "default": "copy_ addcmul_ addcdiv_ addmm_ baddbmm_ addmv_",
    }.items()
    for name in names.split()
)
_LINEAR = _IN_PLACE[:4]
_OUT = (
    aten.eye.m_out,
    *(
        getattr(aten, name).out
        for name in (
            "add",
            "sub",
            "mul",
            "div",
            "maximum",
            "minimum",
            "eye",
            "full",
            "zeros",
            "ones",
        )
    ),
)


def install_dtensors() -> None:
    """Install the fixes for all DTensors of this process.

    Fixes that communicate apply only to DTensors on the meshes of parallelize. A plain tensor
    beside a DTensor is the whole tensor, the same on every rank.
    """
    install_views()
    DTensor.data = property(_DATA.__get__, _set_data)
    DTensor.__format__, DTensor.numpy, DTensor.tolist = _format, _numpy, _tolist
    handle(
        {
            _ITEM: _item,
            aten.gather.default: _gather,
            **dict.fromkeys(_IN_PLACE, _in_place),
            **dict.fromkeys(_OUT, _out),
            **dict.fromkeys(_SCANS, _scan),
            **dict.fromkeys((*_NOT_LINEAR, *_foreach_in_place()), _reduce_first),
            **dict.fromkeys(_CONVOLUTIONS, _convolution),
        }
    )
    if torch.__version__ < "2.10":
        handle(dict.fromkeys(_WRONG_ON_UNEVEN_SHARDS, _replicate_first))
    for name in _LOSSES:
        handle({getattr(aten, name).default: _mean_from_sum(0)})
        if find("aten", f"{name}_backward"):
            handle({getattr(aten, f"{name}_backward").default: _mean_from_sum(1)})
    DTensor._op_dispatcher._allow_implicit_replication = True
    install_random()
    install_fallback()


def _set_data(self: DTensor, value: Tensor) -> None:
    """Set `data` to a DTensor or a whole tensor; nothing is sent unless layouts differ.

    Raise ShardingError for another shape, dtype or mesh.
    """
    if value.shape != self.shape or value.dtype != self.dtype:
        raise ShardingError(
            f"the data of a DTensor, {self.dtype} of shape {list(self.shape)}, "
            f"is set to {value.dtype} of shape {list(value.shape)}",
            where=user_line(),
            why="programs were made for the one that was there",
            fix="model.to(dtype) changes types; change shapes before the model is wrapped",
        )
    if not isinstance(value, DTensor):
        value = distribute_like(self, value)
    elif value.device_mesh != self.device_mesh:
        raise ShardingError(
            f"the data of a DTensor on {self.device_mesh} is set to one on {value.device_mesh}",
            where=user_line(),
            fix="give it a DTensor on its own mesh, or the whole tensor",
        )
    else:
        value = value.redistribute(placements=self.placements)
    replace_data(self, value)


def _format(self: DTensor, spec: str) -> str:
    """Format a 0-d DTensor as its number, as Tensor does."""
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _numpy(self: DTensor, **options: Any) -> Any:
    return (
        full_tensor(self.detach() if options.get("force") else self).numpy(**options)
        if is_ours(self)
        else _NUMPY(self, **options)
    )


def _tolist(self: DTensor) -> list:
    return full_tensor(self).tolist() if is_ours(self) else _TOLIST(self)


def _item(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    return (full_tensor(args[0]) if is_ours(args[0]) else args[0].to_local()).item()


def _in_place(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run an operation in place; reduce a pending DTensor first unless its sum can stay pending.

    A plain tensor stays plain.
    """
    if isinstance(args[0], DTensor):
        return (as_before if op in _LINEAR and _can_stay_pending(op, args) else _reduce_first)(
            op, args, kwargs
        )
    return op(
        args[0], *(full_tensor(a) if isinstance(a, DTensor) else a for a in args[1:]), **kwargs
    )


def _can_stay_pending(op: OpOverload, args: tuple) -> bool:
    """Whether a pending sum stays valid under an in-place operation."""
    pending = [p for p in args[0].placements if p.is_partial()]
    if not pending or any(p != Partial() for p in pending):
        return not pending
    other = args[1].placements if isinstance(args[1], DTensor) else None
    return other == args[0].placements if op in _LINEAR[:2] else not isinstance(args[1], Tensor)


def _out(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Compute into `out`; DTensor looks for its mesh only among the operands."""
    result = op.overloadpacket(
        *args, **{name: value for name, value in kwargs.items() if name != "out"}
    )
    return (
        kwargs["out"].copy_(result)
        if kwargs["out"].shape == result.shape
        else as_before(op, args, kwargs)
    )


def _reduce_first(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Reduce all pending operands, then run an operation in place on one or more DTensors."""
    first = (
        [*map(_reduce_in_place, args[0])]
        if isinstance(args[0], (list, tuple))
        else _reduce_in_place(args[0])
    )
    return as_before(op, (first, *map(_reduce, args[1:])), kwargs)


def _reduce(value: Any) -> Any:
    """Return a DTensor, or a list of them, without pending reductions."""
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
        tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec
    return tensor


def _foreach_in_place() -> list[OpOverload]:
    """Return all in-place operations on lists of tensors."""
    packets = [
        getattr(aten, name)
        for name in dir(torch)
        if name.startswith("_foreach_") and name.endswith("_")
    ]
    return [
        getattr(packet, overload)
        for packet in packets
        for overload in packet.overloads()
        if overload != "out"
    ]


def _scan(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Scan along a dimension counted from the start: DTensor mistakes negative ones."""
    tensor, dim, *rest = args
    return as_before(op, (tensor, dim % max(tensor.dim(), 1), *rest), kwargs)


def _gather(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Gather along a replicated dimension; DTensor's result of a sharded one is unusable."""
    tensor, dim, *rest = args
    if is_ours(tensor) and any(p.is_shard(dim % max(tensor.dim(), 1)) for p in tensor.placements):
        tensor = tensor.redistribute(
            placements=[
                Replicate() if p.is_shard(dim % tensor.dim()) else p for p in tensor.placements
            ]
        )
    return as_before(op, (tensor, dim, *rest), kwargs)


def _replicate_first(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    return (
        run_replicated(op, args, kwargs, args[0])
        if is_distributed(args[0])
        else as_before(op, args, kwargs)
    )


def _convolution(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Convolve whole tensors unless only the batch is sharded: DTensor gets the rest wrong."""
    *inputs, weight = args[: 3 if op is _CONVOLUTIONS[1] else 2]  # a gradient comes first
    batch_only = all(
        p == Shard(0) or p.is_replicate()
        for t in inputs
        if isinstance(t, DTensor)
        for p in t.placements
    )
    if batch_only and not (isinstance(weight, DTensor) and is_distributed(weight)):
        return as_before(op, args, kwargs)
    operands = [t for t in (*inputs, weight) if isinstance(t, DTensor)]
    return (
        run_replicated(op, args, kwargs, operands[0])
        if is_ours(operands[0])
        else as_before(op, args, kwargs)
    )


def _mean_from_sum(gradients: int) -> Callable:
    """Return a handler that computes a mean loss, or its gradient, from the summed loss.

    gradients: the number of gradients before the operands.
    """

    def compute(op: OpOverload, args: tuple, kwargs: dict) -> Any:
        arguments = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
        if arguments.get("reduction", _MEAN) != _MEAN:
            return as_before(op, args, kwargs)
        count = math.prod(
            torch.broadcast_shapes(*(t.shape for t in args[gradients : gradients + 2]))
        )
        arguments["reduction"] = _SUM
        if gradients:
            arguments["grad_output"] = args[0] / count
        result = as_before(op, (), arguments)
        return result if gradients else result / count

    return compute
