"""mark_sharding, and the marks on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from ..compat.operators import custom_op
from ..errors import ShardingError, user_line
from .layout_rules import MeshLayout, Unmarked, bound_layout, mesh_of
from .mesh import Mesh
from .spec import ShardSpec, SpecLike

# Attributes: of a parameter or buffer (mesh, spec, file:line), where names alone are (None, names,
# file:line); of a module the layout that translates names.
_MARK, LAYOUT = "_torchgspmd_mark", "_torchgspmd_layout"
NAMED = "reshard"  # stands for the mesh of a mark by which the source names an exchange
_FOLLOWED = "_torchgspmd_followed"  # attribute of a buffer: the parameter whose mark it has
_FREE = "_torchgspmd_free"  # attribute of an optimizer's state: the planner may store it in parts


@custom_op("mark_sharding")
def mark_sharding_op(x: Tensor, mesh: str, spec: str) -> Tensor:
    """Return x: the node of mark_sharding in a captured graph, an identity with a layout."""
    # Torch refuses an operator that returns its own argument: an identity has to copy.
    return x.clone()


@mark_sharding_op.register_fake
def _(x: Tensor, mesh: str, spec: str) -> Tensor:
    return torch.empty_like(x)


def _save_layout(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.mesh, ctx.spec = inputs[1:]


# The gradient of a sharded value is sharded alike: backward needs no marks by the user.
def _mark_gradient(ctx: Any, grad: Tensor | None) -> tuple:
    return (None if grad is None else mark_sharding_op(grad, ctx.mesh, ctx.spec)), None, None


@mark_sharding_op.register_vmap
def _(info: object, in_dims: tuple, x: Tensor, mesh: str, spec: str) -> tuple[Tensor, int]:
    """Mark under torch.vmap: the further dimension is propagation's."""
    words = ShardSpec.parse(spec)
    dims = (*words.dims[: in_dims[0]], (), *words.dims[in_dims[0] :])
    opened = (*words.open[: in_dims[0]], True, *words.open[in_dims[0] :])
    priorities = words.priorities or (0,) * words.rank
    # An open dimension: the user's spec says nothing about the dimension that vmap adds.
    priorities = (*priorities[: in_dims[0]], 0, *priorities[in_dims[0] :])
    marked = ShardSpec(dims, opened).with_priorities(priorities)
    return mark_sharding_op(x, mesh, str(marked)), in_dims[0]


mark_sharding_op.register_autograd(_mark_gradient, setup_context=_save_layout)


def mark_sharding(
    tensor: Tensor, mesh: Mesh | DeviceMesh | MeshLayout | str, spec: SpecLike | None = None
) -> Tensor:
    """Mark how a tensor is laid out on a mesh (GSPMD, arXiv 2105.04663, section 3.1).

    A mark on a parameter or buffer is recorded on it. A mark on a value inside a model is an
    identity whose gradient has the same layout. Outside a capture only the arguments are checked:
    the model still runs on one device.

    Args:
        tensor: A parameter, a buffer, or a value inside a model.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh: the spec has logical
            names then. Logical names alone ("batch _ heads") may replace mesh and spec: the layout
            that `plan` or `parallelize` get as their mesh translates them.
        spec: One entry per tensor dimension: None (replicated along it), an axis name, a tuple of
            axis names (major first) or UNCONSTRAINED (propagation decides). The same as a string:
            "data _ model".

    Returns:
        The tensor.

    Raises:
        ShardingError: An axis is unknown or used twice, or the spec has another rank than the
            tensor, or the tensor is on a mesh already.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, mark_sharding
        >>> mesh = Mesh(data=2, model=4)
        >>> layer = torch.nn.Linear(8, 16)
        >>> layer.weight is mark_sharding(layer.weight, mesh, "model _")
        True
        >>> layer.bias is mark_sharding(layer.bias, "hidden")
        True
    """
    layout = bound_layout()
    if isinstance(layout, Unmarked) and layout.ignores(spec):
        return tensor
    # An object with __torch_function__, such as a proxy of torch.fx, may stand for a tensor.
    if not isinstance(tensor, Tensor) and not has_torch_function((tensor,)):
        raise _no_tensor(tensor, spec)
    if isinstance(mesh, str) and spec is None:
        if layout is None:
            return _mark_names(tensor, mesh)
        mesh, spec = layout, mesh
    if isinstance(mesh, MeshLayout):
        spec = mesh.spec(spec)
    mesh = mesh_of(mesh)  # pyright: ignore[reportArgumentType]
    # After the checks of the mesh: the override gets a Mesh, whichever form the user wrote.
    if has_torch_function((tensor,)):
        return handle_torch_function(mark_sharding, (tensor,), tensor, mesh, spec)
    return _record(tensor, mesh, check_mark(tensor, mesh, spec))


def reshard(tensor: Tensor, spec: SpecLike) -> Tensor:
    """Name an exchange: from here on the value is laid out so, on the program's mesh.

    A mark as by mark_sharding, which communication="explicit" counts as agreed, with its gradient's
    exchange. The names are the mesh's axes, or those of the layout that is the mesh.

    Args:
        tensor: A value, parameter or buffer inside of forward.
        spec: As in mark_sharding.

    Returns:
        The tensor.

    Raises:
        ShardingError: The spec has another rank than the tensor. While a program is compiled: an
            axis is unknown.

    Example:
        >>> from torchgspmd import Mesh, plan, reshard
        >>> def gathered(x):
        ...     return reshard(x * 2, "_ _")
        >>> result = plan(gathered, torch.ones(4, 8), mesh=Mesh(data=2), in_specs="data _")
        >>> [(c.kind, c.named) for c in result.collectives]
        [('all_gather', True)]
    """
    layout = bound_layout()
    if isinstance(layout, Unmarked) and layout.ignores(spec):
        return tensor
    # A proxy of torch.fx has a `dim` too; a tuple of results has none.
    if not hasattr(tensor, "dim"):
        raise _no_tensor(tensor, spec)
    words = spec
    if isinstance(layout, MeshLayout) and not layout.has_axes(spec):
        words = layout.spec(spec)
    parsed = ShardSpec.parse(cast(SpecLike, words))
    if parsed.rank != tensor.dim() or parsed.pending:
        raise ShardingError.here(
            f"reshard to '{spec}', but the tensor has {tensor.dim()} dimensions, "
            f"{list(tensor.shape)}",
            fix="write one word per dimension, an axis or _, and no pending sum",
        )
    if has_torch_function((tensor,)):
        return handle_torch_function(reshard, (tensor,), tensor, parsed)
    return tensor


def _no_tensor(given: object, spec: object) -> ShardingError:
    """Return the error for a mark on a module, or on another object without a layout."""
    if not isinstance(given, nn.Module):
        fix = "pass a parameter, a buffer or a value inside of forward"
    elif name := next((name for name, _ in given.named_parameters()), None):
        fix = (
            f"call mark_sharding(module.{name}, mesh, ...), or "
            f"annotate(module, mesh, {{'{name}': ...}})"
        )
    else:
        fix = "mark its results: annotate(model, mesh, {name of the module: spec})"
    return ShardingError.here(
        f"mark_sharding gets a {type(given).__name__} and '{spec}', and marks tensors alone",
        fix=fix,
    )


def _mark_names(tensor: Tensor, names: str) -> Tensor:
    """Mark a tensor by names that a layout translates later."""
    if has_torch_function((tensor,)):
        return handle_torch_function(mark_sharding, (tensor,), tensor, names)
    if len(names.split()) != tensor.dim():
        raise ShardingError.here(
            f"the mark '{names}' has {len(names.split())} names, but the tensor has "
            f"{tensor.dim()} dimensions, {list(tensor.shape)}",
            fix="write one word per dimension; use _ for a dimension without a name",
        )
    return _record(tensor, None, names)


def _record(tensor: Tensor, mesh: Mesh | None, spec: ShardSpec | str) -> Tensor:
    # The same mark twice is no conflict: a forward that marks its parameters runs many times.
    if isinstance(tensor, DTensor) and (raw_mark(tensor) or ())[:2] != (mesh, spec):
        raise ShardingError.here(
            f"a tensor that is on a mesh already is marked '{spec}'",
            why="parallelize lays parameters and buffers out once, as they are marked by then",
            fix="mark the model before parallelize, or an activation in its forward",
        )
    # Only leaves keep a mark: an activation is gone before anybody could read it.
    if tensor.grad_fn is None:
        setattr(tensor, _MARK, (mesh, spec, user_line()))
        vars(tensor).pop(_FREE, None)
    return tensor


def without_layout(names: str, where: str | None = None) -> ShardingError:
    """Return the error for names that no layout translates."""
    return ShardingError(
        f"a mark names dimensions, '{names}', and no layout says how they lie on the mesh",
        where=where or user_line(),
        fix='pass mesh=Layout({"batch": "data", ...}).on(mesh) to plan or parallelize',
    )


def check_mark(tensor: Tensor, mesh: Mesh, spec: SpecLike | None) -> ShardSpec:
    """Return the parsed spec of a mark. Raise ShardingError if it does not fit."""
    parsed = ShardSpec.parse(cast(SpecLike, spec)).check(mesh, tensor.shape)  # refuses None
    if parsed.pending:
        raise ShardingError.here(f"a mark cannot ask for a pending reduction ('{parsed}')")
    return parsed


def raw_mark(tensor: Tensor) -> tuple[Mesh | None, ShardSpec | str, str] | None:
    """Return the mark on a parameter or buffer, (None, names, file:line) if it has names alone."""
    mark = getattr(tensor, _MARK, None)
    # Read at each call, not copied: the parameter may get its mark after its state exists.
    if mark is None and (followed := getattr(tensor, _FOLLOWED, None)) is not None:
        mark = raw_mark(followed)
        if mark is not None and tensor.shape != followed.shape:
            return mark[0], _of_state(mark[1], tensor, followed), mark[2]
    return mark


def _of_state(spec: ShardSpec | str, state: Tensor, parameter: Tensor) -> ShardSpec | str:
    """Return the layout for a state that has 1 in place of some parameter sizes."""
    reduced = [n != m for n, m in zip(state.shape, parameter.shape)]
    if isinstance(spec, str):
        return " ".join("_" if one else word for one, word in zip(reduced, spec.split()))
    return replace(spec, dims=tuple(() if one else d for one, d in zip(reduced, spec.dims)))


def follow_mark(state: Tensor, parameter: Tensor) -> None:
    """Give a parameter's state the parameter's mark, unless the state is marked itself.

    Each size is the parameter's, or 1. A state with another shape, as a step count, gets no mark.
    Either may be stored over further axes (fx_passes/expand/store_states.py).
    """
    setattr(state, _FREE, True)
    # Adafactor keeps one number per row or column: its states have a 1 in the other dimension.
    sizes = [*zip(state.shape, parameter.shape)]
    if state.dim() == parameter.dim() and all(n in (m, 1) for n, m in sizes):
        setattr(state, _FOLLOWED, parameter)


def stored_over(spec: ShardSpec, shape: Sequence[int], mesh: Mesh, axis: str) -> ShardSpec:
    """Return a layout with one more axis, along which a tensor is stored in parts.

    The axis shards the largest dimension that it divides, otherwise the largest. A dimension that
    other axes shard is taken only if no other is long enough.
    """
    count = mesh.count((axis,))
    rows = [n // mesh.count(axes) for n, axes in zip(shape, spec.dims)]
    dim = max(
        range(len(shape)),
        # Long enough; on no other axis; without padding; the largest: in this order.
        key=lambda d: (rows[d] >= count, not spec.dims[d], rows[d] % count == 0, rows[d]),
    )
    # In mesh order, the only one that a DTensor can store.
    return spec.with_dim(dim, tuple(a for a in mesh.names if a == axis or a in spec.dims[dim]))


def is_free_state(tensor: Tensor) -> bool:
    """Return whether a tensor is an optimizer's state that has no mark of its own."""
    return hasattr(tensor, _FREE)


def recorded_mark(tensor: Tensor) -> tuple[Mesh, ShardSpec, str] | None:
    """Return (mesh, spec, file:line) for a marked parameter or buffer, else None.

    The layout bound while a program is compiled translates logical names.
    """
    mark, layout = raw_mark(tensor), bound_layout()
    if isinstance(layout, Unmarked):
        return None
    if mark is None or isinstance(mark[1], ShardSpec):
        return mark  # pyright: ignore[reportReturnType]
    if layout is None:
        raise without_layout(mark[1], mark[2])
    return layout.mesh, check_mark(tensor, layout.mesh, layout.spec(mark[1])), mark[2]


def copy_mark(source: Tensor, target: Tensor) -> None:
    """Copy a tensor's mark to the tensor that replaces it."""
    if is_free_state(source):
        setattr(target, _FREE, True)
    if raw_mark(source) is not None:
        # The raw mark: names stay names, since the layout that translates them may come later.
        setattr(target, _MARK, raw_mark(source))


def layout_of(module: object, mesh: Mesh | DeviceMesh | MeshLayout) -> MeshLayout | None:
    """Return the layout that translates a program's logical names, if there is one.

    It was passed as the mesh, or to `annotate`.
    """
    if isinstance(mesh, MeshLayout):
        return mesh
    layout = getattr(module, LAYOUT, None)
    if layout is not None and layout.mesh != mesh_of(mesh):
        raise ShardingError.here(
            f"the model's layout is on mesh {layout.mesh}, but the program runs on mesh "
            f"{mesh_of(mesh)}",
            fix="use one Mesh for all marks of a program",
        )
    return layout
