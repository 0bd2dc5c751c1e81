"""A module's parameters and buffers, by name and place; and what a call of it depends on."""
from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .annotate import mark_sharding, recorded_mark
from .errors import ShardingError, did_you_mean, user_line
from .mesh import Mesh
from .shard_spec import ShardSpec

_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def slot_of(model: nn.Module, name: str) -> tuple[dict, str]:
    """The table that holds a parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


def mark_on(tensor: Tensor, mesh: Mesh) -> ShardSpec | None:
    """The layout that a parameter or buffer is marked with."""
    mark = recorded_mark(tensor)
    if mark is not None and mark[0] != mesh:
        raise ShardingError(f"a parameter is marked on mesh {mark[0]}, but the model is put on mesh {mesh}", where=mark[2],
                            fix="use one Mesh for all marks of a model")
    return mark[1] if mark else None


def shard_updates(model: nn.Module, mesh: Mesh, axis: str) -> None:
    """Marks every trained parameter to be stored, and so updated, in parts over one more axis (arXiv 2004.13336).

    The dimension that is cut is the largest that divides, else the largest; one that other axes shard already only if no
    other is long enough.
    """
    if axis not in mesh.names:
        raise ShardingError(f"shard_updates names axis '{axis}', which mesh {mesh} does not have", where=user_line(),
                            fix=did_you_mean(axis, mesh.names))
    for parameter in model.parameters():
        spec = (mark_on(parameter, mesh) or ShardSpec.replicated(parameter.dim())).closed()
        if not parameter.requires_grad or not parameter.dim() or axis in spec.sharding_axes:
            continue
        count = mesh.count((axis,))
        rows = [n // mesh.count(axes) for n, axes in zip(parameter.shape, spec.dims)]
        dim = max(range(parameter.dim()), key=lambda d: (rows[d] >= count, not spec.dims[d], rows[d] % count == 0, rows[d]))
        axes = tuple(a for a in mesh.names if a == axis or a in spec.dims[dim])
        mark_sharding(parameter, mesh, ShardSpec((*spec.dims[:dim], axes, *spec.dims[dim + 1:])))


def leaf_key(leaf: Any) -> Any:
    """What of an argument the compiled program depends on."""
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


class Wrapped(nn.Module):
    """Stands for a model: names of parameters, buffers and submodules are the model's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.__dict__.update(_model=model, _parameters=model._parameters, _buffers=model._buffers, _modules=model._modules,
                             training=model.training, _everything=list(model.modules()))
        self.__dict__["_slots"] = [(m._parameters, name) for m in self._everything for name, p in m._parameters.items() if p is not None]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __getitem__(self, key: Any) -> Any:                                 # those of nn.Sequential, ModuleList and ModuleDict
        return self._model[key]

    def __len__(self) -> int:
        return len(self._model)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._model)

    def trainable(self) -> tuple[bool, ...]:
        """Whether each parameter requires a gradient."""
        return tuple(map(_REQUIRES_GRAD, [table[name] for table, name in self._slots]))

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is training, this one as the model itself."""
        self._model.training = self.training
        return tuple(map(_TRAINING, self._everything))
