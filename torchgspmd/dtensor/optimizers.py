"""A training loop's calls between backward and forward, on local tensors.

    optimizer.step()                        of torch.optim
    clip_grad_norm_(model.parameters(), 1)
    scaler.unscale_(optimizer)
    average.update_parameters(model)        of AveragedModel

torch.optim's classes collect parameters, gradients and states in lists, and one function per class
changes them, element by element: `torch.optim.adam.adam`. It gets the local tensors here. States
stay DTensors for hooks, state_dict and checkpoints, and an error leaves them so.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel

from ..comm.process_groups import find_groups
from ..comm.rank_check import fits
from ..compat.operators import aten, c10d
from ..compat.patches import wrapping
from ..compat.private_apis import OpOverload
from .local_lists import is_replicated_number, local_tensors, matched
from .ours import acts_on_ours, groups_of_ours, is_ours, meet, meeting
from .parts import states_follow
from .replicated_fallback import distribute_like
from .storage import gradient_like

# Adafactor and LBFGS compute norms of whole tensors, and SparseAdam takes no DTensors.
_ELEMENTWISE = "adadelta adagrad adam adamax asgd nadam radam rmsprop rprop sgd"


def update_functions() -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, name) for torch.optim's functions that update element by element."""
    for name in _ELEMENTWISE.split():
        yield importlib.import_module(f"torch.optim.{name}"), name


@wrapping
def with_local_tensors(before: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap an update function: lists of DTensors that match become lists of local tensors."""
    values = (*args, *kwargs.values())
    lists: list[list] = [a for a in values if isinstance(a, list) and a]
    numbers = [a for a in values if isinstance(a, DTensor)]  # a rate, for example
    if (
        not any(type(p) is DTensor for p in (lists or [[]])[0])
        or torch.compiler.is_compiling()
        or torch.is_grad_enabled()  # differentiable=True
        or not all(map(is_replicated_number, numbers))
        or (layouts := _matched_states(*lists)) is None
    ):
        return before(*args, **kwargs)
    parameters: list[Tensor] = lists[0]
    local = [local_tensors(a) for a in args]
    named = {name: local_tensors(a) for name, a in kwargs.items()}
    try:
        result = before(*local, **named)
    finally:
        # What autograd saved of a DTensor is compared by the DTensor's own version.
        increment_version(parameters)
    for value, now in zip(values, (*local, *named.values())) if layouts.lack_states else ():
        if isinstance(value, list):
            _fill(value, now, parameters)
    return result


def _matched_states(*lists: list) -> Any:
    """Return the layouts of matching lists; states that were loaded follow their parameters."""
    layouts = matched(*lists)
    return matched(*lists) if layouts is None and states_follow(*lists) else layouts


@wrapping
def with_planned_update(
    before: Callable, parameters: list[Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Wrap an update function of whole matrices: for our DTensors it runs as a planned program."""
    lists = [parameters, *(a for a in args if isinstance(a, list))]
    tensors = [t for each in lists for t in each]
    groups = groups_of_ours(tensors[0]) if tensors and is_ours(tensors[0]) else None
    if (
        groups is None
        or groups.wrap is None
        or torch.compiler.is_compiling()
        or not all(is_ours(t) and find_groups(t.device_mesh) is groups for t in tensors)
    ):
        return before(parameters, *args, **kwargs)
    # With the model, whose parameters it changes, the program goes.
    owner: Any = parameters[0]._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    key = id(owner), before
    if (program := groups.updates.get(key)) is None:
        program = groups.updates[key] = groups.wrap(_Update(before))
        weakref.finalize(owner, groups.updates.pop, key, None)
    with torch.no_grad():
        result = program(parameters, *args, **kwargs)
    increment_version(tensors)
    return result


class _Update(nn.Module):
    """An optimizer's update function as a module."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _fill(states: list, local: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Fill in states that were missing: SGD's first step puts buffers into a list."""
    for i, (state, new, like) in enumerate(zip(states, local, parameters)):
        if state is None and new is not None:
            if type(like) is DTensor:
                sizes = {"shape": like.shape, "stride": like.stride()}
                layout = like.device_mesh, like.placements
                new = DTensor.from_local(new, *layout, run_check=False, **sizes)
            states[i] = new


@wrapping
def with_sharded_states(
    before: Callable, self: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Wrap Optimizer.load_state_dict: one device's states are laid out like their parameters."""
    before(self, *args, **kwargs)
    for parameter, states in self.state.items():
        if not (isinstance(parameter, DTensor) and is_ours(parameter)):
            continue
        for name, value in states.items():
            # A step count, or a factor that has another shape, is the same for all shards.
            if type(value) is Tensor and value.dim() and value.shape == parameter.shape:
                states[name] = distribute_like(parameter, value)


# ---------------------------------------------------------------------------- gradients' norms


@wrapping
def total_norm(
    before: Callable,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Wrap get_total_norm: norms of shards are reduced in one message for each set of axes."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    order, first = float(norm_type), next((t for t in tensors if type(t) is DTensor), None)
    # No numbers have no maximum.
    layouts = matched(tensors) if first is not None and all(t.numel() for t in tensors) else None
    if first is None or layouts is None or not layouts.are_on_one_mesh:
        return before(tensors, norm_type, error_if_nonfinite, *rest, **options)
    local = local_tensors(tensors)
    with torch.no_grad():
        if any(layouts.axes):
            local = _reduced_norms(local, layouts.axes, order, first)
        total = before(local, order, error_if_nonfinite, *rest, **options)
    return _replicated(total, first)


def _reduced_norms(
    local: Sequence[Tensor], axes: Sequence[tuple[str, ...]], order: float, first: DTensor
) -> list[Tensor]:
    """Return tensors with the norm of all: those that no axis shards, and norms of the others."""
    # A shard may have no numbers, and adds nothing to a sum of powers then.
    nothing = math.inf if order < 0 else 0.0
    shards = [t if t.numel() else t.new_full((1,), nothing) for t, of in zip(local, axes) if of]
    alike: dict[tuple, list[Tensor]] = {}
    for of, norm in zip(filter(None, axes), aten._foreach_norm.Scalar(shards, order)):
        alike.setdefault((of, norm.dtype), []).append(norm)
    whole = [t for t, of in zip(local, axes) if not of]
    for (of, _), norms in alike.items():
        whole += _reduced(torch.stack(norms), order, of, first)
    return whole


def _reduced(
    norms: Tensor, order: float, axes: tuple[str, ...], first: DTensor
) -> Sequence[Tensor]:
    """Return tensors with the norm of whole tensors, from the norms of shards over some axes."""
    # Powers of half-precision norms would overflow or round away before the sum.
    terms = norms.to(torch.promote_types(norms.dtype, torch.float32))
    if order == 0:  # counts, whose norms are 1 each
        return [*_all_reduce(terms, "sum", axes, first).to(norms.dtype)]
    if order in (-math.inf, math.inf):
        kind, most = ("max", terms.amax()) if order > 0 else ("min", terms.amin())
        return [_all_reduce(most, kind, axes, first).to(norms.dtype)]
    total = _all_reduce(terms.pow(order).sum(), "sum", axes, first)
    return [total.pow(1 / order).to(norms.dtype)]


def _all_reduce(
    values: Tensor, kind: str, axes: tuple[str, ...], like: DTensor, norms: bool = True
) -> Tensor:
    """Return values reduced over some axes of the mesh that a DTensor is on."""
    groups, shape = groups_of_ours(like), tuple(values.shape)
    call = "the norms of DTensors (clip_grad_norm_)" if norms else "GradScaler.unscale_"
    # A number travels with the comparison of the ranks, which takes a tenth of gloo's time.
    if kind == "sum" and fits(groups, shape, values.dtype, groups.mesh.count(axes)):
        return groups.watcher.run(lambda: meeting(groups, call, shape, axes).begin(values).total())
    name = groups.group(axes)[0]
    meet(groups, call, shape, kind, axes)
    return groups.watcher.run(
        lambda: c10d.wait_tensor.default(c10d.all_reduce.default(values, kind, name))
    )


def _replicated(number: Tensor, like: DTensor) -> DTensor:
    """Return a number that every rank has as a DTensor on another one's mesh."""
    numbers, mesh = groups_of_ours(like).numbers, like._spec.mesh
    known = numbers.get(number.dtype)
    # from_local takes 100 us, for a layout that is the same at each step.
    if known is None or known._spec.mesh is not mesh:
        everywhere = [Replicate()] * mesh.ndim
        known = DTensor.from_local(torch.zeros_like(number), mesh, everywhere, run_check=False)
        numbers[number.dtype] = known
    return gradient_like(number, known)


@wrapping
def with_local_gradients(before: Callable, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a function that changes parameters' gradients in place, element by element."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, DTensor)]
    if (
        not any(type(g) is DTensor for g in gradients)
        or not all(map(is_replicated_number, numbers))
        or not matched(gradients)
    ):
        return before(parameters, *args, **kwargs)
    result = before(
        # The function reads nothing else of a parameter.
        [SimpleNamespace(grad=local) for local in local_tensors(gradients)],
        *map(local_tensors, args),
        **{name: local_tensors(value) for name, value in kwargs.items()},
    )
    increment_version(gradients)
    return result


@wrapping
def unscale(before: Callable | None, op: OpOverload, args: tuple, kwargs: dict) -> None:
    """Wrap DTensor's handler of GradScaler's operation: any rank's infinity is all ranks'.

    torch's handler reduces over the axes that shard the first gradient alone.
    """
    gradients, found, scale = args
    is_plain = not any(isinstance(each, DTensor) for each in (found, scale))
    if not (acts_on_ours(args, kwargs) and is_plain and matched(gradients)):
        assert before is not None
        return before(op, args, kwargs)
    op(local_tensors(gradients), found, scale)
    found.copy_(_found_on_any([g for g in gradients if type(g) is DTensor], found))


def _found_on_any(gradients: Sequence[DTensor], found: Tensor) -> Tensor:
    """Return the largest flag of the ranks that have other shards of gradients."""
    meshes: dict[Any, list[DTensor]] = {}
    for gradient in gradients:
        meshes.setdefault(gradient._spec.mesh, []).append(gradient)
    for each in meshes.values():
        layouts = matched(each)
        assert layouts is not None, "unscale has looked"
        shards = {axis for axes in layouts.axes for axis in axes}
        if shards:
            axes = tuple(a for a in groups_of_ours(each[0]).mesh.names if a in shards)
            found = _all_reduce(found, "max", axes, each[0], norms=False)
    return found


# ------------------------------------------------------------------------------------ averages


@wrapping
def with_local_averages(before: Callable, self: AveragedModel, model: nn.Module) -> None:
    """Wrap AveragedModel.update_parameters: torch's own averages are elementwise."""
    functions = [f for f in (self.avg_fn, self.multi_avg_fn) if f is not None]
    averages, values = _Tensors(self.module), _Tensors(model)
    if not (
        all(f.__module__ == AveragedModel.__module__ for f in functions)
        and any(type(t) is DTensor for t in averages)
        and matched([*averages], [*values])
    ):
        return before(self, model)
    # update_parameters reads these attributes, and adds to n_averaged in place.
    names = "n_averaged", "use_buffers", "avg_fn", "multi_avg_fn"
    local = SimpleNamespace(
        module=averages.local(),
        parameters=averages.local().parameters,
        **{name: getattr(self, name) for name in names},
    )
    before(local, values.local())
    increment_version([*averages])
    return None


class _Tensors:
    """A module's parameters and buffers, and the same as local tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters, self._buffers = [*module.parameters()], [*module.buffers()]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((*self._parameters, *self._buffers))

    def local(self) -> Any:
        """Return a stand-in for the module, with local tensors."""
        parameters, buffers = local_tensors(self._parameters), local_tensors(self._buffers)
        return SimpleNamespace(parameters=lambda: iter(parameters), buffers=lambda: iter(buffers))
