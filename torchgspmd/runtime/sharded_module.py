"""ShardedModule: a module that computes on a mesh, with one process per device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..capture import ARGUMENT, Captured
from ..capture.assumed_sizes import SIDES
from ..capture.state.dependencies import TORCH_MODES, named_tensors
from ..capture.state.value_keys import as_text
from ..comm.hosts import devices_of_a_host
from ..comm.process_groups import groups_of, on_own_card, watched
from ..comm.rank_check import Account, agree, check_alike, check_ranks, raise_difference
from ..comm.rank_failure import CALL
from ..compiler.api import compile_plan
from ..compiler.options import Options
from ..compiler.plan import Plan
from ..compiler.plan_cache.files import Identity, identity_of
from ..compiler.plan_cache.values import Unshareable
from ..dtensor.install import hold
from ..dtensor.parts import bind, is_bound, store_by_parts, store_like
from ..dtensor.storage import distribute_state, placements, shard_module, spec_of, storable_mark
from ..errors import ShardingError
from ..fx_passes.loop_call import with_bodies
from ..fx_passes.pass_runner import dump_level
from ..fx_passes.pipeline import is_default
from ..layout.layout_rules import bound
from ..layout.mark import is_free_state
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .audit import Audit
from .call_comparison import compared, hash_of
from .changing_sizes import free_dims
from .full_state import install_writers
from .joint_program import JointProgram
from .mesh_module import MeshModule, ModuleCall, warn_of_work
from .module_proxy import mark_on
from .shared_plan import compare, shared_plan
from .step_graphs import check_capturable, graphs_for
from .stored_inputs import MarkedInputs, Stored


class ShardedModule(MeshModule):
    """The module that parallelize returns, with the model's names for tensors and submodules."""

    runs_submodules = True

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        in_specs: object,
        out_specs: object,
        options: Options,
        hooks: bool = True,
        part: DeviceMesh | None = None,
    ) -> None:
        """Store the model's tensors as DTensors.

        hooks: whether programs include the model's own hooks; those of submodules they do. part: a
        DeviceMesh with some processes.
        """
        tensors = [*model.parameters(), *model.buffers()]
        device = next(
            (t.device.type for t in tensors if not t.is_meta),
            "cuda" if torch.cuda.is_available() else "cpu",
        )
        graphs = graphs_for(device, options.backend) if options.captures else None
        groups = groups_of(mesh, device, part, options.time_limit)
        if hooks:
            agree(groups, "parallelize")
        hosts = devices_of_a_host(groups)  # Groups know from now on which links they use.
        model = on_own_card(model)
        groups.watcher.run(
            shard_module,
            model,
            {
                name: storable_mark(mark_on(t, mesh), tuple(t.shape), mesh)
                for name, t in named_tensors(model)
            },
            mesh,
            groups.device_mesh,
        )
        super().__init__(
            model,
            mesh,
            device,
            in_specs=in_specs,
            out_specs=out_specs,
            # A graph has fixed sizes.
            options=replace(options, dynamic=False) if options.captures else options,
            hooks=hooks,
            _groups=groups,
            _graphs=graphs,
            _part=part,
            _hosts=hosts if options.hardware is None else 0,
            _marked={},
            _has_warned=False,
            _cast_to=frozenset(),
            _audit=None if (every := options.check.audit) is None else Audit(model, groups, every),
        )
        if hooks:
            groups.wrap = _wrapper(mesh, options, part)
            for module in model.modules():  # behind hooks that rename what is loaded
                module.register_load_state_dict_pre_hook(distribute_state)
            # DTensor's patches hold while a state_dict's tensor lives.
            model.register_state_dict_post_hook(lambda m, state, *_: hold(m, state.values()))
            install_writers(model)

    def _submodule(self, module: nn.Module) -> nn.Module:
        dynamic = self._options.dynamic is not False  # names are those of the whole call
        unaudited = replace(self._options.check, audit=None)
        options = replace(self._options, dynamic=dynamic, timeout=None, check=unaudited)
        with bound(self._layout):
            submodule = ShardedModule(
                module, self._mesh, None, None, options, hooks=False, part=self._part
            )
        submodule.__dict__.update(_layout=self._layout, _audit=self._audit)
        return submodule

    def _read_structure(self) -> None:
        super()._read_structure()
        hold(self, (t for _, t in named_tensors(self._model)))

    def _apply(self, fn: Callable, recurse: bool = True) -> ShardedModule:
        before = _dtypes(self._model.parameters())
        module = super()._apply(fn, recurse)
        self._read_structure()
        if (after := _dtypes(self._model.parameters())) != before:
            self.__dict__["_cast_to"] = after
        return module

    def _call(self, args: tuple, kwargs: dict) -> ModuleCall:
        call = super()._call(args, kwargs)
        if self._marked and (marked := self._marked.get(call.key)) is not None:
            tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
            marked.store(tensors, call.passed, self._mesh, self._groups)
            return super()._call(args, kwargs)
        return call

    def _store_marked(
        self,
        captured: Captured,
        tensors: list[Tensor],
        call: ModuleCall,
        before_talk: Callable[[], None],
    ) -> None:
        """Store the marked tensors that the program changes as DTensors; if any, raise Stored.

        before_talk: runs before the ranks communicate.
        """
        marked = MarkedInputs(captured, tensors, self._mesh)
        if not marked.specs:
            return
        before_talk()

        def raise_on_difference() -> NoReturn:
            self._raise_difference(call, compiled=captured)

        check_ranks(self._groups, hash_of(f"stores {marked.specs}"), raise_on_difference)
        self._check_tensors_alike(captured, tensors, raise_on_difference)
        if marked.store(tensors, call.passed, self._mesh, self._groups):
            self._marked[call.key] = marked
            raise Stored

    def _symbol_dims(self, key: tuple) -> set[tuple[int, int]]:
        program = next(iter(self._programs.get(key, ())), None)
        return set() if program is None else free_dims(program.plan)

    @watched
    def _run(self, program: JointProgram, call: ModuleCall) -> Any:
        self.__dict__["plan"] = program.plan
        rank_check = compared(
            self._groups, program, call, self._options.check.arguments, self._raise_difference
        )
        program.checked = True
        if self._audit is None:
            return program(call.leaves, call.passed, rank_check)
        return self._audit.run(program, call, rank_check)

    def _check_tensors(self) -> None:
        for path, value in self._model.named_parameters():
            if not isinstance(value, DTensor):
                raise ShardingError.here(
                    f"parameter '{path}' is a plain tensor",
                    why="it was put into the model after parallelize",
                    fix="change the model before it is wrapped, or put in a DTensor (torch's "
                    "distribute_tensor); for adapters, use "
                    "torchgspmd.integrations.peft.get_peft_model",
                )

    def _raise_difference(
        self,
        call: ModuleCall,
        state: int | None = None,
        compiled: Captured | None = None,
        numbers: dict | None = None,
    ) -> NoReturn:
        """Raise, on every rank, the ShardingError for ranks about to run different programs.

        state: of the generator, if the program draws. compiled: this rank's program, if all ranks
        have built theirs. numbers: of a call that is over.
        """
        key, numbers = call.key, call.numbers if numbers is None else numbers
        arguments = [*filter(None, map(_argument_text, call.leaf_keys))]
        arguments += [str(numbers)] if numbers else []
        programs = [program.captured for program in self._programs.get(key, ())] + (
            [compiled] if compiled else []
        )
        owners = self._attribute_prefixes()
        model = self._description() + [*zip(TORCH_MODES, map(str, key[-len(TORCH_MODES) :]))]
        model += [
            pair for captured in programs for pair in captured.described(owners, besides=numbers)
        ]
        raise_difference(self._groups, Account(CALL, arguments, model, state, compiled is not None))

    def _check_tensors_alike(
        self, captured: Captured, tensors: Sequence[Tensor], raise_unnamed: Callable[[], NoReturn]
    ) -> None:
        """Raise ShardingError on every rank if a whole tensor differs between ranks."""
        names = [i.name for i in captured.inputs if i.kind == ARGUMENT]
        first = len(tensors) - len(captured.state_inputs)  # index of the first attribute
        whole = [
            (name, i < first, t)
            for i, (name, t) in enumerate(zip(names, tensors))
            if not isinstance(t, DTensor)
            and (i < first or captured.state_inputs[i - first].kind == "tensor")
        ]
        whole += [
            (name, False, t)
            for name, t in captured.kept_tensors(self._attribute_prefixes())
            if not isinstance(t, DTensor)
        ]
        check_alike(self._groups, whole, raise_unnamed)

    @watched
    def _build(self, call: ModuleCall) -> JointProgram:
        """Compile a call's program and check that all ranks compile the same."""
        # Leave out _structure_version, which counts changes of this rank.
        few = sorted(SIDES.get().few)
        text = as_text((call.key[:2], call.key[3:], call.numbers, *([few] if few else [])))
        self._groups.watcher.begin("", "planning", f"the planning of {CALL}")
        check_ranks(
            self._groups, hash_of(f"a program for {text}"), lambda: self._raise_difference(call)
        )
        with self._groups.planning():
            return self._build_planned(call, text)

    def _build_planned(self, call: ModuleCall, text: str) -> JointProgram:
        """Compile a call's program, which all ranks are about to plan."""
        try:
            plan, checksum = shared_plan(
                self._groups,
                self._model,
                self._state,
                self._identity(call, text),
                lambda before_talk: self._plan_here(call, before_talk),
                lambda plan: plan.captured.holds(call.leaves, call.symbolic_shapes),
            )
            tensors = self._tensors(call, plan.captured)
        except Exception as error:
            failure = Account(CALL, failure=f"{type(error).__name__}: {error}".splitlines()[0])
            number = hash_of("no program")
            compare(self._groups, number, number.__int__, lambda: failure.of_all(self._groups))
            raise
        captured = plan.captured
        if self._groups.rank == 0 and not self._has_warned:
            has_warned = warn_of_work(plan, self._in_specs is not None, self._out_specs is not None)
            self.__dict__["_has_warned"] = has_warned

        def raise_on_difference() -> NoReturn:
            self._raise_difference(call, compiled=captured)

        def signature_of(program: str | None = None) -> int:
            # A plan of a text would have to be decoded for its code once more.
            program = program or with_bodies(plan.program.code, plan.program_graph)
            guards = [guard.described() for guard in captured.looks]
            options = self._options
            how = options.check.arguments, options.captures, sorted(options.advanced.carriers)
            return hash_of(as_text((text, guards, program, how)))

        # If one rank has planned for itself, all of them compare what they have planned.
        signature = compare(self._groups, signature_of(checksum), signature_of, raise_on_difference)
        if self._options.check.arguments != "never":
            self._check_tensors_alike(captured, tensors, raise_on_difference)
        if self._graphs is not None:
            check_capturable(plan, self._options.backend)
        # Parameters are stored by parts, and states over further axes, as their first program
        # takes them.
        parameters = captured.module_tensors()
        for tensor, spec in zip(parameters, plan.input_layouts):
            if not isinstance(tensor, DTensor) or is_bound(tensor):
                continue
            if spec.parts:
                store_by_parts(tensor, placements(spec, self._mesh))
            elif is_free_state(tensor) and not {*spec.sharding_axes} <= {
                *spec_of(tensor, self._mesh).sharding_axes
            }:
                store_like(tensor, placements(spec, self._mesh))
        bind(parameters)
        return JointProgram(
            plan,
            self._groups,
            self._model,
            tensors,
            options=self._options,
            signature=signature,
            graphs=self._graphs,
        )

    def _identity(self, call: ModuleCall, text: str) -> Identity | str:
        """Return the key for a call's plan, or why the plan is for this rank alone."""
        if dump_level():
            return "TORCHGSPMD_DUMP prints what passes do"
        if not is_default():
            return "there are passes of with_pass"
        if learnt := self._state.learnt:
            return learnt
        if call.numbers:
            return "it takes numbers that have changed"
        names = "in_specs out_specs device_type hooks hosts"
        options = {name: getattr(self, f"_{name}") for name in names.split()}
        options |= self._options.of_plan()
        options |= {"layout": repr(self._layout), "bound": self._bound()}
        # A program for each outcome of what forward compares: a start meets them in one order.
        options["before"] = len(self._programs.get(call.key, ()))
        try:
            return identity_of(self._model, self._mesh, text, options)
        except Unshareable as error:
            return str(error)

    def _bound(self) -> list[str]:
        """Return the names of the tensors that a program takes as they are stored."""
        return [name for name, t in named_tensors(self._model) if is_bound(t)]

    def _tensors(self, call: ModuleCall, captured: Captured) -> list[Tensor]:
        leaves = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
        return [*leaves, *captured.state_tensors()]

    def _plan_here(self, call: ModuleCall, before_talk: Callable[[], None]) -> Plan:
        """Capture and plan in this process. before_talk: as in shared_plan."""
        for name, tensor in named_tensors(self._model):
            if tensor.device.type == "meta":
                raise ShardingError.here(
                    f"'{name}' is on meta: it has no values",
                    fix=f"call model.to_empty(device='{self._groups.device_type}'), then "
                    "initialize it or load its values",
                )
        try:
            captured, specs = self._capture(call)
        except RuntimeError as error:
            given = _dtypes(leaf for leaf in call.leaves if isinstance(leaf, Tensor))
            if not self._cast_to or not given or given & self._cast_to:
                raise
            to, of = (", ".join(sorted(map(str, each))) for each in (self._cast_to, given))
            raise ShardingError.here(
                f"the model was cast to {to} after parallelize, and its arguments are {of}",
                why=f"forward combines them: {error}".splitlines()[0],
                fix="cast the arguments too; or keep the model as it is, and compute in "
                "bfloat16: parallelize(..., param_dtype=torch.bfloat16)",
            ) from error
        tensors = self._tensors(call, captured)
        self._store_marked(captured, tensors, call, before_talk)
        required = [
            spec_of(t, self._mesh) if isinstance(t, DTensor) else spec
            for t, spec in zip(tensors, specs)
        ]
        return compile_plan(
            captured,
            self._mesh,
            required,
            self._options,
            out_specs=self._out_specs,
            stored={name: _stored_spec(t, self._mesh) for name, t in named_tensors(self._model)},
            bound=frozenset(self._bound()),
            plain=[not isinstance(t, DTensor) for t in tensors],
            device=self._groups.device_type,
            hosts=self._hosts,
            of_module=True,
        )


def _stored_spec(t: Tensor, mesh: Mesh) -> ShardSpec:
    return spec_of(t, mesh) if isinstance(t, DTensor) else ShardSpec.replicated(t.dim())


def _dtypes(tensors: Iterable[Tensor]) -> frozenset[torch.dtype]:
    """Return the floating dtypes among tensors."""
    return frozenset(t.dtype for t in tensors if t.is_floating_point())


def _wrapper(
    mesh: Mesh, options: Options, part: DeviceMesh | None
) -> Callable[[nn.Module], nn.Module]:
    """Return the function that puts an optimizer's update on a mesh; it does not hold the model.

    An update has no batch to divide, and keeps the parameters' own dtype.
    """
    plain = Options(
        backend="inductor" if options.compiler == "inductor" else "torch",
        hardware=options.hardware,
        check=replace(options.check, audit=None),
        advanced=options.advanced,
    )

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = ShardedModule(module, mesh, None, None, plain, hooks=False, part=part)
        wrapped.__dict__["_layout"] = None
        return wrapped

    return wrap


def _argument_text(key: object) -> str | None:
    """Return a tensor's shape, a number or a text from an argument's key, else None."""
    if isinstance(key, tuple) and isinstance(key[0], tuple):
        return str(list(key[0]))
    return as_text(key)[:40] if isinstance(key, str) and key != "None" else None
