"""What programs written for one device do to parameters, and torch's DTensor by itself does not, or
does wrong without a word.

p.data = other                      sets what the DTensor says of itself, not what it stores
p.grad.norm().item()                is this device's term of a reduction that is pending
w[3] = 0, w.chunk(3)[0].zero_()     are lost where dimension 0 is sharded (views.py)
p.normal_(), torch.randn_like(p)    draw the same numbers in every part, on CPUs (drawn.py)
torch.linalg.qr(p)                  is an error, as of all that DTensor has no layouts for (on_whole.py)
g.norm(dim=0).square_()             is an error, as of all that is not linear and in place of what is pending
loss + 0.01 * p.pow(2).sum()        is an error, a plain tensor beside a DTensor; so is loss += ...
f"{clip_grad_norm_(...):.2f}"       is an error, and so are numpy() and tolist()
y.gather(-1, index).square()        is an error, where dimension -1 is sharded
y.cumsum(-1)                        is of each device's part alone (2.13: where the sharded dimension is counted from the end)
F.conv1d(x, w)                      is of parts, where not the batch is sharded
y.mean(), y.max(0).indices          are of the means of parts of different sizes, and in each part (2.9)
F.mse_loss(sharded, target)         has n times the gradient over n devices; so have other losses that are means
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
from .replicated_fallback import install_fallback, is_cut, like, on_whole, whole
from .view_writeback import become, install_views

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
_OF_PARTS = tuple(
    getattr(getattr(aten, name), overload)
    for name, overload in (("max", "dim"), ("min", "dim"), ("mean", "default"), ("mean", "dim"))
)  # as torch 2.9 has them
_MEAN, _SUM = 1, 2  # reductions
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
    """From here on, for all DTensors of this process; what communicates, for those on the meshes of
    parallelize.

    A plain tensor beside a DTensor is the whole tensor, the same on every rank.
    """
    install_views()
    DTensor.data = property(_DATA.__get__, _assign)
    DTensor.__format__, DTensor.numpy, DTensor.tolist = _format, _numpy, _tolist
    handle(
        {
            _ITEM: _item,
            aten.gather.default: _gather,
            **dict.fromkeys(_IN_PLACE, _into_plain),
            **dict.fromkeys(_OUT, _out),
            **dict.fromkeys(_SCANS, _scan),
            **dict.fromkeys((*_NOT_LINEAR, *_foreach_in_place()), _of_reduced),
            **dict.fromkeys(_CONVOLUTIONS, _convolution),
        }
    )
    if torch.__version__ < "2.10":
        handle(dict.fromkeys(_OF_PARTS, _of_whole))
    for name in _LOSSES:
        handle({getattr(aten, name).default: _mean_of_sum(0)})
        if find("aten", f"{name}_backward"):
            handle({getattr(aten, f"{name}_backward").default: _mean_of_sum(1)})
    DTensor._op_dispatcher._allow_implicit_replication = True
    install_random()
    install_fallback()


def _assign(self: DTensor, value: Tensor) -> None:
    """value: a DTensor, or a whole tensor; nothing is sent, unless it is laid out otherwise.
    ShardingError where it does not fit.
    """
    if value.shape != self.shape or value.dtype != self.dtype:
        raise ShardingError(
            f"the data of a DTensor, {self.dtype} of shape {list(self.shape)}, is set to {value.dtype} of shape "
            f"{list(value.shape)}",
            where=user_line(),
            why="programs were made for the one that was there",
            fix="model.to(dtype) changes types; change shapes before the model is wrapped",
        )
    if not isinstance(value, DTensor):
        value = like(self, value)
    elif value.device_mesh != self.device_mesh:
        raise ShardingError(
            f"the data of a DTensor on {self.device_mesh} is set to one on {value.device_mesh}",
            where=user_line(),
            fix="give it a DTensor on its own mesh, or the whole tensor",
        )
    else:
        value = value.redistribute(placements=self.placements)
    become(self, value)


def _format(self: DTensor, spec: str) -> str:
    """As Tensor's: of one without dimensions that of its number."""
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _numpy(self: DTensor, **options: Any) -> Any:
    return (
        whole(self.detach() if options.get("force") else self).numpy(**options)
        if is_ours(self)
        else _NUMPY(self, **options)
    )


def _tolist(self: DTensor) -> list:
    return whole(self).tolist() if is_ours(self) else _TOLIST(self)


def _item(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    return (whole(args[0]) if is_ours(args[0]) else args[0].to_local()).item()


def _into_plain(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """In place; a plain tensor stays one, and what is pending of a DTensor is reduced before,
    unless it is a sum that stays one.
    """
    if isinstance(args[0], DTensor):
        return (as_before if op in _LINEAR and _stays_a_sum(op, args) else _of_reduced)(
            op, args, kwargs
        )
    return op(args[0], *(whole(a) if isinstance(a, DTensor) else a for a in args[1:]), **kwargs)


def _stays_a_sum(op: OpOverload, args: tuple) -> bool:
    pending = [p for p in args[0].placements if p.is_partial()]
    if not pending or any(p != Partial() for p in pending):
        return not pending
    other = args[1].placements if isinstance(args[1], DTensor) else None
    return other == args[0].placements if op in _LINEAR[:2] else not isinstance(args[1], Tensor)


def _out(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """DTensor looks for its mesh among the operands, if there are any."""
    found = op.overloadpacket(
        *args, **{name: value for name, value in kwargs.items() if name != "out"}
    )
    return (
        kwargs["out"].copy_(found)
        if kwargs["out"].shape == found.shape
        else as_before(op, args, kwargs)
    )


def _of_reduced(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """In place of a DTensor, or of a list of them, whose pending reductions are done before; so are
    those of the other operands.
    """
    first = [*map(_settle, args[0])] if isinstance(args[0], (list, tuple)) else _settle(args[0])
    return as_before(op, (first, *map(_reduced, args[1:])), kwargs)


def _reduced(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [*map(_reduced, value)]
    if (
        not isinstance(value, DTensor)
        or not any(p.is_partial() for p in value.placements)
        or not is_ours(value)
    ):
        return value
    return value.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in value.placements]
    )


def _settle(tensor: DTensor) -> DTensor:
    reduced = _reduced(tensor)
    if reduced is not tensor:
        tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec
    return tensor


def _foreach_in_place() -> list[OpOverload]:
    """All such operations on lists of tensors."""
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
    tensor, dim, *rest = args
    return as_before(op, (tensor, dim % max(tensor.dim(), 1), *rest), kwargs)


def _gather(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Along a whole dimension: what DTensor makes of parts of one fails in the next operation."""
    tensor, dim, *rest = args
    if is_ours(tensor) and any(p.is_shard(dim % max(tensor.dim(), 1)) for p in tensor.placements):
        tensor = tensor.redistribute(
            placements=[
                Replicate() if p.is_shard(dim % tensor.dim()) else p for p in tensor.placements
            ]
        )
    return as_before(op, (tensor, dim, *rest), kwargs)


def _of_whole(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    return on_whole(op, args, kwargs, args[0]) if is_cut(args[0]) else as_before(op, args, kwargs)


def _convolution(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Of whole tensors, unless the batch alone is sharded: DTensor takes any dimension but the last
    for it.
    """
    *inputs, weight = args[: 3 if op is _CONVOLUTIONS[1] else 2]  # the gradient comes before
    by_batch = all(
        p == Shard(0) or p.is_replicate()
        for t in inputs
        if isinstance(t, DTensor)
        for p in t.placements
    )
    if by_batch and not (isinstance(weight, DTensor) and is_cut(weight)):
        return as_before(op, args, kwargs)
    operands = [t for t in (*inputs, weight) if isinstance(t, DTensor)]
    return (
        on_whole(op, args, kwargs, operands[0])
        if is_ours(operands[0])
        else as_before(op, args, kwargs)
    )


def _mean_of_sum(gradients: int) -> Callable:
    """For a loss that is a mean, or the gradient of one: from that of the sum. gradients: how many
    come before the operands.
    """

    def computed(op: OpOverload, args: tuple, kwargs: dict) -> Any:
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

    return computed
