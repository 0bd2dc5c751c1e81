"""annotate: mark a model's tensors by globs over their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, did_you_mean
from .layout_rules import MeshLayout, mesh_of
from .mark import LAYOUT, mark_sharding
from .mesh import Mesh
from .spec import ShardSpec, SpecLike

_Module = TypeVar("_Module", bound=nn.Module)


def annotate(
    module: _Module,
    mesh: Mesh | DeviceMesh | MeshLayout | Mapping[str, str],
    layouts: Mapping[str, SpecLike] | MarksByNames | None = None,
) -> _Module:
    """Mark parameters, buffers and module outputs in a model whose source you do not own.

    Args:
        module: The model.
        mesh: The devices, also as torch's DeviceMesh, or a Layout on a mesh, which the module's
            marks by names are translated by from then on. Or logical names by glob alone, which
            the layout that `plan` or `parallelize` get as their mesh translates.
        layouts: Specs by glob. `"blocks.*.mlp.up.weight"` matches parameters and buffers.
            `"blocks.*"` matches modules: every floating tensor that they return. `*` matches within
            one part of a name, `**` across parts, `?` one letter, `[qkv]` one of these. A later key
            wins over an earlier one. Or a known family's marks, such as `marks("llama")`, or those
            of a plan of transformers, `marks(model.tp_plan)`.

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
    if isinstance(layouts, MarksByNames):
        layouts = layouts.of_names(dict(module.named_parameters(remove_duplicate=False)))
    if isinstance(mesh, Mapping):
        devices, layouts = None, mesh
    else:
        devices, layouts = mesh_of(mesh), layouts or {}
        if isinstance(mesh, MeshLayout):
            layouts = mesh.spec(layouts)
            setattr(module, LAYOUT, mesh)
    # Tied tensors under each of their names: a glob may match any of these.
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
    for pattern, spec in layouts.items():  # pyright: ignore
        matches = glob_pattern(pattern).fullmatch
        found = [name for name in rows if matches(name)]
        # Overwriting keeps the rule that a later key wins over an earlier one.
        of_rows |= dict.fromkeys(found, spec)
        stacked = {id(rows[name].tensor) for name in found}
        names = [name for name in (*tensors, *modules) if matches(name)]
        # A stacked tensor also has a name of its own; _mark_stacked marks it, by its rows.
        names = [name for name in names if id(tensors.get(name)) not in stacked]
        if not names and not found:
            raise ShardingError.here(
                f"'{pattern}' matches no parameter, buffer or module",
                fix=_other_pattern(pattern, [*tensors, *filter(None, modules)]),
            )
        words = spec if devices is None else ShardSpec.parse(spec)
        for name in names:
            if name in tensors:
                given[name] = _Given(pattern, words)
            else:
                hook = _mark_outputs(devices, words)  # pyright: ignore[reportArgumentType]
                modules[name].register_forward_hook(hook)
    # After all globs: a tensor keeps the mark of the last match, and no earlier one is checked.
    _mark_tensors(tensors, given, devices)
    _mark_stacked(rows, of_rows, devices)
    return module


@runtime_checkable
class MarksByNames(Protocol):
    """Marks that depend on the model's names, as `marks` returns."""

    def of_names(self, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """Return specs by glob for a model with these parameters."""
        ...


class _Given(NamedTuple):
    """The last spec that a glob assigns to a tensor."""

    pattern: str
    spec: Any


def _mark_tensors(
    tensors: Mapping[str, Tensor], given: Mapping[str, _Given], mesh: Mesh | None
) -> None:
    """Mark tensors. Raise ShardingError for a rank that does not fit, and for tied tensors."""
    names: dict[int, str] = {}
    for name, (pattern, spec) in given.items():
        # Names of one tied tensor share an id: the first name stands for all when specs disagree.
        tensor, first = tensors[name], names.setdefault(id(tensors[name]), name)
        if str(given[first].spec) != str(spec):
            raise ShardingError.here(
                f"'{first}' and '{name}' are one tensor, and get '{given[first].spec}' by "
                f"'{given[first].pattern}' and '{spec}' by '{pattern}'",
                fix=f"give both one layout: {{'{first}': '{spec}', '{name}': '{spec}'}}",
            )
        if isinstance(spec, ShardSpec) and spec.rank != tensor.dim():
            raise ShardingError.here(
                f"'{pattern}' gives '{spec}' to '{name}', which has {tensor.dim()} dimensions "
                f"{list(tensor.shape)}",
                fix=("write " if pattern == name else "add an entry behind it: ")
                + f"'{name}': '{spec.of_rank(tensor.dim())}'",
            )
        _marked(tensor, mesh, spec)


class Row(NamedTuple):
    """One module's tensor among many alike: a row in a stacked tensor, sharded over `axis`."""

    tensor: Tensor
    axis: str


@runtime_checkable
class StackedRows(Protocol):
    """A module that stacks the tensors of like modules into tensors with rows."""

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the like modules' tensors, by their names."""
        ...


def _mark_stacked(rows: dict[str, Row], specs: dict[str, Any], mesh: Mesh | None) -> None:
    """Mark stacked tensors as each of their rows is marked."""
    names: dict[int, list[str]] = {}
    for name, row in rows.items():
        names.setdefault(id(row.tensor), []).append(name)
    for group in names.values():
        # As text: a user may write the same spec as a string, a tuple or a ShardSpec.
        wanted = {str(specs.get(name)) for name in group}
        if len(wanted) > 1:
            marked = [name for name in group if name in specs]
            raise ShardingError.here(
                f"'{marked[0]}' has another layout than the same weight of another block",
                why="the weights of all blocks are one tensor, which has one layout",
                fix=f"mark all of {group[0]!r} to {group[-1]!r} alike, by a glob",
            )
        if group[0] in specs:
            tensor, axis = rows[group[0]]
            spec = specs[group[0]] if mesh is None else ShardSpec.parse(specs[group[0]])
            # The row dimension is the first one, over the axis that the stack names.
            _marked(tensor, mesh, f"{axis} {spec}".strip())


def _marked(tensor: Tensor, mesh: Mesh | None, spec: Any) -> Tensor:
    """Mark a tensor and return it; without a mesh the mark has names alone."""
    return mark_sharding(tensor, spec) if mesh is None else mark_sharding(tensor, mesh, spec)


def _other_pattern(pattern: str, names: list[str]) -> str:
    """Suggest a pattern in place of one without a match."""
    syntax = "* matches within one part of a name, ** across parts"
    wider = re.sub(r"\*+", "**", pattern)
    if any(map(glob_pattern(wider).fullmatch, names)):
        return f"write '{wider}': {syntax}"
    # A frequent mistake: a regular expression, as other libraries' tables of names take.
    with suppress(re.error):
        if name := next(filter(re.compile(pattern).fullmatch, names), None):
            return (
                "write a glob, not a regular expression, of which this one matches "
                f"'{name}': {syntax}"
            )
    end = pattern.removeprefix("**.")
    if end == pattern or "*" in end:
        return did_you_mean(pattern, names)
    parts = end.count(".") + 1  # below any module: ends of names of as many parts
    ends = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names)
    return did_you_mean(pattern, [f"**.{each}" for each in ends])


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Translate a glob over names into a regular expression."""
    tokens = re.split(r"(\*\*|\*|\?|\[!?[^]]+\])", pattern)
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    classes = {t: t.replace("[!", "[^") for t in tokens if t.startswith("[") and len(t) > 2}
    return re.compile("".join({**wild, **classes}.get(t) or re.escape(t) for t in tokens))


def _mark_outputs(
    mesh: Mesh | None, spec: ShardSpec | str
) -> Callable[[nn.Module, tuple, Any], Any]:
    """Return a forward hook that marks a module's results."""
    rank = len(spec.split()) if isinstance(spec, str) else spec.rank

    def mark(value: object) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == rank:
            return _marked(value, mesh, spec)
        return value

    def hook(module: nn.Module, args: tuple, output: object) -> Any:
        # One result is the user's to mark: a rank that does not fit is an error, not skipped.
        if isinstance(output, Tensor):
            return _marked(output, mesh, spec)
        return pytree.tree_map(mark, output)

    return hook
