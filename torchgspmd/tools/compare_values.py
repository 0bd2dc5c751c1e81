"""compare: the first value on a mesh that differs from the one-device program's.

    >>> gspmd.compare(model, reference, batch)
    %einsum_1 of module '3' at model.py:11, forward: [3, 2] is 0.1234 on ranks 0, 1, on one device
    0.2345; its values there go up to 1.0. 5 values before it are equal, 17 are not.

The captured program is planned once more, for a one-device mesh, and runs on the reference's
weights. Each node on the mesh that has one of its values is compared as it runs: a device's shard
with the same rows in the one-device value. Padding and values with a pending sum are not compared.
Values inside loops and stages count by their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..capture import BUFFER, GRADIENT, OUTPUT, PARAMETER, Captured
from ..capture.pinned_sizes import cotangents_of
from ..capture.state.dependencies import named_tensors
from ..comm.rank_check import agree, all_gather_rows
from ..compat.private_apis import _pytree as pytree
from ..compiler.api import Plan, compile_plan
from ..compiler.options import Options
from ..dtensor.storage import local_of, whole_of
from ..errors import ShardingError
from ..fx_passes.simulator import Simulator, split_global
from ..layout.layout_rules import bound
from ..layout.mesh import Mesh
from ..runtime.joint_program import JointProgram
from ..runtime.sharded_module import ShardedModule
from .comparison import Check, Comparison, OneDevice, conclusion, denoted, row_of
from .debug import interpret, seen


def compare(
    model: nn.Module | Plan, reference: nn.Module, *batch: object, tolerance: float | None = None
) -> Comparison:
    """Run a model on its mesh and on one device, and find the first value that differs.

    Call it identically on every rank; each also computes the whole model. Forward and backward run
    once, with fixed gradients for the results. Weights, buffers, gradients and random numbers are
    afterwards as before.

    Args:
        model: The module from parallelize, or a Plan, which runs as `Plan.simulate` does.
        reference: The model for one device, with the same weights.
        batch: The arguments; or one tuple with them, or one mapping by name.
        tolerance: How much a value may differ, relative to the largest on one device. None:
            sqrt(epsilon) in its dtype.

    Returns:
        The Comparison, the same on all ranks. It prints the difference, and is true without one.

    Raises:
        ShardingError: The reference lacks a parameter, or has one with another shape.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> planned = plan(model, torch.ones(2, 4), mesh=Mesh(data=2), in_specs="data _", grad=True)
        >>> print(gspmd.compare(planned, model, torch.ones(2, 4)))
        all 9 values of the program are equal
    """
    args, kwargs = _arguments(*batch)
    if not isinstance(model, (Plan, ShardedModule)):
        raise ShardingError.here(
            f"compare gets a {type(model).__name__}",
            fix="pass the module that parallelize returned, or a Plan",
        )
    if isinstance(model, ShardedModule):
        agree(model._groups, "gspmd.compare")
    # Both programs draw the same numbers, and the caller's next ones are not changed.
    random = torch.get_rng_state()
    on_mesh = _Simulated(model) if isinstance(model, Plan) else _OnRanks(model, args, kwargs)
    # Each run gets copies, since forward may change its arguments.
    call = _copies(args), _copies(kwargs)
    inputs = _inputs(on_mesh.captured, reference, *call)
    one, draws = _one_device(on_mesh.captured, on_mesh.mesh, inputs, call)
    torch.set_rng_state(random)
    check = Check(one, on_mesh.mesh, tolerance)
    on_mesh.compare_state(check, reference)
    on_mesh.run(check, inputs, (_copies(args), _copies(kwargs)))
    if not draws:  # eager PyTorch draws other numbers
        # A copy, since forward may update the reference's buffers.
        check.results(deepcopy(reference)(*_copies(args), **_copies(kwargs)))
    torch.set_rng_state(random)
    return conclusion(check, on_mesh.rows(row_of(check)))


def _arguments(*batch: object) -> tuple[tuple, dict]:
    only = batch[0] if len(batch) == 1 else batch
    if isinstance(only, Mapping):
        return (), dict(only)
    return (only if isinstance(only, tuple) else (only,)), {}


def _copies(tree: object) -> Any:
    """Return arguments whose tensors a program may change."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree
    )


def _one_device(
    captured: Captured, mesh: Mesh, inputs: Sequence[Tensor], call: tuple[tuple, dict]
) -> tuple[OneDevice, bool]:
    """Run the captured program on one device; return its values, and whether it draws numbers."""
    # Planned, not eager, so that its nodes have the names that the mesh's program refers to.
    one = Mesh(**dict.fromkeys(mesh.names or ("device",), 1))
    arguments = [i for i in captured.inputs if i.kind not in (PARAMETER, BUFFER)]
    plan = compile_plan(captured, one, [None] * len(arguments), Options())
    values: dict[str, Tensor] = {}

    def keep(n: fx.Node, _: object) -> Callable[[Any], object]:
        # The first node counts: later ones have the value in other layouts.
        name = denoted(n) or ""
        return lambda x: name and isinstance(x[0], Tensor) and values.setdefault(name, x[0])

    sizes = plan.sizes_of_run([t.shape for t in inputs])
    shards = [split_global(t, s, one) for t, s in zip(inputs, plan.input_layouts)]
    with torch.no_grad():
        simulator = seen(Simulator, keep)(plan.program, one)
        results = simulator.run_devices(shards, plan.size_inputs(sizes))
    outputs = [r[0] for r, out in zip(results, captured.outputs) if out.kind == OUTPUT]
    returned: Any = captured.graph.output_node().args[0]
    gradients = {
        node.name: f"the gradient of {captured.inputs[out.input].name}"
        for node, out in zip(returned, captured.outputs)
        if out.kind == GRADIENT and isinstance(node, fx.Node)
    }
    nodes = {node.name: node for node in captured.graph.nodes}
    result = captured.result(outputs, call)
    return OneDevice(nodes, values, gradients, result), plan.draws


def _inputs(captured: Captured, reference: nn.Module, args: tuple, kwargs: dict) -> list[Tensor]:
    state, found = dict(named_tensors(reference)), list[Tensor]()
    for each in captured.inputs:
        if each.kind in (PARAMETER, BUFFER):
            tensor = state.get(each.name)
            if tensor is None or tuple(tensor.shape) != tuple(each.shape):
                raise ShardingError.here(
                    f"the reference has no '{each.name}' of shape {list(each.shape)}",
                    fix="pass the same model, as it was before parallelize: copy.deepcopy(model)",
                )
            found.append(whole_of(tensor).detach().clone())
    leaves = pytree.tree_leaves((args, kwargs))
    found += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found += captured.state_tensors()
    found = [whole_of(tensor) for tensor in found]
    return [*found, *map(_cotangent, cotangents_of(captured, found))]


def _cotangent(like: Tensor) -> Tensor:
    """Return a gradient for a result: that of its sum with irregular weights; 1 for a scalar.

    Equal weights would cancel where a model normalizes.
    """
    count = torch.arange(like.numel(), dtype=torch.float64)
    whole = count.cos().to(like.dtype).to(like.device).view(like.shape)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


class _Simulated:
    """A plan, on all devices in this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.captured, self.mesh = plan, plan.captured, plan.mesh

    def compare_state(self, check: Check, reference: nn.Module) -> None:
        """Compare nothing: a plan has no weights."""

    def run(self, check: Check, inputs: Sequence[Tensor], _: tuple[tuple, dict]) -> None:
        plan = self.plan
        pairs = zip(inputs, plan.input_layouts)
        # NaN in padding: a value that reads it differs.
        shards = [split_global(t, spec, plan.mesh, poison=True) for t, spec in pairs]
        sizes = plan.sizes_of_run([t.shape for t in inputs])

        def look(n: fx.Node, _: object) -> Callable[[Any], object]:
            def see(values: Any) -> None:
                for rank, value in enumerate(values if denoted(n) is not None else ()):
                    check.look(n, value, rank)

            return see

        with torch.no_grad():
            simulator = seen(Simulator, look)(plan.program, plan.mesh)
            simulator.run_devices(shards, plan.size_inputs(sizes))

    def rows(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the findings: here on all devices."""
        return [own]


class _OnRanks:
    """A module from parallelize, on its mesh's processes."""

    def __init__(self, module: ShardedModule, args: tuple, kwargs: dict) -> None:
        self.module, self.groups, self.mesh = module, module._groups, module._mesh
        call = module._call(args, kwargs)
        # Logical names in marks have axes only while their Layout is bound.
        with bound(module._layout):
            plan = module._plan_here(call, lambda: None)
        tensors = module._tensors(call, plan.captured)
        self.captured = plan.captured
        # A program of its own: the module's may be compiled, and then its values are not seen.
        options = replace(module._options, backend="torch")
        self.program = JointProgram(plan, self.groups, module._model, tensors, options, 0)

    def compare_state(self, check: Check, reference: nn.Module) -> None:
        wanted = dict(named_tensors(reference))
        for name, tensor in named_tensors(self.module):
            own, whole = whole_of(tensor.detach()), whole_of(wanted[name].detach())
            begins, rank = [0] * own.dim(), self.groups.rank
            values = {"own": own, "wanted": whole}
            check.add(f"state {name}", name, None, "parameter", rank=rank, begins=begins, **values)

    def run(self, check: Check, _: Sequence[Tensor], passed: tuple[tuple, dict]) -> None:
        """Run forward and backward; weights, buffers and gradients stay as they were."""
        module, program, rank = self.module, self.program, self.groups.rank
        state = [(t, local_of(t).clone()) for _, t in named_tensors(module)]
        gradients = [(p, p.grad) for p in module.parameters()]
        for parameter in module.parameters():
            # The backward would add to old gradients.
            parameter.grad = None
        owner = program.captured.constants
        interpret(program, owner, lambda n, _: partial(check.look, n, rank=rank))
        try:
            call = module._call(*passed)
            leaves = pytree.tree_leaves(module._run(program, call))
            outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [*map(_cotangent, outputs)])
        finally:
            with torch.no_grad():
                for tensor, before in state:
                    local_of(tensor).copy_(before)
            for parameter, before in gradients:
                parameter.grad = before

    def rows(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return all_gather_rows(self.groups, own)
