"""mark_sharding and annotate: state the layout of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean, user_line
from ..shard_spec import ShardSpec, SpecLike
from .device_mesh import mesh_of
from .layout_rules import MeshLayout, Unmarked, bound_layout
from .mesh import Mesh

_Module = TypeVar("_Module", bound=nn.Module)
# Attributes: of a parameter or buffer (mesh, spec, file:line), where names alone are (None, names,
# file:line); of a module the layout that translates names.
_MARK, _LAYOUT = "_torchgspmd_mark", "_torchgspmd_layout"
_FOLLOWED = "_torchgspmd_followed"  # attribute of a buffer: the parameter whose mark it has


@torch.library.custom_op("torchgspmd::mark_sharding", mutates_args=())
def mark_sharding_op(x: Tensor, mesh: str, spec: str) -> Tensor:
    """Return x: the node of mark_sharding in a captured graph, an identity with a layout."""
    return x.clone()


@mark_sharding_op.register_fake
def _(x: Tensor, mesh: str, spec: str) -> Tensor:
    return torch.empty_like(x)


def _save_layout(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.mesh, ctx.spec = inputs[1:]


def _mark_gradient(ctx: Any, grad: Tensor | None) -> tuple:
    return (None if grad is None else mark_sharding_op(grad, ctx.mesh, ctx.spec)), None, None


@mark_sharding_op.register_vmap
def _(info: Any, in_dims: tuple, x: Tensor, mesh: str, spec: str) -> tuple[Tensor, int]:
    """Mark under torch.vmap: the further dimension is propagation's."""
    words = ShardSpec.parse(spec)
    dims = (*words.dims[: in_dims[0]], (), *words.dims[in_dims[0] :])
    opened = (*words.open[: in_dims[0]], True, *words.open[in_dims[0] :])
    priorities = words.priorities or (0,) * words.rank
    priorities = (*priorities[: in_dims[0]], 0, *priorities[in_dims[0] :])
    marked = ShardSpec(dims, opened).with_priorities(priorities)
    return mark_sharding_op(x, mesh, str(marked)), in_dims[0]


mark_sharding_op.register_autograd(_mark_gradient, setup_context=_save_layout)


def mark_sharding(
    tensor: Tensor, mesh: Mesh | DeviceMesh | MeshLayout | str, spec: SpecLike | None = None
) -> Tensor:
    """Mark how a tensor is laid out on a mesh (GSPMD, arXiv 2105.04663, section 3.1).

    A mark on a parameter or buffer is recorded on it. A mark on a value inside of a model is an
    identity whose gradient has the same layout. Outside of a capture the arguments are checked
    only: the model still runs on one device.

    Args:
        tensor: A parameter, a buffer, or a value inside of a model.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh: the spec has logical
            names then. Or logical names alone, in place of mesh and spec ("batch _ heads"): the
            layout that `plan` or `parallelize` get as their mesh translates them.
        spec: One entry per dimension of the tensor: None (replicated along it), an axis name, a
            tuple of axis names (major first) or UNCONSTRAINED (propagation decides). The same as
            a string: "data _ model".

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
    if isinstance(layout, Unmarked):
        return tensor
    if not isinstance(tensor, Tensor) and not has_torch_function((tensor,)):
        raise _no_tensor(tensor, spec)
    if isinstance(mesh, str) and spec is None:
        if layout is None:
            return _mark_names(tensor, mesh)
        mesh, spec = layout, mesh
    if isinstance(mesh, MeshLayout):
        spec = mesh.spec(spec)
    mesh = mesh_of(mesh)  # pyright: ignore[reportArgumentType]
    if has_torch_function((tensor,)):
        return handle_torch_function(mark_sharding, (tensor,), tensor, mesh, spec)
    return _record(tensor, mesh, check_mark(tensor, mesh, spec))


def _no_tensor(given: object, spec: object) -> ShardingError:
    """Return the error for a mark on a module, or on another object without a layout."""
    if not isinstance(given, nn.Module):
        fix = "pass a parameter, a buffer or a value inside of forward"
    elif name := next((name for name, _ in given.named_parameters()), None):
        fix = (
            f"mark_sharding(module.{name}, mesh, ...), or annotate(module, mesh, {{'{name}': ...}})"
        )
    else:
        fix = "mark its results: annotate(model, mesh, {name of the module: spec})"
    return ShardingError(
        f"mark_sharding gets a {type(given).__name__} and '{spec}', and marks tensors alone",
        where=user_line(),
        fix=fix,
    )


def _mark_names(tensor: Tensor, names: str) -> Tensor:
    """Mark a tensor by names that a layout translates later."""
    if has_torch_function((tensor,)):
        return handle_torch_function(mark_sharding, (tensor,), tensor, names)
    if len(names.split()) != tensor.dim():
        raise ShardingError(
            f"the mark '{names}' has {len(names.split())} names, but the tensor has "
            f"{tensor.dim()} dimensions, {list(tensor.shape)}",
            where=user_line(),
            fix="one word a dimension; _ for one without a name",
        )
    return _record(tensor, None, names)


def _record(tensor: Tensor, mesh: Mesh | None, spec: ShardSpec | str) -> Tensor:
    if isinstance(tensor, DTensor) and (raw_mark(tensor) or ())[:2] != (mesh, spec):
        raise ShardingError(
            f"a tensor that is on a mesh already is marked '{spec}'",
            where=user_line(),
            why="parallelize lays parameters and buffers out once, as they are marked by then",
            fix="mark the model before parallelize, or an activation in its forward",
        )
    if tensor.grad_fn is None:
        setattr(tensor, _MARK, (mesh, spec, user_line()))
    return tensor


def without_layout(names: str, where: str | None = None) -> ShardingError:
    """Return the error for names that no layout translates."""
    return ShardingError(
        f"a mark names dimensions, '{names}', and no layout says how they lie on the mesh",
        where=where or user_line(),
        fix='mesh=Layout({"batch": "data", ...}).on(mesh) in plan or parallelize',
    )


def check_mark(tensor: Tensor, mesh: Mesh, spec: SpecLike | None) -> ShardSpec:
    """Return the parsed spec of a mark. Raise ShardingError if it does not fit."""
    parsed = ShardSpec.parse(cast(SpecLike, spec)).check(mesh, tensor.shape)  # refuses None
    if parsed.pending:
        raise ShardingError(
            f"a mark cannot ask for a pending reduction ('{parsed}')", where=user_line()
        )
    return parsed


def raw_mark(tensor: Tensor) -> tuple[Mesh | None, ShardSpec | str, str] | None:
    """Return the mark on a parameter or buffer, (None, names, file:line) if it has names alone."""
    mark = getattr(tensor, _MARK, None)
    if mark is None and (followed := getattr(tensor, _FOLLOWED, None)) is not None:
        mark = raw_mark(followed)
        if mark is not None and tensor.shape != followed.shape:
            return mark[0], _of_state(mark[1], tensor, followed), mark[2]
    return mark


def _of_state(spec: ShardSpec | str, state: Tensor, parameter: Tensor) -> ShardSpec | str:
    """Return the layout of a state that has 1 in place of some sizes of its parameter."""
    reduced = [n != m for n, m in zip(state.shape, parameter.shape)]
    if isinstance(spec, str):
        return " ".join("_" if one else word for one, word in zip(reduced, spec.split()))
    return replace(spec, dims=tuple(() if one else d for one, d in zip(reduced, spec.dims)))


def follow_mark(state: Tensor, parameter: Tensor) -> None:
    """Give a state of a parameter the parameter's mark, unless it is marked itself.

    Sizes of the state are those of the parameter, or 1. Others, as a count of steps, have no mark.
    """
    sizes = [*zip(state.shape, parameter.shape)]
    if state.dim() == parameter.dim() and all(n in (m, 1) for n, m in sizes):
        setattr(state, _FOLLOWED, parameter)


def recorded_mark(tensor: Tensor) -> tuple[Mesh, ShardSpec, str] | None:
    """Return (mesh, spec, file:line) of the mark on a parameter or buffer, if it has one.

    Names are translated by the layout of the program that is compiled.
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
    """Copy the mark of a tensor to the tensor that replaces it."""
    if raw_mark(source) is not None:
        setattr(target, _MARK, raw_mark(source))


def layout_of(module: object, mesh: Mesh | DeviceMesh | MeshLayout) -> MeshLayout | None:
    """Return the layout that translates the names of a program, if there is one.

    It is the one passed as the mesh, or that of `annotate`.
    """
    if isinstance(mesh, MeshLayout):
        return mesh
    layout = getattr(module, _LAYOUT, None)
    if layout is not None and layout.mesh != mesh_of(mesh):
        raise ShardingError(
            f"the model's layout is on mesh {layout.mesh}, but the program runs on mesh "
            f"{mesh_of(mesh)}",
            where=user_line(),
            fix="use one Mesh for all marks of a program",
        )
    return layout


def annotate(
    module: _Module,
    mesh: Mesh | DeviceMesh | MeshLayout | Mapping[str, str],
    layouts: Mapping[str, SpecLike] | None = None,
) -> _Module:
    """Mark parameters, buffers and outputs of submodules of a model whose source you do not own.

    Args:
        module: The model.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh, which the module's
            marks by names are translated by from then on. Or logical names by glob alone, which
            the layout that `plan` or `parallelize` get as their mesh translates.
        layouts: Specs by glob. `"blocks.*.mlp.up.weight"` matches parameters and buffers.
            `"blocks.*"` matches modules: every floating tensor that they return. `*` matches within
            one part of a name, `**` across parts, `?` one letter, `[qkv]` one of these. A later key
            wins over an earlier one.

    Returns:
        The module.

    Raises:
        ShardingError: A key matches nothing, or a spec does not fit.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, annotate
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        >>> layouts = {"*.weight": "model _", "1": "data _"}
        >>> annotate(model, Mesh(data=2, model=4), layouts) is model
        True
    """
    if isinstance(mesh, Mapping):
        devices, layouts = None, mesh
    else:
        devices, layouts = mesh_of(mesh), layouts or {}
        if isinstance(mesh, MeshLayout):
            layouts = mesh.spec(layouts)
            setattr(module, _LAYOUT, mesh)
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    modules = dict(module.named_modules())
    rows = {
        f"{prefix}.{name}".lstrip("."): row
        for prefix, each in modules.items()
        if isinstance(each, StackedRows)
        for name, row in each.named_rows()
    }
    of_rows: dict[str, Any] = {}
    given: dict[str, _Given] = {}
    for pattern, spec in layouts.items():  # pyright: ignore[reportOptionalMemberAccess]
        matches = _glob(pattern).fullmatch
        found = [name for name in rows if matches(name)]
        of_rows |= dict.fromkeys(found, spec)
        stacked = {id(rows[name].tensor) for name in found}
        names = [name for name in (*tensors, *modules) if matches(name)]
        names = [name for name in names if id(tensors.get(name)) not in stacked]
        if not names and not found:
            raise ShardingError(
                f"'{pattern}' matches no parameter, buffer or module",
                where=user_line(),
                fix=_other_pattern(pattern, [*tensors, *filter(None, modules)]),
            )
        words = spec if devices is None else ShardSpec.parse(spec)
        for name in names:
            if name in tensors:
                given[name] = _Given(pattern, words)
            else:
                hook = _mark_outputs(devices, words)  # pyright: ignore[reportArgumentType]
                modules[name].register_forward_hook(hook)
    _mark_tensors(tensors, given, devices)
    _mark_stacked(rows, of_rows, devices)
    return module


class _Given(NamedTuple):
    """The last spec that a glob gives a tensor."""

    pattern: str
    spec: Any


def _mark_tensors(
    tensors: Mapping[str, Tensor], given: Mapping[str, _Given], mesh: Mesh | None
) -> None:
    """Mark tensors. Raise ShardingError for a rank that does not fit, and for tied tensors."""
    names: dict[int, str] = {}
    for name, (pattern, spec) in given.items():
        tensor, first = tensors[name], names.setdefault(id(tensors[name]), name)
        if str(given[first].spec) != str(spec):
            raise ShardingError(
                f"'{first}' and '{name}' are one tensor, and get '{given[first].spec}' by "
                f"'{given[first].pattern}' and '{spec}' by '{pattern}'",
                where=user_line(),
                fix=f"give both one layout: {{'{first}': '{spec}', '{name}': '{spec}'}}",
            )
        if isinstance(spec, ShardSpec) and spec.rank != tensor.dim():
            raise ShardingError(
                f"'{pattern}' gives '{spec}' to '{name}', which has {tensor.dim()} dimensions "
                f"{list(tensor.shape)}",
                where=user_line(),
                fix=("" if pattern == name else "add an entry behind it: ")
                + f"'{name}': '{spec.of_rank(tensor.dim())}'",
            )
        _marked(tensor, mesh, spec)


class Row(NamedTuple):
    """A tensor of one of many like modules: a row of a stacked tensor, sharded over `axis`."""

    tensor: Tensor
    axis: str


@runtime_checkable
class StackedRows(Protocol):
    """A module that has the tensors of like modules as rows of its own."""

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the tensors of the like modules, by their names."""
        ...


def _mark_stacked(rows: dict[str, Row], specs: dict[str, Any], mesh: Mesh | None) -> None:
    """Mark stacked tensors as each of their rows is marked."""
    names: dict[int, list[str]] = {}
    for name, row in rows.items():
        names.setdefault(id(row.tensor), []).append(name)
    for group in names.values():
        wanted = {str(specs.get(name)) for name in group}
        if len(wanted) > 1:
            marked = [name for name in group if name in specs]
            raise ShardingError(
                f"'{marked[0]}' has another layout than the same weight of another block",
                where=user_line(),
                why="the weights of all blocks are one tensor, which has one layout",
                fix=f"mark all of {group[0]!r} to {group[-1]!r} alike, by a glob",
            )
        if group[0] in specs:
            tensor, axis = rows[group[0]]
            spec = specs[group[0]] if mesh is None else ShardSpec.parse(specs[group[0]])
            _marked(tensor, mesh, f"{axis} {spec}".strip())


def _marked(tensor: Tensor, mesh: Mesh | None, spec: Any) -> Tensor:
    """Return a tensor with a mark, of names alone if there is no mesh."""
    return mark_sharding(tensor, spec) if mesh is None else mark_sharding(tensor, mesh, spec)


def _other_pattern(pattern: str, names: list[str]) -> str:
    """Suggest a pattern in place of one that matches none of the names."""
    syntax = "* matches within one part of a name, ** across parts"
    wider = re.sub(r"\*+", "**", pattern)
    if any(map(_glob(wider).fullmatch, names)):
        return f"'{wider}' does: {syntax}"
    with suppress(re.error):
        if name := next(filter(re.compile(pattern).fullmatch, names), None):
            return (
                "patterns are globs, not regular expressions, of which this one matches "
                f"'{name}': {syntax}"
            )
    end = pattern.removeprefix("**.")
    if end == pattern or "*" in end:
        return did_you_mean(pattern, names)
    parts = end.count(".") + 1  # below any module: ends of names of as many parts
    ends = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names)
    return did_you_mean(pattern, [f"**.{each}" for each in ends])


def _glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob."""
    tokens = re.split(r"(\*\*|\*|\?|\[!?[^]]+\])", pattern)
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    classes = {t: t.replace("[!", "[^") for t in tokens if t.startswith("[") and len(t) > 2}
    return re.compile("".join({**wild, **classes}.get(t) or re.escape(t) for t in tokens))


def _mark_outputs(
    mesh: Mesh | None, spec: ShardSpec | str
) -> Callable[[nn.Module, tuple, Any], Any]:
    """Return a forward hook that marks the results of a module."""
    rank = len(spec.split()) if isinstance(spec, str) else spec.rank

    def mark(value: object) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == rank:
            return _marked(value, mesh, spec)
        return value

    def hook(module: nn.Module, args: tuple, output: object) -> Any:
        if isinstance(output, Tensor):
            return _marked(output, mesh, spec)
        return pytree.tree_map(mark, output)

    return hook
