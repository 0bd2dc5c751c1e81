"""ModuleProxy: a module that stands for a model and caches programs by call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture import BUFFER, PARAMETER, State, Varying, is_transforming
from ..capture.state.dependencies import (
    GLOBAL_HOOKS,
    HOOKS,
    TABLES,
    WATCHED,
    facts_of,
    has_global_hooks,
    named_tensors,
)
from ..capture.state.run_guards import module_description
from ..capture.state.value_keys import value_key
from ..errors import ShardingError, did_you_mean
from ..layout.mark import mark_sharding, raw_mark, recorded_mark, stored_over
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .proxy_class import OWN, class_for, of_model

if TYPE_CHECKING:
    from ..compiler.plan import Plan

MAX_PROGRAMS = 8  # Most programs per key, which differ in the attributes that forward reads.
_TRAINING = attrgetter("training")
_HOOK_TABLES = itemgetter(*HOOKS)  # `module._forward_hooks = OrderedDict()` removes all


def mark_on(tensor: Tensor, mesh: Mesh) -> ShardSpec | None:
    """Return the layout that a parameter or buffer is marked with, or None."""
    mark = recorded_mark(tensor)
    if mark is not None and mark[0] != mesh:
        raise ShardingError(
            f"a parameter is marked on mesh {mark[0]}, but the model is put on mesh {mesh}",
            where=mark[2],
            fix="use one Mesh for all marks of a model",
        )
    return mark[1] if mark else None


def shard_updates(model: nn.Module, mesh: Mesh, axis: str) -> None:
    """Mark every trained parameter to be stored and updated sharded over one more axis (ZeRO).

    Source: arXiv 2004.13336.
    """
    if axis not in mesh.names:
        raise ShardingError.here(
            f"shard_updates names axis '{axis}', which mesh {mesh} does not have",
            fix=did_you_mean(axis, mesh.names),
        )
    for parameter in model.parameters():
        mark = mark_on(parameter, mesh) or ShardSpec.replicated(parameter.dim())
        spec = mark.closed()
        if not parameter.requires_grad or not parameter.dim() or axis in spec.sharding_axes:
            continue
        updated = stored_over(spec, parameter.shape, mesh, axis)
        mark_sharding(parameter, mesh, updated.with_priorities(mark.priorities))


def mark_as_planned(model: nn.Module, mesh: Mesh, plan: Plan) -> None:
    """Mark each parameter and buffer that has no mark with a plan's layout."""
    if plan.mesh != mesh:
        raise ShardingError.here(
            f"the plan is for mesh {plan.mesh}, but the model is put on mesh {mesh}",
            fix="plan for this mesh",
        )
    tensors = dict(named_tensors(model))
    # Before a weight is marked: its states have its mark.
    marked = {name for name, tensor in tensors.items() if mark_on(tensor, mesh) is not None}
    for each, spec in zip(plan.captured.inputs, plan.input_layouts):
        if each.kind not in (PARAMETER, BUFFER):
            continue
        tensor = tensors.get(each.name)
        if tensor is None or tuple(tensor.shape) != tuple(each.shape):
            found = "does not have" if tensor is None else f"has with shape {tuple(tensor.shape)}"
            raise ShardingError.here(
                f"the plan has a weight '{each.name}', {tuple(each.shape)}, which the model "
                f"{found}",
                fix="give a plan of this model: torchgspmd.plan(model, *args, mesh=mesh)",
            )
        if each.name not in marked:
            mark_sharding(tensor, mesh, spec)


def leaf_key(leaf: object) -> Any:
    """Return an argument's key: all properties on which a compiled program depends."""
    if isinstance(leaf, DTensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.placements
    if isinstance(leaf, Tensor):
        key = tuple(leaf.shape), leaf.dtype, leaf.requires_grad
        mark = raw_mark(leaf)
        return key if mark is None else (*key, mark[1])
    return value_key(leaf)


class ModuleProxy(nn.Module):
    """A model's proxy: an instance of its class that answers as the model, but for calls.

    It caches programs and notices when the model has changed since a program was compiled:
    submodules, hooks, shapes and dtypes (`_structure_version`), attributes that forward reads
    (capture/state/guards.py), modes and frozen parameters.
    """

    _of: type[nn.Module] | None = None  # the model's class

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        if cls._of is not None:  # type(self)(...) in a method of the model: another of its kind
            return cls._of(*args, **kwargs)
        return object.__new__(class_for(cls, type(args[0])))

    def __init__(self, model: nn.Module) -> None:
        # Not nn.Module.__init__: a proxy has hooks for its calls, and no parameters of its own.
        hooks = {name: value for name, value in vars(nn.Module()).items() if name in OWN}
        self.__dict__.update(hooks, _programs={}, _version_of={}, _state=State())
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        self.__dict__["_model"] = model
        self._read_structure()

    def _read_structure(self) -> None:
        """Record the rows of dependencies.py that tables decide, and the tables' entries."""
        everything = list(self._model.modules())
        tables = [getattr(m, name) for m in everything for name in WATCHED]
        tables += GLOBAL_HOOKS.values()
        _refuse_transforms()  # before its plain tensors are found in the place of ours
        self._check_tensors()
        facts = tuple(facts_of(self._model, TABLES))
        filled = [table for table in tables if table]
        self.__dict__.update(
            _everything=everything,
            _classes=[*map(type, everything)],
            _attributes=[*map(vars, everything)],
            _hook_tables=[*map(_HOOK_TABLES, map(vars, everything))],
            _filled=filled,
            _empty=[table for table in tables if not table],
            _seen=[*chain.from_iterable(map(dict.values, filled))],
            _slots=[
                (m._parameters, name)
                for m in everything
                for name, p in m._parameters.items()
                if p is not None
            ],
            _version=self._version_of.setdefault(facts, len(self._version_of)),
        )

    def _check_tensors(self) -> None:
        """Raise ShardingError if the model has a tensor that the backend cannot take."""

    def _structure_version(self) -> int:
        """Return a number for the model's modules, classes and hooks, and its tensors' kinds."""
        values = [*chain.from_iterable(map(dict.values, self._filled))]
        # By identity, in C: this runs at every call.
        if (
            any(self._empty)
            or len(values) != len(self._seen)
            or not all(map(is_, values, self._seen))
            or not all(map(is_, map(type, self._everything), self._classes))
            or [*map(_HOOK_TABLES, self._attributes)] != self._hook_tables
        ):
            self._read_structure()
        return self._version

    def _description(self) -> list[tuple[str, str]]:
        """Return (name, value) for programs' dependencies besides attributes that forward reads.

        Names and values are the same in every process.
        """
        return [*module_description(self._model)]

    def _attribute_prefixes(self) -> dict[int, str]:
        return {id(m): f"{name}." for name, m in self._model.named_modules() if name}

    def _program_for(
        self,
        key: object,
        compile_program: Callable[[], Any],
        leaves: Sequence[object],
        shapes: Sequence[Sequence[int]] = (),
    ) -> Any:
        """Return the program for a call key; compile one if no cached one's guards hold.

        leaves: of the arguments. shapes: the call's, if some of its sizes are symbols.
        """
        _refuse_transforms()
        programs = self._programs.setdefault(key, [])
        for program in programs:
            if program.captured.holds(leaves, shapes):
                return program
        for program in self._all_programs():
            for source, value in program.captured.reads.changed():
                # A number that has changed becomes an input of the next program.
                self._state.vary(source, value)
        if len(programs) == MAX_PROGRAMS:
            names = ", ".join(sorted({x for p in programs for x in p.captured.differing(leaves)}))
            warnings.warn(
                f"a program has been made anew {MAX_PROGRAMS} times, "
                f"since forward reads {names}, which changes between calls: pass an attribute to "
                "forward as a tensor, or register a buffer and copy_() into it; pad an argument "
                "to few sizes",
                stacklevel=3,
            )
            # The oldest goes: memory must not grow with the calls.
            del programs[0]
        programs.append(compile_program())
        return programs[-1]

    def _varying(self, tree: object, leaves: list, keys: list) -> Varying:
        """Return the varying floats among the leaves, and reduce their keys to the type."""
        varying = self._state.varying.setdefault(
            (tree, tuple(type(leaf) for leaf in leaves)), Varying()
        )
        for i in varying.take(leaves):
            keys[i] = float
        return varying

    def _all_programs(self) -> list:
        return [*chain.from_iterable(self._programs.values())]

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call forward with the proxy's own hooks. Hooks of all modules are in the program."""
        if not any(GLOBAL_HOOKS.values()) or not has_global_hooks():
            return super()._call_impl(*args, **kwargs)
        if any(map(vars(self).__getitem__, HOOKS)):
            raise ShardingError.here(
                "a module on a mesh has hooks of its own, and all modules have hooks",
                why="its own run around the program, those of all modules inside, in another order "
                "than on one device",
                fix="register its own hooks before parallelize: then they are in the program too",
            )
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return of_model(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._model)})

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Raise ShardingError: DistributedDataParallel, which looks here, is around a proxy."""
        raise ShardingError.here(
            "DistributedDataParallel is around a module on a mesh",
            why="the mesh shards the batch and reduces the gradients",
            fix="leave it out, and shard the batch: parallelize(..., in_specs='data _'); use "
            "torchgspmd.integrations for transformers' Trainer and accelerate, which put it "
            "there",
        )

    def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules(*args, **kwargs):
            # Callers expect to find the module that they have asked.
            yield name, self if module is self._model else module

    def __deepcopy__(self, memo: dict) -> ModuleProxy:
        proxy = memo[id(self)] = object.__new__(type(self))
        proxy.__dict__.update(
            {
                name: copy.copy(value) if isinstance(value, dict) else value
                for name, value in self.__dict__.items()
            },
            _programs={},
            _state=State(),
        )
        proxy._attach(copy.deepcopy(self._model, memo))
        return proxy

    def __getstate__(self) -> object:
        raise ShardingError.here(
            "a module on a mesh cannot be pickled, nor copied by copy.copy",
            why="its processes would have to be there when it is read",
            fix="copy.deepcopy(model) copies it; to save it, run `state = gspmd.full_state_dict("
            "model)` on every rank, and `torch.save(state, path)` on rank 0; or run "
            "`torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=path)` on every "
            "rank",
        )

    def compile(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ShardingError; nn.Module.compile does not apply."""
        raise ShardingError.here(
            "a module on a mesh is compiled by its backend",
            fix="call parallelize(..., backend='inductor')",
        )

    def _modes(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self._everything))


def _refuse_transforms() -> None:
    """Raise ShardingError within torch.export, torch.func.vmap, grad and the like."""
    if torch.compiler.is_exporting():
        raise ShardingError.here(
            "torch.export exports a module on a mesh",
            why="its program is one of several processes",
            fix="export the model that was not wrapped, with the weights of full_state_dict(model)",
        )
    if is_transforming():
        raise ShardingError.here(
            "torch.func transforms a module on a mesh",
            why="its program is neither vectorized nor differentiated by that",
            fix="call torch.func.vmap or grad in its forward, or use backward()",
        )
