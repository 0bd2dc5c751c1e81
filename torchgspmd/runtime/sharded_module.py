"""parallelize: a module that computes on the devices of a mesh, one process each."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..api import compile_plan
from ..capture import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    Captured,
    Varying,
    capture,
    check_module,
    not_compiled,
    opened,
)
from ..comm.process_groups import ProcessGroups, groups_of
from ..comm.rank_check import RankCheck, check_ranks, gathered, is_room
from ..comm.rank_mismatch import Account, check_alike, raise_difference
from ..comm.ring_einsum import ring_einsum_scatter, ring_gather_einsum
from ..compat.operators import c10d
from ..compat.private_apis import _pytree as pytree
from ..compat.versions import check_parallelize
from ..dtensor.fused_optimizers import install_fused_optimizers
from ..dtensor.install import install_dtensors
from ..dtensor.storage import (
    cut_padding,
    gradient_like,
    local_of,
    pad_stored,
    shard_module,
    slice_global,
    spec_of,
    storable,
    stored_shape,
    strided_like,
    takes_gradient,
    whole_of,
    wrap_local,
)
from ..errors import ShardingError, user_line
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
from ..mesh import Mesh
from ..plan import Plan
from ..prefix_specs import spread_inputs
from ..shard_spec import ShardSpec, SpecLike
from ..xla_backend.batch import place_batch
from ..xla_backend.runtime import is_started
from .module_proxy import ModuleProxy, as_text, leaf_key, mark_on, named_tensors, slot_of
from .module_proxy import shard_updates as mark_updates
from .once import apart, once, saved_for, without_history
from .submodule_calls import stand_alone
from .xla_module import XlaModule

_REDUCTIONS = (c10d.all_reduce.default, _IN_PLACE := c10d.all_reduce_.default)
_SENDING = {*STARTS, WAIT, ring_einsum_scatter, ring_gather_einsum}
_MODES = (
    "torch.is_grad_enabled()",
    "torch.is_autocast_enabled()",
    "torch.get_autocast_dtype()",
    "torch.get_default_dtype()",
)
_CALLS = "calls a module"
BACKENDS = ("torch", "inductor", "xla")


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    backend: str = "torch",
    in_specs: Any = None,
    out_specs: Any = None,
    pin: str = "user",
    strict: bool = False,
    rng: str = "global",
    shard_updates: str | None = None,
    regather: str = "auto",
    skip_passes: Sequence[str] = (),
) -> nn.Module:
    """The model on a mesh: an nn.Module with the same forward, to be called by every process alike.

    Parameters and buffers become DTensors laid out as marked (replicated without a mark) with rank
    0's values; give the returned module's parameters to the optimizer. Plain tensor arguments are
    the global batch, the same on every rank; DTensors are taken as laid out. Results come back
    whole, but for those whose layout out_specs gives: DTensors, of the nearest layout that such
    express (several axes on one dimension only in mesh order, and if they divide it). backend
    "torch" runs the program operation by operation, "inductor" compiles it. Raises ShardingError if
    there is no process group with one process a device, or if ranks differ in their programs or in
    the shapes of arguments. strict=True: what would be listed as replicated_ops is an error.
    rng="global": random numbers are those of one device, drawn by the place of an element; all
    ranks need the same torch.manual_seed. "native": from PyTorch's generator. shard_updates="data":
    every parameter, its gradient and the optimizer's state of it are stored in parts over that axis
    besides its mark (ZeRO; arXiv 2004.13336). regather: whether weights are gathered again for the
    backward: "always", "never" (they are kept), or "auto": if a GPU's memory would not do
    otherwise. skip_passes: those of "bucket", "collective_matmul", "overlap" and "prefetch" that
    are to be left out (README, Overlap); all ranks alike.

    backend "xla" needs no process group: parameters become tensors on XLA, whose own partitioner
    makes the program. pin: what it is told besides the layouts of inputs and results: the marks
    ("user"), every layout that our own partitioner chose ("all"), or nothing ("none"). strict, rng
    and regather are not for it: XLA draws random numbers itself.
    """
    if backend not in BACKENDS:
        raise ShardingError(
            f"there is no backend '{backend}'; there are {', '.join(map(repr, BACKENDS))}",
            where=user_line(),
        )
    check_parallelize()
    ours = {
        "strict": strict,
        "rng": rng != "global",
        "regather": regather != "auto",
        "skip_passes": bool(skip_passes),
    }
    others = ours if backend == "xla" else {"pin": pin != "user"}
    for name in (name for name, is_set in others.items() if is_set):
        raise ShardingError(f"backend '{backend}' has no option {name}", where=user_line())
    if any(isinstance(m, ModuleProxy) for m in model.modules()):
        raise ShardingError(
            "a module is on a mesh already",
            where=user_line(),
            fix="wrap the outermost module, once",
        )
    check_module(model)
    if shard_updates is not None:
        mark_updates(model, mesh, shard_updates)
    if backend == "xla":
        return XlaModule(model, mesh, in_specs, out_specs, pin)
    return ShardedModule(
        model,
        mesh,
        backend,
        in_specs,
        out_specs,
        strict=strict,
        rng=rng,
        regather=regather,
        skip_passes=skip_passes,
    )


def shard_batch(local: Tensor, mesh: Mesh, spec: SpecLike) -> Tensor:
    """This rank's part of a batch, all parts together as one global DTensor; nothing is sent.

    local: the rows that a DistributedSampler gives this rank: of the same shape on every rank. The
    global size of a sharded dimension is the local one times the number of shards. In a process
    that runs on XLA: the batch of this host, whose rows go to its devices; all hosts' together as
    one XLA tensor.
    """
    if is_started():
        return place_batch(local, mesh, spec)
    groups = groups_of(mesh, local.device.type)
    parsed = ShardSpec.parse(spec).check(mesh, local.shape, "the batch")
    shape = tuple(n * mesh.count(axes) for n, axes in zip(local.shape, parsed.dims))
    if storable(parsed, shape, mesh) != parsed.closed():
        raise ShardingError(
            f"'{parsed}' shards one dimension by axes out of mesh order",
            where=user_line(),
            fix="name them in mesh order",
        )
    return wrap_local(local, parsed, shape, mesh, groups.device_mesh)


class ShardedModule(ModuleProxy):
    """What parallelize returns. Names of parameters, buffers and submodules are those of the model.

    plan: the Plan of the latest call (None before the first). planning_seconds: how long making it
    took.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        backend: str,
        in_specs: Any = None,
        out_specs: Any = None,
        hooks: bool = True,
        **options: Any,
    ):
        """hooks: whether those of the model are part of its programs; the hooks of those inside of
        it are.
        """
        install_fused_optimizers()
        install_dtensors()
        tensors = [*model.parameters(), *model.buffers()]
        device = next(
            (t.device.type for t in tensors if not t.is_meta),
            "cuda" if torch.cuda.is_available() else "cpu",
        )
        groups = groups_of(mesh, device)
        shard_module(
            model,
            {
                name: _stored_spec_of(mark_on(t, mesh), tuple(t.shape), mesh)
                for name, t in named_tensors(model)
            },
            mesh,
            groups.device_mesh,
        )
        super().__init__(model)
        self.__dict__.update(
            _mesh=mesh,
            _backend=backend,
            _in_specs=in_specs,
            _out_specs=out_specs,
            _hooks=hooks,
            _options=options,
            _groups=groups,
            plan=None,
            planning_seconds=0.0,
        )
        if hooks:
            stand_alone(
                model,
                lambda submodule: ShardedModule(submodule, mesh, backend, hooks=False, **options),
            )
        self.register_load_state_dict_pre_hook(_distribute_state)

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        if kwargs or not all(isinstance(a, Tensor) and a.layout is torch.strided for a in args):
            args, kwargs = opened((args, kwargs))
            leaves, tree = pytree.tree_flatten((args, kwargs))
        else:
            leaves, tree = list(args), len(args)
        leaf_keys, varying = [*map(_leaf_key, leaves)], None
        if float in map(type, leaves):
            varying = self._varying(tree, leaves, leaf_keys)
        key = (
            tree,
            tuple(leaf_keys),
            self._current(),
            self._modes(),
            self._trainable(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._groups.device_type),
            torch.get_autocast_dtype(self._groups.device_type),
            torch.get_default_dtype(),
        )
        program = self._program(key, lambda: self._compile(args, kwargs, key, varying))
        self.__dict__["plan"] = program.plan
        signature = program.signature ^ _generator_state() if program.draws else program.signature
        if program.takes_numbers:
            signature ^= _hash(str(program.captured.numbers()))
        return program(
            leaves,
            given,
            RankCheck(self._groups, signature, lambda: self._differ(key, varying, program.draws)),
        )

    def _kind(self, name: str, held: Any) -> Any:
        if isinstance(held, DTensor):
            return tuple(held.shape), held.dtype, held.placements
        if isinstance(held, nn.Parameter):
            raise ShardingError(
                f"parameter '{name}' is a plain tensor",
                where=user_line(),
                why="it was put into the model after parallelize",
                fix="change the model before it is wrapped, or put in a DTensor (torch's distribute_tensor)",
            )
        return super()._kind(name, held)

    def _differ(
        self, key: Any, varying: Varying | None, draws: bool = False, made: Captured | None = None
    ) -> NoReturn:
        """What every rank raises when they are about to do different things. made: all of them have
        made a program, this one.
        """
        passed = varying.now if varying else {}
        arguments = [*filter(None, map(_shown, key[1])), *([str(passed)] if passed else [])]
        programs = [program.captured for program in self._programs.get(key, ())] + (
            [made] if made else []
        )
        owners = self._owners()
        model = self._described() + [*zip(_MODES, map(str, key[-len(_MODES) :]))]
        model += [
            pair for captured in programs for pair in captured.described(owners, besides=passed)
        ]
        raise_difference(
            self._groups,
            Account(
                _CALLS, arguments, model, _generator_state() if draws else None, made is not None
            ),
        )

    def _compare(
        self, captured: Captured, tensors: Sequence[Tensor], differ: Callable[[], NoReturn]
    ) -> None:
        """ShardingError on every rank where tensors that are the same everywhere have other values
        on one.
        """
        names = [i.name for i in captured.inputs if i.kind == ARGUMENT]
        first = len(tensors) - len(captured.places)  # of those from attributes
        given = [
            (name, i < first, t)
            for i, (name, t) in enumerate(zip(names, tensors))
            if not isinstance(t, DTensor)
            and (i < first or captured.places[i - first].kind == "tensor")
        ]
        given += [
            (name, False, t)
            for name, t in captured.kept_tensors(self._owners())
            if not isinstance(t, DTensor)
        ]
        check_alike(self._groups, given, differ)

    def _compile(self, args: tuple, kwargs: dict, key: Any, varying: Varying | None) -> _Program:
        start = time.perf_counter()
        passed = varying.now if varying else {}
        call = as_text(
            (key[:2], key[3:], passed)
        )  # without _current, which counts changes of this rank
        check_ranks(
            self._groups, _hash(f"a program for {call}"), lambda: self._differ(key, varying)
        )
        try:
            made, tensors = self._planned(args, kwargs, varying)
        except Exception as error:
            failure = Account(_CALLS, failure=f"{type(error).__name__}: {error}".splitlines()[0])
            check_ranks(self._groups, _hash("no program"), lambda: gathered(self._groups, failure))
            raise
        captured = made.captured

        def differ() -> NoReturn:
            self._differ(key, varying, made=captured)

        looked = [look.described() for look in captured.looks]
        signature = _hash(as_text((call, looked, made.program.code)))
        check_ranks(self._groups, signature, differ)
        self._compare(captured, tensors, differ)
        program = _Program(made, self._groups, self._model, tensors, self._backend, signature)
        self.__dict__["planning_seconds"] = time.perf_counter() - start
        return program

    def _planned(
        self, args: tuple, kwargs: dict, varying: Varying | None
    ) -> tuple[Plan, list[Tensor]]:
        """And the tensors that it takes besides parameters and buffers."""
        without = next(
            (name for name, t in named_tensors(self._model) if t.device.type == "meta"), None
        )
        if without is not None:
            raise ShardingError(
                f"'{without}' is on meta: it has no values",
                where=user_line(),
                fix=f"model.to_empty(device='{self._groups.device_type}'), then initialize it or load its values",
            )
        captured = capture(
            self._model,
            args,
            kwargs,
            self._mesh,
            grad=torch.is_grad_enabled(),
            hooks=self._hooks,
            state=self._state,
            varying=varying,
        )
        state = captured.at_places()
        wanted = [*spread_inputs(self._in_specs, args, kwargs, self._mesh), *(None for _ in state)]
        tensors = [
            *(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)),
            *state,
        ]
        wanted = [
            spec_of(t, self._mesh) if isinstance(t, DTensor) else spec
            for t, spec in zip(tensors, wanted)
        ]
        made = compile_plan(
            captured,
            self._mesh,
            wanted,
            self._out_specs,
            stored={name: _stored_spec(t, self._mesh) for name, t in named_tensors(self._model)},
            plain=[not isinstance(t, DTensor) for t in tensors],
            device=self._groups.device_type,
            **self._options,
        )
        return made, tensors


class _Program:
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
            and is_room(
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
    def forward(ctx: Any, program: _Program, *flat: Tensor) -> tuple[Tensor, ...]:
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
        program: _Program = ctx.program
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


def _stored_spec(tensor: Tensor, mesh: Mesh) -> ShardSpec:
    """How a parameter or buffer is stored; what was put into the model as a plain tensor is the
    same on every rank.
    """
    return (
        spec_of(tensor, mesh) if isinstance(tensor, DTensor) else ShardSpec.replicated(tensor.dim())
    )


def _distribute_state(module: ShardedModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes from whole tensors, the same on every rank, what this rank stores of them; nothing is
    sent.
    """
    for name, tensor in named_tensors(module._model):
        given = state.get(prefix + name)
        if (
            isinstance(tensor, DTensor)
            and isinstance(given, Tensor)
            and not isinstance(given, DTensor)
            and given.shape == tensor.shape
        ):
            state[prefix + name] = distribute_tensor(
                given.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None
            )


def _stored_spec_of(mark: ShardSpec | None, shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    if mark is None:
        return ShardSpec.replicated(len(shape))
    trimmed = ShardSpec(tuple(tuple(a for a in axes if mesh.count((a,)) > 1) for axes in mark.dims))
    return storable(trimmed, shape, mesh)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.placements
    return leaf_key(leaf)


def _shown(key: Any) -> str | None:
    """Of what is known of an argument: the shape of a tensor, or a number or text."""
    if isinstance(key, tuple) and isinstance(key[0], tuple):
        return str(list(key[0]))
    return as_text(key)[:40] if isinstance(key, str) and key != "None" else None


def _generator_state() -> int:
    return zlib.crc32(torch.get_rng_state().numpy())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
