"""One compiled call of a sharded module: forward and backward of this rank, as autograd runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ..capture import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
)
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck, fits
from ..comm.ring_einsum import ring_einsum_scatter, ring_gather_einsum
from ..compat.operators import c10d
from ..dtensor.storage import (
    cut_padding,
    gradient_like,
    local_of,
    pad_stored,
    slice_global,
    stored_shape,
    strided_like,
    takes_gradient,
    whole_of,
    wrap_local,
)
from ..fx_passes.lower.boxed_codegen import BoxedCodeGen
from ..fx_passes.lower.elide_copies import elide_copies
from ..fx_passes.lower.fold_views import fold_views
from ..fx_passes.lower.gloo_all_to_all import gloo_all_to_all
from ..fx_passes.lower.lower_collectives import lower_collectives
from ..fx_passes.lower.lower_einsum import lower_einsum
from ..fx_passes.lower.nll_backward import nll_backward
from ..fx_passes.lower.reduce_in_bucket import reduce_in_bucket
from ..fx_passes.lower.reuse_buffers import reuse_buffers
from ..fx_passes.lower.split_joint import split_joint
from ..fx_passes.lower.torch_bindings import torch_bindings
from ..fx_passes.lower.verify_in_flight import STARTS, WAIT, verify_in_flight
from ..fx_passes.lower.wire_dtypes import wire_dtypes
from ..plan import Plan
from ..shard_spec import ShardSpec
from .module_proxy import slot_of
from .once import apart, once, saved_for, without_history

_REDUCTIONS = (c10d.all_reduce.default, _IN_PLACE := c10d.all_reduce_.default)
_SENDING = {*STARTS, WAIT, ring_einsum_scatter, ring_gather_einsum}


class JointProgram:
    """One compiled call: forward and backward graph of this rank, and how they are fed."""

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        model: nn.Module,
        tensors: Sequence[Tensor],
        backend: str,
        signature: int,
    ):
        """signature: what ranks compare before every run."""
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
        self.apart, self.parts = self.captured.without_gradient(), self.captured.parts()
        self.tangent_outputs = [i.output for i in self.captured.inputs if i.kind == TANGENT]
        self.mutated = [o.input for o in self.captured.outputs if o.kind == MUTATION]
        self.outputs = self.out_kinds.count(OUTPUT)
        self.by_values = any(n.meta.get("dynamic") for n in plan.sharded.nodes)
        self.takes_numbers = bool(self.captured.numbers())
        self.draws = any(
            torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
            for n in plan.program.graph.nodes
        )
        graph = fold_views(
            lower_einsum(
                lower_collectives(elide_copies(_copy(plan.program.graph)), groups),
                groups.device_type,
            )
        )
        self._inputs(graph, tensors)
        self._outputs(graph)
        forward, backward = split_joint(
            graph,
            len(self.tangent_outputs),
            len(self.gradient_inputs) + self.out_kinds.count(OBSERVED),
        )
        owner = self.captured.constants
        self.agreement: RankCheck
        self.carries = self.settles = False
        if backend == "torch":
            self._before_sending(forward)
        self.forward = _compiled(owner, forward, groups, backend)
        self.backward = _compiled(owner, backward, groups, backend, boxed=True)

    def _inputs(self, graph: fx.Graph, tensors: Sequence[Tensor]) -> None:
        """Behind every input the way from what the caller has to what the program takes."""
        mesh, coordinates = self.groups.mesh, self.groups.coordinates
        given = iter(tensors)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node, inp, spec in zip(placeholders, self.captured.inputs, self.plan.input_layouts):
            plain = inp.kind == ARGUMENT and not isinstance(next(given), DTensor)
            if plain or inp.kind == TANGENT and self.wrapped(inp.output) is None:
                slice_global(graph, node, spec, mesh, coordinates)
            else:
                pad_stored(
                    graph,
                    node,
                    stored_shape(spec, inp.shape, mesh, coordinates),
                    spec.local_shape(inp.shape, mesh),
                )

    def _outputs(self, graph: fx.Graph) -> None:
        """Results and gradients without padding; gradients of parameters with the strides of these,
        as optimizers expect.
        """
        mesh, coordinates = self.groups.mesh, self.groups.coordinates
        node = graph.output_node()
        nodes = self.plan.sharded.output_node().args[0]
        cut = []
        with graph.inserting_before(node):
            for value, spec, source, out in zip(
                node.args[0], self.plan.out_specs, nodes, self.captured.outputs
            ):
                if spec is not None:
                    shape = tuple(source.meta["val"].shape)
                    meta = value.meta
                    value = cut_padding(
                        graph,
                        value,
                        stored_shape(spec, shape, mesh, coordinates),
                        spec.local_shape(shape, mesh),
                    )
                    if out.kind == GRADIENT and self.captured.inputs[out.input].kind == PARAMETER:
                        table, name = self.slots[out.input]
                        value = strided_like(graph, value, table[name])
                    value.meta = value.meta or dict(meta)
                cut.append(value)
        node.args = (tuple(cut),)

    def _before_sending(self, forward: fx.Graph) -> None:
        """Lets the comparison between ranks end before the first collective begins; or carry that
        one, if it ends before the next.
        """
        first, done = [*(n for n in forward.nodes if n.target in _SENDING), None, None][:2]
        if first is None:
            return
        self.settles = True
        self.carries = (
            _is_sum(first)
            and done.args[0] is first
            and fits(
                self.groups,
                first.meta["shape"],
                first.meta["dtype"],
                self.groups.size(first.args[2]),
            )
        )
        with forward.inserting_before(first):
            if not self.carries:
                forward.call_function(self.settle)
                return
            begun = forward.call_function(self.carry, (first.args[0],))
        with forward.inserting_before(done):
            done.replace_all_uses_with(forward.call_function(RankCheck.total, (begun,)))
        forward.erase_node(done)
        forward.erase_node(first)

    def wrapped(self, output: int) -> ShardSpec | None:
        """The layout of an output that is returned as a DTensor; None for a plain one."""
        spec = self.plan.out_specs[output]
        return spec if spec is not None and spec.sharding_axes else None

    def __call__(self, leaves: list, given: tuple[tuple, dict], agreement: RankCheck) -> Any:
        """leaves: those of what is given, (args, kwargs). agreement: whether ranks pass the same;
        it ends before anything else is sent, as late as that.
        """
        state = [table[name] for table, name in self.slots]
        flat = [
            *state,
            *(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            *self.captured.at_places(),
        ]
        if self.mutated:
            self.captured.check_aliases(flat)
        self.agreement = agreement if self.carries else agreement.begin()
        if self.captured.has_backward:
            outs = _Run.apply(self, *without_history(flat, self.apart))
        else:
            outs = self.run_forward(flat)[0]
        return self.captured.result([self._wrap(i, value) for i, value in enumerate(outs)], given)

    def _wrap(self, output: int, value: Tensor) -> Tensor:
        spec = self.wrapped(output)
        if spec is None:
            return value
        shape = tuple(self.plan.sharded.output_node().args[0][output].meta["val"].shape)
        return wrap_local(value, spec, shape, self.groups.mesh, self.groups.device_mesh)

    def observe(self, values: Sequence[Tensor]) -> None:
        """Takes what hooks of gradients keep of them: the last outputs."""
        first = len(self.out_kinds) - len(values)
        self.captured.observe([self._wrap(first + i, value) for i, value in enumerate(values)])

    def settle(self) -> None:
        """The comparison between ranks has ended well."""
        self.agreement.check()

    def carry(self, x: Tensor) -> RankCheck:
        """Begins the comparison between ranks, and the sum of x over them."""
        return self.agreement.begin(x)

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """(outputs, saved values); writes what the program changes in place."""
        if not self.settles:
            self.settle()
        with torch.no_grad():
            results = self.forward(*map(local_of, flat))
            count = self.outputs + len(self.mutated)
            for index, value in zip(self.mutated, results[self.outputs : count]):
                local_of(flat[index]).copy_(value)
        return results[: self.outputs], results[count:]


class _Run(torch.autograd.Function):
    """One node in autograd's graph for the whole program."""

    @staticmethod
    def forward(ctx: Any, program: JointProgram, *flat: Tensor) -> tuple[Tensor, ...]:
        outs, saved = program.run_forward(flat)
        outs = apart(outs, program.tangent_outputs)
        ctx.program, ctx.flat = (
            program,
            [flat[i] if isinstance(flat[i], DTensor) else None for i in program.gradient_inputs],
        )
        if program.by_values:  # autograd saves tensors only
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
        if all(
            grad is None for grad in grads
        ):  # autograd comes here from a node that needs nothing of it
            return (None,) * (1 + ctx.count)
        tangents = [
            torch.zeros(shape, dtype=dtype, device=device)
            if grads[i] is None
            else whole_of(grads[i])
            for i, (shape, dtype, device) in zip(program.tangent_outputs, ctx.shapes)
        ]
        given = {i for i, grad in enumerate(grads) if grad is not None}
        saved = saved_for(ctx, program.parts, given)
        if program.by_values:
            saved = [t if n is None else n for t, n in zip(saved, ctx.numbers)]
        boxed = [*saved, *tangents]
        ctx.maybe_clear_saved_tensors()  # unless the backward is to run again
        del saved, tangents, grads
        with torch.no_grad():
            results = program.backward(boxed)
        gradients = (
            results
            if len(given) == len(program.tangent_outputs)
            else program.captured.flowing(given, results)
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
        return None, *(flat if first_order else once(flat))


def _is_sum(node: fx.Node) -> bool:
    return node.target in _REDUCTIONS and node.args[1] == "sum"


def _copy(graph: fx.Graph) -> fx.Graph:
    """The plan keeps its program as it was printed."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _compiled(
    owner: nn.Module, graph: fx.Graph, groups: ProcessGroups, backend: str, boxed: bool = False
) -> Any:
    """A function that runs the graph; boxed: it takes its inputs in a list, which it empties."""
    verify_in_flight(graph)
    if backend == "inductor":
        for node in graph.nodes:
            if node.target is _IN_PLACE:  # its functionalization does not take that one
                node.target = c10d.all_reduce.default
        compiled = torch.compile(fx.GraphModule(owner, wire_dtypes(gloo_all_to_all(graph, groups))))
        return (lambda inputs: compiled(*inputs)) if boxed else compiled
    graph = wire_dtypes(
        gloo_all_to_all(reduce_in_bucket(reuse_buffers(nll_backward(graph))), groups)
    )
    torch_bindings(graph).lint()
    if boxed:
        graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(owner, graph).forward
