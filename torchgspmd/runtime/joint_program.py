"""JointProgram: the compiled forward and backward of one call of a sharded module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ..capture import (
    BUFFER,
    GRADIENT,
    MUTATION,
    OUTPUT,
    PARAMETER,
    TANGENT,
)
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck
from ..dtensor.storage import (
    gradient_like,
    local_of,
    takes_gradient,
    whole_of,
    wrap_local,
)
from ..fx_passes.lower.boxed_codegen import BoxedCodeGen
from ..fx_passes.pipeline import lower_plan
from ..fx_passes.program import Rank
from ..plan import Plan
from ..shard_spec import ShardSpec
from .autograd_boundary import (
    detach_aliases,
    detach_inputs,
    forbid_double_backward,
    saved_tensors_for,
)
from .module_proxy import slot_of


class JointProgram:
    """The forward and backward graph of this rank for one call, with conversions of its inputs."""

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        model: nn.Module,
        tensors: Sequence[Tensor],
        backend: str,
        signature: int,
    ) -> None:
        """Compile a plan. signature: the number that ranks compare before every run."""
        self.plan, self.groups, self.captured, self.signature = (
            plan,
            groups,
            plan.captured,
            signature,
        )
        self.slots = [
            slot_of(model, i.name) for i in self.captured.inputs if i.kind in (PARAMETER, BUFFER)
        ]
        self.out_kinds = [o.kind for o in self.captured.outputs]
        self.gradient_inputs = [o.input for o in self.captured.outputs if o.kind == GRADIENT]
        self.inputs_without_gradient = self.captured.without_gradient()
        self.output_groups = self.captured.parts()
        self.tangent_outputs = [i.output for i in self.captured.inputs if i.kind == TANGENT]
        self.mutated = [o.input for o in self.captured.outputs if o.kind == MUTATION]
        self.outputs = self.out_kinds.count(OUTPUT)
        self.by_values = any(n.meta.get("dynamic") for n in plan.sharded.nodes)
        self.takes_numbers = bool(self.captured.numbers())
        self.draws = any(
            torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
            for n in plan.program.graph.nodes
        )
        parameters = {
            i: table[name]
            for i, ((table, name), inp) in enumerate(zip(self.slots, self.captured.inputs))
            if inp.kind == PARAMETER
        }
        program = lower_plan(
            plan,
            Rank(groups, backend, parameters, self.settle, self.carry),
            [not isinstance(t, DTensor) for t in tensors],
        )
        owner, targets = self.captured.constants, {n.target for n in program.graph.nodes}
        self.rank_check: RankCheck
        self.carries = self.carry in targets
        self.checks_in_forward = self.carries or self.settle in targets
        self.forward = _compile_graph(owner, program.graph, backend)
        self.backward = _compile_graph(owner, program.backward.graph, backend, boxed=True)

    def wrapped(self, output: int) -> ShardSpec | None:
        """Return the layout of an output that is returned as a DTensor; None for a plain one."""
        spec = self.plan.out_specs[output]
        return spec if spec is not None and spec.sharding_axes else None

    def __call__(self, leaves: list, call: tuple[tuple, dict], rank_check: RankCheck) -> Any:
        """Run a call (args, kwargs) with these leaves.

        rank_check: ends before anything else is sent, but as late as possible.
        """
        state = [table[name] for table, name in self.slots]
        flat = [
            *state,
            *(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            *self.captured.state_tensors(),
        ]
        if self.mutated:
            self.captured.check_aliases(flat)
        self.rank_check = rank_check if self.carries else rank_check.begin()
        if self.captured.has_backward:
            outs = _Run.apply(self, *detach_inputs(flat, self.inputs_without_gradient))
        else:
            outs = self.run_forward(flat)[0]
        return self.captured.result([self._wrap(i, value) for i, value in enumerate(outs)], call)

    def _wrap(self, output: int, value: Tensor) -> Tensor:
        spec = self.wrapped(output)
        if spec is None:
            return value
        shape = tuple(self.plan.sharded.output_node().args[0][output].meta["val"].shape)
        return wrap_local(value, spec, shape, self.groups.mesh, self.groups.device_mesh)

    def observe(self, values: Sequence[Tensor]) -> None:
        """Pass the last outputs, values that gradient hooks store, to the captured program."""
        first = len(self.out_kinds) - len(values)
        self.captured.observe([self._wrap(first + i, value) for i, value in enumerate(values)])

    def settle(self) -> None:
        """Finish the rank check."""
        self.rank_check.check()

    def carry(self, x: Tensor) -> RankCheck:
        """Start the rank check, and the sum of x over the ranks with it."""
        return self.rank_check.begin(x)

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return (outputs, saved values) and write the mutated inputs."""
        if not self.checks_in_forward:
            self.settle()
        with torch.no_grad():
            results = self.forward(*map(local_of, flat))
            count = self.outputs + len(self.mutated)
            for index, value in zip(self.mutated, results[self.outputs : count]):
                local_of(flat[index]).copy_(value)
        return results[: self.outputs], results[count:]


class _Run(torch.autograd.Function):
    """Autograd node of a whole program."""

    @staticmethod
    def forward(ctx: Any, program: JointProgram, *flat: Tensor) -> tuple[Tensor, ...]:
        outs, saved = program.run_forward(flat)
        outs = detach_aliases(outs, program.tangent_outputs)
        ctx.program, ctx.flat = (
            program,
            [flat[i] if isinstance(flat[i], DTensor) else None for i in program.gradient_inputs],
        )
        if program.by_values:  # Autograd saves tensors only.
            ctx.numbers = [None if isinstance(v, Tensor) else v for v in saved]
            saved = [v if isinstance(v, Tensor) else None for v in saved]
        ctx.save_for_backward(*saved)
        ctx.count = len(flat)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[
                o
                for i, o in enumerate(outs)
                if i not in program.tangent_outputs and isinstance(o, Tensor)
            ]
        )
        ctx.shapes = [
            (outs[i].shape, outs[i].dtype, outs[i].device) for i in program.tangent_outputs
        ]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        program: JointProgram = ctx.program
        # Autograd may reach this node without a gradient of any output.
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.count)
        tangents = [
            torch.zeros(shape, dtype=dtype, device=device)
            if grads[i] is None
            else whole_of(grads[i])
            for i, (shape, dtype, device) in zip(program.tangent_outputs, ctx.shapes)
        ]
        outputs = {i for i, grad in enumerate(grads) if grad is not None}
        saved = saved_tensors_for(ctx, program.output_groups, outputs)
        if program.by_values:
            saved = [t if n is None else n for t, n in zip(saved, ctx.numbers)]
        boxed = [*saved, *tangents]
        ctx.maybe_clear_saved_tensors()  # They stay if the backward runs again.
        del saved, tangents, grads
        with torch.no_grad():
            results = program.backward(boxed)
        gradients = (
            results
            if len(outputs) == len(program.tangent_outputs)
            else program.captured.flowing(outputs, results)
        )
        flat: list[Tensor | None] = [None] * ctx.count
        nodes = ctx.next_functions
        first_order = not torch.is_grad_enabled()
        for index, like, value in zip(program.gradient_inputs, ctx.flat, gradients):
            if like is not None and value is not None:
                value = gradient_like(value, like)
                if first_order and takes_gradient(like, nodes[index][0]):
                    like.grad = value
                    continue
            flat[index] = value
        if program.captured.observed:
            program.observe(results[len(program.gradient_inputs) :])
        return None, *(flat if first_order else forbid_double_backward(flat))


def _compile_graph(owner: nn.Module, graph: fx.Graph, backend: str, boxed: bool = False) -> Any:
    """Return a function that runs the graph. boxed: it takes a list of inputs and empties it."""
    if backend == "inductor":
        compiled = torch.compile(fx.GraphModule(owner, graph))
        return (lambda inputs: compiled(*inputs)) if boxed else compiled
    if boxed:
        graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(owner, graph).forward
