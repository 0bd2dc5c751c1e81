"""A module's parameters and buffers, by name and place; and what a call of it depends on."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from operator import attrgetter, is_
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from ..annotate import mark_sharding, recorded_mark
from ..capture import State, Varying, is_transforming
from ..errors import ShardingError, did_you_mean, user_line
from ..mesh import Mesh
from ..shard_spec import ShardSpec

MANY = 8  # programs for calls that are alike, which differ by the attributes that forward read
_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def slot_of(model: nn.Module, name: str) -> tuple[dict, str]:
    """The table that holds a parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


def mark_on(tensor: Tensor, mesh: Mesh) -> ShardSpec | None:
    """The layout that a parameter or buffer is marked with."""
    mark = recorded_mark(tensor)
    if mark is not None and mark[0] != mesh:
        raise ShardingError(
            f"a parameter is marked on mesh {mark[0]}, but the model is put on mesh {mesh}",
            where=mark[2],
            fix="use one Mesh for all marks of a model",
        )
    return mark[1] if mark else None


def shard_updates(model: nn.Module, mesh: Mesh, axis: str) -> None:
    """Marks every trained parameter to be stored, and so updated, in parts over one more axis
    (arXiv 2004.13336).

    The dimension that is cut is the largest that divides, else the largest; one that other axes
    shard already only if no other is long enough.
    """
    if axis not in mesh.names:
        raise ShardingError(
            f"shard_updates names axis '{axis}', which mesh {mesh} does not have",
            where=user_line(),
            fix=did_you_mean(axis, mesh.names),
        )
    for parameter in model.parameters():
        spec = (mark_on(parameter, mesh) or ShardSpec.replicated(parameter.dim())).closed()
        if not parameter.requires_grad or not parameter.dim() or axis in spec.sharding_axes:
            continue
        count = mesh.count((axis,))
        rows = [n // mesh.count(axes) for n, axes in zip(parameter.shape, spec.dims)]
        dim = max(
            range(parameter.dim()),
            key=lambda d: (rows[d] >= count, not spec.dims[d], rows[d] % count == 0, rows[d]),
        )
        axes = tuple(a for a in mesh.names if a == axis or a in spec.dims[dim])
        mark_sharding(parameter, mesh, ShardSpec((*spec.dims[:dim], axes, *spec.dims[dim + 1 :])))


def leaf_key(leaf: Any) -> Any:
    """What of an argument the compiled program depends on."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return _content(leaf, ())


def _content(value: Any, around: tuple[int, ...]) -> Any:
    """What two objects have to agree in; functions and modules are themselves, as another may come
    to lie at the address of one.
    """
    attributes = getattr(value, "__dict__", None)
    if callable(value):
        itself = value if isinstance(value, Hashable) else repr(value)
        return (
            itself
            if isinstance(value, (type, nn.Module)) or not attributes
            else (itself, _content(attributes, around))
        )
    if id(value) in around:
        return "itself"
    around = (*around, id(value))
    if isinstance(value, dict):
        return type(value), *((repr(name), _content(v, around)) for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(_content(v, around) for v in value)
    if isinstance(value, (set, frozenset)):
        return type(value), *sorted(map(repr, value))  # their order is another one in each process
    return (
        repr(value)
        if attributes is None
        else (type(value), as_text(repr(value)), _content(attributes, around))
    )


def as_text(key: Any) -> str:
    """A key, or part of one, as every process writes it: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(key))


class ModuleProxy(nn.Module):
    """Stands for a model: names of parameters, buffers and submodules are the model's, and so are
    attributes and methods.

    Keeps the programs that were made of it, and notices when the model is not any more what they
    were made from: submodules, hooks, shapes and types (`_current`), attributes that forward read
    (capture/state/guards.py), modes and frozen parameters.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.__dict__.update(training=model.training, _programs={}, _known={}, _state=State())
        self._stand_for(model)

    def _stand_for(self, model: nn.Module) -> None:
        self.__dict__.update(
            _model=model,
            _parameters=model._parameters,
            _buffers=model._buffers,
            _modules=model._modules,
        )
        self._look()

    def _look(self) -> None:
        """Takes in what the model consists of."""
        everything = list(self._model.modules())
        tables = [table for m in everything for table in (m._modules, m._parameters, m._buffers)]
        hooks = [table for m in everything for table in (m._forward_pre_hooks, m._forward_hooks)]
        kinds = (
            *((name, self._kind(name, held)) for table in tables for name, held in table.items()),
            *(tuple(table.values()) for table in hooks),
        )
        self.__dict__.update(
            _everything=everything,
            _tables=tables + hooks,
            _seen=[*chain.from_iterable(map(dict.values, tables + hooks))],
            _slots=[
                (m._parameters, name)
                for m in everything
                for name, p in m._parameters.items()
                if p is not None
            ],
            _version=self._known.setdefault(kinds, len(self._known)),
        )

    def _kind(self, name: str, held: Any) -> Any:
        """What a program depends on of a parameter, buffer or submodule, or of None in the place of
        one.
        """
        return (tuple(held.shape), held.dtype) if isinstance(held, Tensor) else held

    def _current(self) -> int:
        """A number for what the model consists of: modules, their hooks, and the kinds of their
        parameters and buffers.
        """
        held = [*chain.from_iterable(map(dict.values, self._tables))]
        if len(held) != len(self._seen) or not all(map(is_, held, self._seen)):
            self._look()
        return self._version

    def _described(self) -> list[tuple[str, str]]:
        """What programs depend on of the model besides what forward reads, by names that are the
        same in every process.
        """
        modules, tensors = (
            self._model.named_modules(remove_duplicate=False),
            named_tensors(self._model),
        )
        found = [(name or "the model", m) for name, m in modules]
        return [
            *((f"the class of {name}", type(m).__qualname__) for name, m in found),
            *((f"the mode of {name}", "train" if m.training else "eval") for name, m in found),
            *(
                (
                    f"the number of hooks of {name}",
                    str(len(m._forward_hooks) + len(m._forward_pre_hooks)),
                )
                for name, m in found
            ),
            *(
                (
                    f"the kind of {name}",
                    as_text((tuple(t.shape), t.dtype, getattr(t, "placements", None))),
                )
                for name, t in tensors
            ),
            *((f"requires_grad of {name}", str(t.requires_grad)) for name, t in tensors),
        ]

    def _owners(self) -> dict[int, str]:
        """What the names of attributes begin with, by the id of the table in which a module has
        them.
        """
        return {id(m.__dict__): f"{name}." for name, m in self._model.named_modules() if name}

    def _program(self, key: Any, make: Callable[[], Any]) -> Any:
        """The program for calls of this key: made where there is none, or only such as read other
        attributes than those of now.
        """
        if is_transforming():
            raise ShardingError(
                "torch.func transforms a module on a mesh",
                where=user_line(),
                why="its program is neither vectorized nor differentiated by that",
                fix="call torch.func.vmap or grad in its forward, or use backward()",
            )
        if self._is_forwarding():
            with self._forward_of_the_model(self._own_forward):
                return self._program(key, make)
        programs = self._programs.setdefault(key, [])
        for program in programs:
            if program.captured.holds():
                return program
        for program in self._all_programs():
            for place in program.captured.reads.changed():
                self._state.vary(*place)
        if len(programs) == MANY:
            names = ", ".join(
                sorted(
                    {f"'{name}'" for program in programs for name in program.captured.differing()}
                )
            )
            warnings.warn(
                f"a program has been made anew {MANY} times, since forward reads {names} of the model, which changes between "
                "calls: pass it to forward as a tensor, or register a buffer and copy_() into it",
                stacklevel=3,
            )
            del programs[0]
        programs.append(make())
        return programs[-1]

    def _varying(self, tree: Any, leaves: list, keys: list) -> Varying:
        """The floats among the leaves of arguments that vary; of these the keys are to name the
        type only.
        """
        varying = self._state.varying.setdefault(
            (tree, tuple(type(leaf) for leaf in leaves)), Varying()
        )
        for i in varying.take(leaves):
            keys[i] = float
        return varying

    def _all_programs(self) -> list:
        return [*chain.from_iterable(self._programs.values())]

    def _is_forwarding(self) -> bool:
        """Whether a method of the model is under way, in which calls of the model come here."""
        return self._model.__dict__.get("forward") == self.forward

    @contextmanager
    def _forward_of_the_model(self, forward: Callable | None) -> Iterator[None]:
        """Meanwhile that is this one; None: that of its class."""
        before = self._set_forward(forward)
        try:
            yield
        finally:
            self._set_forward(before)

    def _set_forward(self, forward: Callable | None) -> Callable | None:
        """What it was before."""
        before = self._model.__dict__.pop("forward", None)
        if forward is not None:
            self._model.__dict__["forward"] = forward
        return before

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_model"], name)
        if not isinstance(found, MethodType) or found.__self__ is not self._model:
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:  # such as generate, that calls the model
            if not self._is_forwarding():
                self.__dict__["_own_forward"] = self._model.__dict__.get("forward")
            with self._forward_of_the_model(self.forward):
                return found(*args, **kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or "_model" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def __deepcopy__(self, memo: dict) -> ModuleProxy:
        """A module of its own on the same devices."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(
            {
                name: copy.copy(value) if isinstance(value, dict) else value
                for name, value in self.__dict__.items()
            },
            _programs={},
            _state=State(),
        )
        made._stand_for(copy.deepcopy(self._model, memo))
        return made

    def __getstate__(self) -> Any:
        raise ShardingError(
            "a module on a mesh cannot be pickled",
            where=user_line(),
            why="its processes would have to be there when it is read",
            fix="save its state_dict(), with torch.distributed.checkpoint for one that can be read on every mesh",
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """In the place of nn.Module's: always a ShardingError."""
        raise ShardingError(
            "a module on a mesh is compiled by its backend",
            where=user_line(),
            fix="parallelize(..., backend='inductor')",
        )

    def __getitem__(self, key: Any) -> Any:  # those of nn.Sequential, ModuleList and ModuleDict
        return self._model[key]

    def __len__(self) -> int:
        return len(self._model)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._model)

    def _trainable(self) -> tuple[bool, ...]:
        """Whether each parameter requires a gradient."""
        return tuple(map(_REQUIRES_GRAD, [table[name] for table, name in self._slots]))

    def _modes(self) -> tuple[bool, ...]:
        """Whether each module is training, this one as the model itself."""
        self._model.training = self.training
        return tuple(map(_TRAINING, self._everything))
