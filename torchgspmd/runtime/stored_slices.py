"""Tensors of files, renamed and joined as transformers does, of which a part is read.

A checkpoint has one tensor for each expert, and the model one for all of a layer. transformers'
conversion runs once, on meta. A part of its result is followed back through the operations to parts
of the files' tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat.operators import aten
from ..compat.private_apis import TorchDispatchMode
from ..compat.private_apis import _pytree as pytree

Box = tuple[slice, ...]  # begin and end on each dimension


class Stored(NamedTuple):
    """A tensor of an open safetensors file."""

    file: Any
    name: str
    like: Tensor  # on meta

    def read(self, box: Box) -> Tensor:
        """Return a part. Only its bytes are read."""
        if box == _all(self.like):  # get_slice cannot slice a scalar
            return self.file.get_tensor(self.name)
        return self.file.get_slice(self.name)[box]


def stored_in(file: Any) -> dict[str, Stored]:
    """Return an open file's tensors by name."""
    found = dict[str, Stored]()
    for name in file.keys():
        part = file.get_slice(name)
        shape = part.get_shape()
        dtype = part[:0].dtype if shape else None  # no conversion is of scalars
        found[name] = Stored(file, name, torch.empty(shape, dtype=dtype, device="meta"))
    return found


def _all(tensor: Tensor) -> Box:
    return tuple(slice(0, n) for n in tensor.shape)


@dataclass
class StoredTensors:
    """A model's tensors in files: each is a file's, or follows from several.

    found: by the model's names, on meta. unknown: names in the files that the model lacks.
    """

    found: dict[str, Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    files: dict[int, Stored] = field(default_factory=dict)  # by id of `like`
    record: Recorded = field(default_factory=lambda: Recorded())
    conversions: list[Any] | None = None  # transformers' that applied; save_pretrained reverts them

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or a part."""
        tensor = self.found[name]
        return self._part(tensor, _all(tensor) if box is None else box)

    def _part(self, tensor: Tensor, box: Box) -> Tensor:
        if id(tensor) in self.files:
            return self.files[id(tensor)].read(box)
        if not tensor.is_meta:  # a constant
            return tensor[box]
        step = self.record.steps[id(tensor)]
        if (follow := _PARTS.get(step.function)) is not None:
            return follow(self._part, step, tensor, box)

        def whole(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._part(value, _all(value))
            return torch.device("cpu") if value == torch.device("meta") else value

        args, kwargs = pytree.tree_map(whole, (step.args, step.kwargs))
        results = pytree.tree_leaves(step.function(*args, **kwargs))
        return results[step.index][box]


class Step(NamedTuple):
    """The operation that a tensor is a result of, and all results."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    results: list[Tensor]
    index: int


class Recorded(TorchDispatchMode):
    """Keeps the operations of a conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, Step] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            raise NotImplementedError(f"transformers' conversion writes in place, by {func}")
        results = pytree.tree_leaves(result)
        for index, tensor in enumerate(results):
            self.steps[id(tensor)] = Step(func, args, kwargs or {}, results, index)
        return result


# ------------------------------------------------------------- a part of an operation's result

Read = Callable[[Tensor, Box], Tensor]


def _argument(step: Step, position: int, name: str, default: Any) -> Any:
    if len(step.args) > position:
        return step.args[position]
    return step.kwargs.get(name, default)


def _stack(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    dim = _argument(step, 1, "dim", 0) % tensor.dim()
    rest = box[:dim] + box[dim + 1 :]
    return torch.stack([read(t, rest) for t in step.args[0][box[dim]]], dim)


def _cat(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    dim, end, parts = _argument(step, 1, "dim", 0) % tensor.dim(), 0, list[Tensor]()
    for operand in step.args[0]:
        begin, end = end, end + operand.shape[dim]
        low, high = max(box[dim].start, begin), min(box[dim].stop, end)
        if low < high:
            parts.append(read(operand, _with(box, dim, low - begin, high - begin)))
    return torch.cat(parts, dim)


def _split(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    dim = _argument(step, 2, "dim", 0) % tensor.dim()
    begin = sum(t.shape[dim] for t in step.results[: step.index])
    return read(step.args[0], _with(box, dim, begin + box[dim].start, begin + box[dim].stop))


def _slice(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    source, dim = step.args[0], _argument(step, 1, "dim", 0) % tensor.dim()
    begin, _, stride = slice(*(_argument(step, i, "", None) for i in (2, 3, 4))).indices(
        source.shape[dim]
    )
    first, last = box[dim].start, box[dim].stop
    part = read(source, _with(box, dim, begin + first * stride, begin + (last - 1) * stride + 1))
    return part[(slice(None),) * dim + (slice(None, None, stride),)]


def _row(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    source, dim = step.args[0], _argument(step, 1, "dim", 0) % step.args[0].dim()
    index = _argument(step, 2, "", step.index) % source.shape[dim]  # unbind has a result for each
    return read(source, (*box[:dim], slice(index, index + 1), *box[dim:])).squeeze(dim)


def _permute(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    order = [*range(tensor.dim())]
    if step.function is aten.permute.default:
        order = [d % tensor.dim() for d in step.args[1]]
    else:
        first, second = step.args[1:] or (0, 1)  # of t()
        order[first], order[second] = order[second], order[first]
    inner = [slice(0)] * tensor.dim()
    for place, dim in enumerate(order):
        inner[dim] = box[place]
    return read(step.args[0], tuple(inner)).permute(order)


def _view(read: Read, step: Step, tensor: Tensor, box: Box) -> Tensor:
    """Leading and trailing dimensions that a view keeps are read in parts, those between whole."""
    source = step.args[0]
    old, new = source.shape, tensor.shape
    head = _alike(old, new)
    tail = min(_alike(old[::-1], new[::-1]), min(len(old), len(new)) - head)
    between = slice(head, len(old) - tail)
    inner = box[:head] + _all(source)[between] + box[len(new) - tail :]
    part = read(source, inner)
    sizes = [*part.shape[:head], *new[head : len(new) - tail], *part.shape[len(old) - tail :]]
    return part.reshape(sizes)[(slice(None),) * head + box[head : len(new) - tail]]


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many sizes both begin with."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _with(box: Box, dim: int, begin: int, end: int) -> Box:
    return (*box[:dim], slice(begin, end), *box[dim + 1 :])


_PARTS: dict[Any, Callable[[Read, Step, Tensor, Box], Tensor]] = {
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.select.int: _row,
    aten.unbind.int: _row,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    **dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default), _view),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default), _view),
}


# ------------------------------------------------------------------------- names of other files


def stored_tensors_of(
    model: nn.Module,
    stored: Mapping[str, Stored],
    targets: Mapping[str, Tensor],
    rename: Callable[[str], str] | None,
) -> StoredTensors:
    """Return the tensors that files have for a model.

    model: the module itself, no proxy. targets: its tensors. rename: as load_safetensors takes it;
    without it, a model of transformers takes the names that its from_pretrained takes.
    """
    result = StoredTensors(files={id(s.like): s for s in stored.values()})
    renamed = {(rename or str)(name): s.like for name, s in stored.items()}
    if rename is None and (library := _library_of(model)) is not None:
        renamed = _converted(model, library, renamed, targets, result)
    for name, tensor in renamed.items():
        if name in targets:
            result.found[name] = tensor
        elif not _is_ignored(model, "unexpected", name):
            result.unknown.append(name)
    return result


def without_ignored(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Leave out names that the files of a model of transformers may lack."""
    return [name for name in missing if not _is_ignored(model, "missing", name)]


def _is_ignored(model: nn.Module, kind: str, name: str) -> bool:
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _library_of(model: nn.Module) -> tuple[Any, Any] | None:
    """Return transformers' modules that convert names, if the model is one of its models."""
    if all(kind.__module__ != "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    try:
        names = ("conversion_mapping", "core_model_loading")
        mapping, loading = (import_module(f"transformers.{name}") for name in names)
    except ImportError:  # before transformers 5 names were as in the files
        return None
    return mapping, loading


def _converted(
    model: Any,
    library: tuple[Any, Any],
    stored: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    result: StoredTensors,
) -> dict[str, Tensor]:
    """Return tensors by the model's names, or else the file's; result gets how they follow."""
    mapping, loading = library
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    found, joined = dict[str, Tensor](), dict[str, Any]()
    for name in sorted(stored, key=loading.dot_natural_key):
        known = model.base_model_prefix, targets
        new, pattern = loading.rename_source_key(name, renamings, converters, *known)
        if new not in targets and name in targets:
            new, pattern = name, None
        if new not in targets or pattern is None:
            found[new if new in targets else name] = stored[name]
            continue
        converter = joined.setdefault(new, copy.deepcopy(of_pattern[pattern]))
        converter.add_tensor(new, name, pattern, stored[name])
    for new, converter in joined.items():
        with result.record:
            results = converter.convert(new, model=model, config=model.config)
        for name, value in results.items():
            found[name] = value[0] if isinstance(value, list) else value
    result.conversions = [t for t in transforms if getattr(t, "_was_used", True)]
    return found
