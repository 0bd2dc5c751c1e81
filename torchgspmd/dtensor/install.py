"""Patches to torch's DTensor: operations in one-device programs that it lacks or gets wrong.

Applied with the first module that parallelize wraps. PATCHES are undone when no wrapped module
lives, and none of their parameters, buffers and state_dict tensors. MEETINGS are undone with the
default process group. All act for our DTensors only (ours.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel

from ..compat.operators import AbsentOperator, aten
from ..compat.patches import Patch, wrapping
from ..compat.private_apis import (
    CHECKED,
    AsyncCollectiveTensor,
    _fsdp_init,
    _muon,
    _state_dict_utils,
    is_missing,
)
from ..compat.private_apis import _pytree as pytree
from . import op_handlers, parts, view_writeback
from .optimizers import (
    total_norm,
    unscale,
    update_functions,
    with_local_averages,
    with_local_gradients,
    with_local_tensors,
    with_planned_update,
    with_sharded_states,
)
from .ours import (
    INSTALLATION,
    WAITS,
    Handler,
    for_ours,
    handlers,
    is_ours,
    method_for_ours,
    redistribute_method,
    with_explained_wait,
    with_explained_waits,
    with_farewell,
    with_meeting,
    with_own_group,
)
from .replicated_fallback import (
    DRAWING,
    UsersFlag,
    draw,
    full_tensor,
    gather_method,
    with_fallback,
    with_replication,
)

_LOSSES = """mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
    binary_cross_entropy_with_logits"""
_IN_PLACE = {
    "Tensor": "add_ sub_ mul_ div_ lerp_",
    "Scalar": "lerp_ pow_",
    "default": "copy_ addcmul_ addcdiv_ addmm_ baddbmm_ addmv_ clamp_ sqrt_ rsqrt_",
}
_OUT = {"out": "add sub mul div maximum minimum eye full zeros ones", "m_out": "eye"}


def _operators(names: dict[str, str]) -> list[object]:
    return [
        getattr(getattr(aten, name), overload)
        for overload, line in names.items()
        for name in line.split()
    ]


def _rows(owner: Any, names: str | Iterable[str], replace: Callable, why: str) -> list[Patch]:
    """Return a row for each attribute that the owner has, or none if this torch lacks the owner."""
    names = names.split() if isinstance(names, str) else names
    if is_missing(owner):
        return []
    return [Patch(owner, name, replace, why) for name in names if hasattr(owner, name)]


def _methods(names: str | Iterable[str], replace: Callable, why: str) -> list[Patch]:
    return _rows(DTensor, names, replace, why)


def _handled(
    operators: Iterable[object], handler: Handler, why: str, versions: tuple[str, ...] = CHECKED
) -> list[Patch]:
    """Return a row for each operator that this torch has."""
    return [
        Patch(handlers(), op, for_ours(handler), why, versions)
        for op in operators
        # An operator that this torch lacks needs no handler: nothing can call it.
        if not isinstance(op, AbsentOperator)
    ]


def _losses(suffix: str, gradients: int) -> list[Patch]:
    return _handled(
        [getattr(aten, name + suffix).default for name in _LOSSES.split()],
        op_handlers.mean_from_sum(gradients),
        "F.mse_loss(sharded, target) has n times the gradient over n devices",
    )


def _numpy(self: Any, **options: Any) -> Any:
    return full_tensor(self.detach() if options.get("force") else self).numpy(**options)


def _format(self: DTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


_DISPATCHER: Any = DTensor._op_dispatcher
_NEW = ("2.13", "2.14", "2.15")
_OBJECTS = "all_gather_object barrier broadcast_object_list gather_object scatter_object_list"
_FALLBACK = "torch.linalg.qr(p), torch._foreach_copy_(ps, qs): there is no sharding strategy"
_FAREWELL = "a process that ends at once after it is taken for one that has died"
_WAITS = "p.softmax(0) on one rank waits for the others, and its error names none of them"
_CHECKPOINT = "torch.distributed.checkpoint.save on one rank waits for the others"
_OTHER_THREAD = "torch.distributed.checkpoint.async_save hangs beside a step of the training"
_PICKLED = "torch.save(model.state_dict()) on one rank writes a part of each tensor, or DTensors"
_KEPT = "a state_dict of an optimizer outlives its model, and with it the patches that save it"
_PARTS_REFUSED = "w.argmax(0) is an error if w is stored by parts"
_BY_PARTS = "torch.distributed.checkpoint takes a _StridedShard for one interval of rows"
_SLOW = "optimizer.step() takes ten times as long as with local tensors"
_WHOLE = "every rank keeps all of the states that optimizer.load_state_dict got from one device"
_SLOW_NORMS = "clip_grad_norm_ takes four times as long as with local tensors"
_UNSCALED = (
    "scaler.unscale_(optimizer): an infinity in a shard is one rank's, unless the first "
    "gradient is sharded alike"
)
_BESIDE = "loss + 0.01 * p.pow(2).sum(): a plain tensor beside a DTensor is an error"

PATCHES = (
    # views and data
    *_methods(
        "data",
        lambda data: property(
            op_handlers.data_method(data.__get__),
            method_for_ours(op_handlers.set_data)(data.__set__),
        ),
        "p.data = other sets the metadata of the DTensor, not its local shard",
    ),
    *_methods(
        "__setitem__", view_writeback.setitem_method, "w[3] = 0 is lost if dimension 0 is sharded"
    ),
    *_methods(
        view_writeback.MUTATIONS,
        view_writeback.mutation_method,
        "w.chunk(3)[0].zero_() is lost if dimension 0 is sharded",
    ),
    *_methods(
        view_writeback.RESHAPES,
        view_writeback.reshape_method,
        "w.view(-1)[3:20].zero_() is lost, and views of sharded dimensions are errors",
    ),
    *_methods(
        "T mT",
        lambda view: property(view_writeback.reshape_method(view.__get__)),
        "w.T[:2].zero_() is lost if dimension 1 is sharded",
    ),
    *_methods(
        view_writeback.RESHAPES_IN_PLACE,
        view_writeback.in_place_reshape_method,
        "w.t_() leaves the shape of the DTensor as it was",
    ),
    *_handled(
        view_writeback.SLICES,
        view_writeback.slice_base,
        "w[3].zero_() is lost if dimension 0 is sharded",
    ),
    # numbers and text
    *_handled(
        (aten._local_scalar_dense.default,),
        lambda op, args, kwargs: full_tensor(args[0]).item(),
        "p.grad.norm().item() is one device's term of a pending reduction",
    ),
    *_methods("__format__", method_for_ours(_format), 'f"{clip_grad_norm_(...):.2f}" is an error'),
    *_methods("numpy", method_for_ours(_numpy), "p.numpy() is an error"),
    *_methods(
        "tolist", method_for_ours(lambda p: full_tensor(p).tolist()), "p.tolist() is an error"
    ),
    # files
    *_methods("__reduce_ex__", op_handlers.reduce_method, _PICKLED),
    Patch(torch.optim.Optimizer, "state_dict", lambda before: _held_method(before), _KEPT),
    *_methods(
        "untyped_storage",
        op_handlers.storage_method,
        "safetensors' save_file finds no values in a DTensor",
    ),
    *_methods(
        "data_ptr",
        op_handlers.pointer_method,
        "copy.deepcopy(model) fails if a gradient lies in a bucket; safetensors finds no values",
    ),
    Patch(DTensor, "__create_write_items__", parts.write_items, _BY_PARTS),
    Patch(DTensor, "__create_chunk_list__", parts.chunk_list, _BY_PARTS),
    Patch(DTensor, "__get_tensor_shard__", parts.tensor_shard, _BY_PARTS),
    *_rows(_state_dict_utils, "_distribute_tensors", parts.distribute_tensors, _BY_PARTS),
    # operations
    *_handled(
        _operators(_IN_PLACE),
        op_handlers.in_place,
        "plain.add_(p) is an error, and g.norm().add_(1) adds to each term of a pending sum",
    ),
    *_handled(
        op_handlers.foreach_in_place(),
        op_handlers.foreach_step,
        "torch._foreach_sqrt_(norms) is an error, and torch._foreach_lerp_(ps, qs, 0.1) is slow",
    ),
    *_handled(_operators(_OUT), op_handlers.out, "torch.mul(plain, 2, out=p) is an error"),
    *_handled(
        (aten.gather.default,),
        op_handlers.gather,
        "y.gather(-1, index).square() is an error if dimension -1 is sharded",
    ),
    *_handled(
        _operators({"default": "cumsum cumprod logcumsumexp"}),
        op_handlers.scan,
        "y.cumsum(-1) is per shard",
    ),
    *_handled(
        _operators({"default": "convolution convolution_backward"}),
        op_handlers.convolution,
        "F.conv1d(x, w) is per shard if another dimension than the batch is sharded",
    ),
    *_handled(
        _operators({"dim": "max min mean", "default": "mean"}),
        op_handlers.replicate_first,
        "y.mean() is the mean of uneven shards, y.max(0).indices are those in each shard",
        ("2.9",),
    ),
    *(
        Patch(handlers(), op, op_handlers.replicate_parts, _PARTS_REFUSED, _NEW)
        for op in (aten.argmax.default, aten.argmin.default)
    ),
    *_losses("", 0),
    *_losses("_backward", 1),
    *_handled(
        DRAWING, draw, "p.normal_() and torch.randn_like(p) draw the same in every shard on CPUs"
    ),
    # between backward and forward
    Patch(torch.optim.Optimizer, "load_state_dict", with_sharded_states, _WHOLE),
    *(Patch(module, name, with_local_tensors, _SLOW) for module, name in update_functions()),
    *_rows(
        _muon,
        "muon",
        with_planned_update,
        "the step of Muon gathers each matrix for each of its products",
    ),
    *_rows(nn.utils, "get_total_norm", total_norm, _SLOW_NORMS),
    *_rows(nn.utils, "clip_grads_with_norm_ clip_grad_value_", with_local_gradients, _SLOW_NORMS),
    # clip_grad_norm_ calls these.
    *_rows(clip_grad, "_get_total_norm", total_norm, _SLOW_NORMS),
    *_rows(clip_grad, "_clip_grads_with_norm_ clip_grad_value_", with_local_gradients, _SLOW_NORMS),
    Patch(AveragedModel, "update_parameters", with_local_averages, _SLOW),
    Patch(handlers(), aten._amp_foreach_non_finite_check_and_unscale_.default, unscale, _UNSCALED),
    # all operations
    Patch(_DISPATCHER, "dispatch", with_fallback, _FALLBACK, ("2.9",)),
    Patch(_DISPATCHER, "_propagate_op_sharding_dispatch_slow_path", with_fallback, _FALLBACK, _NEW),
    Patch(_DISPATCHER, "_try_replicate_spec_for_scalar_tensor", with_replication, _BESIDE),
    Patch(_DISPATCHER, "_allow_implicit_replication", lambda _: True, _BESIDE),
    Patch(type(_DISPATCHER), "_allow_implicit_replication", UsersFlag, _BESIDE),
    # wrappers
    *_rows(
        _fsdp_init,
        "_verify_managed_param",
        op_handlers.with_refusal,
        "fully_shard would shard what is sharded already",
    ),
)

# They meet the other ranks. Python's collector decides on each rank when a model goes, so that
# these last as long as the process group.
MEETINGS = (
    *_methods("full_tensor", gather_method, "p.full_tensor() on one rank waits for the others"),
    *_methods("redistribute", redistribute_method, _WAITS),
    Patch(_DISPATCHER, "redistribute_local_args", with_explained_waits, _WAITS),
    *_rows(AsyncCollectiveTensor, "trigger_wait", with_explained_wait, _WAITS),
    Patch(dist, "destroy_process_group", with_farewell, _FAREWELL),
    *_rows(dist, _OBJECTS, with_meeting, _CHECKPOINT),
)


@wrapping
def _held_method(
    before: Callable, self: torch.optim.Optimizer, *args: object, **kwargs: object
) -> Any:
    """Wrap Optimizer.state_dict: the patches are applied while one of its tensors lives."""
    state = before(self, *args, **kwargs)
    hold(self, pytree.tree_leaves(state))
    return state


def hold(module: Any, tensors: Iterable[Any]) -> None:
    """Apply the patches, unless they are applied, while the module or one of the tensors lives.

    A DTensor is held by its local tensor: torch.utils.swap_tensors takes no tensor with a weakref.
    """
    # Its import takes half a second, and most programs do without.
    checkpoint = sys.modules.get("torch.distributed.checkpoint")
    own_group = Patch(checkpoint, "async_save", with_own_group, _OTHER_THREAD)
    patches = PATCHES if checkpoint is None else (*PATCHES, own_group)
    WAITS.hold(MEETINGS, WAITS)
    INSTALLATION.hold(patches, module, *(t._local_tensor for t in tensors if is_ours(t)))
