"""The last row of a certificate: the captured program computes eager PyTorch's values.

The other rows begin with the captured program, so a wrong capture is right in all of them. Here
the caller's function runs on the caller's own tensors, in their own order in memory, and the
captured program on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...capture import ARGUMENT, GRADIENT, MUTATION, OUTPUT, TANGENT
from ...compat.operators import draws
from ...compat.private_apis import FakeTensor
from ...compat.private_apis import _pytree as pytree
from ...compiler.plan import Plan
from ...compiler.planned_call import PlannedCall
from ...errors import ShardingError
from .claimed_layouts import close, not_eager
from .inputs import WIDE, Rewritten, device_of
from .one_device import OneDeviceRun
from .trial import constants_of, elements

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_COARSE = 1e-2  # as in trial.py


class NotCompared(Exception):
    """Why eager PyTorch was not run."""


def check_eager(plan: Plan) -> str:
    """Compare the captured program with eager PyTorch; return why that was not done, or nothing.

    Raises:
        ShardingError: A result differs.
    """
    try:
        call = _call_of(plan)
        try:
            inputs = plan.flat_inputs(call.args, call.kwargs)
        except ShardingError as error:
            raise NotCompared(error.what) from error
        # In 64 bits first, where the order of a sum matters least. A function that fails or
        # differs there may name dtypes.
        for wide in (True, False):
            error = _compare(plan, call, inputs, wide)
            if error is None:
                return ""
        raise error
    except NotCompared as reason:
        return str(reason)


def _call_of(plan: Plan) -> PlannedCall:
    """Return the call that a plan was made of. Raise NotCompared if it cannot run again."""
    call, captured = plan.planned_call, plan.captured
    if call is None:
        raise NotCompared("the plan does not have the function that it was made of")
    tensors = [*captured.tensors, *pytree.tree_leaves((call.args, call.kwargs))]
    if any(isinstance(x, FakeTensor) or isinstance(x, Tensor) and x.is_meta for x in tensors):
        raise NotCompared("the arguments or weights have no numbers: they are fake or on meta")
    if call.changes:
        raise NotCompared(f"{call.changes} makes another program of the function")
    if call.modes != PlannedCall.modes_now():
        raise NotCompared("autocast, the default dtype or the grad mode was another in plan()")
    if any(type(x) not in _PLAIN for x in tensors if isinstance(x, Tensor)):
        raise NotCompared("tensors are of classes of their own")
    if captured.writes or captured.observed or captured.state_inputs or captured.opened:
        raise NotCompared("it has other effects than its results, which a second run repeats")
    if any(draws(node.target) for node in captured.graph.nodes):
        raise NotCompared("it draws random numbers, which eager PyTorch draws in another order")
    return call


def _compare(
    plan: Plan, call: PlannedCall, inputs: Sequence[Tensor], wide: bool
) -> ShardingError | None:
    """Return the first difference; None if there is none. Raise NotCompared if no digit counts."""
    captured = plan.captured
    moved, own = ([_copied(x, wide) for x in inputs] for _ in range(2))
    graph = Rewritten(wide, device_of(captured)).graph(captured.graph)
    try:
        with torch.no_grad():
            mine = OneDeviceRun(graph, constants_of(plan, wide)).run(moved)
        eager = _eager(plan, call, own)
    except Exception as error:
        if wide:
            return ShardingError(str(error))
        raise NotCompared(f"it fails: {str(error).partition(chr(10))[0]}") from error
    scale = elements(plan)
    for i, (out, a) in enumerate(zip(captured.outputs, mine)):
        b = eager.get(i)
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            continue
        eps = torch.finfo(b.dtype).eps if b.is_floating_point() or b.is_complex() else 0.0
        if not wide and scale * eps > _COARSE:
            raise NotCompared(f"{b.dtype} leaves fewer than two digits of {scale} elements")
        if a.shape != b.shape or not close(a.to(b.dtype), b, scale * eps).all():
            name = captured.inputs[out.input].name if out.kind != OUTPUT else f"result {i}"
            return not_eager(f"the gradient of '{name}'" if out.kind == GRADIENT else name, a, b)
    return None


def _copied(x: Tensor, wide: bool) -> Tensor:
    """Return a copy with the same strides, of which some may be 0."""
    rows = zip(x.shape, x.stride())
    extent = 1 + sum((n - 1) * t for n, t in rows) if x.numel() else 0
    memory = (
        x.detach()
        .as_strided((extent,), (1,))
        .to(WIDE.get(x.dtype, x.dtype) if wide else x.dtype, copy=True)
    )
    return memory.as_strided(x.shape, x.stride(), 0)


def _eager(plan: Plan, call: PlannedCall, own: list[Tensor]) -> dict[int, Tensor]:
    """Return eager PyTorch's values by the number of the program's output."""
    captured, found = plan.captured, dict[int, Tensor]()
    kinds = [each.kind for each in captured.inputs]
    state = sum(kind not in (ARGUMENT, TANGENT) for kind in kinds)
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    originals = [*captured.module_tensors(), *(leaves[i] for i in slots)]
    with torch.enable_grad():
        # Leaves, as the caller's are: what is changed in place is a copy of the leaf.
        for x, original in zip(own, originals):
            if original.requires_grad:
                x.requires_grad_()
    for slot, x in zip(slots, own[state:]):
        leaves[slot] = x
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    names = [each.name for each in captured.inputs[:state]]
    grads = (
        torch.enable_grad()
        if captured.has_backward
        else torch.set_grad_enabled(bool(call.modes[0]))
    )
    with grads:
        if isinstance(call.fn, nn.Module):
            result = torch.func.functional_call(call.fn, dict(zip(names, own)), args, kwargs)
        else:
            result = call.fn(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        found |= dict(enumerate(outputs))
        found |= dict(_gradients(plan, outputs, own))
    for i, out in enumerate(captured.outputs):
        if out.kind == MUTATION:
            found[i] = own[out.input]
    return {i: x.detach() for i, x in found.items()}


def _gradients(
    plan: Plan, outputs: Sequence[Tensor], own: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the gradients that a module's plan has, by output number."""
    captured = plan.captured
    wanted = [(i, out.input) for i, out in enumerate(captured.outputs) if out.kind == GRADIENT]
    pairs = [
        (outputs[each.output], x) for each, x in zip(captured.inputs, own) if each.kind == TANGENT
    ]
    if wanted and pairs:
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            [own[i] for _, i in wanted],
            [x for _, x in pairs],
            allow_unused=True,
        )
        yield from ((i, g) for (i, _), g in zip(wanted, grads) if g is not None)
