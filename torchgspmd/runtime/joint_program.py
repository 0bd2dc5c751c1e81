"""JointProgram: one call's compiled forward and backward, for a sharded module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture import ARGUMENT, PARAMETER
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck
from ..comm.rank_failure import BACKWARD, CALL
from ..comm.value_check import ArgumentValues
from ..compiler.options import Options
from ..compiler.plan import Plan
from ..dtensor.storage import wrap_local
from ..fx_passes.lower.insert_rank_check import sending_nodes
from ..fx_passes.pipeline import lower_plan
from ..fx_passes.program import Rank
from .autograd_boundary import PartialBackward
from .compile_graph import compile_graph
from .compiled_program import CompiledProgram
from .step_graphs import CudaGraphs, Halves, StepGraphs, take_draws


class JointProgram(CompiledProgram):
    """This rank's forward and backward graph for one call, with input conversions."""

    pieces: PartialBackward | None  # of the backward, when they are asked for
    sizes: tuple[int, ...] = ()  # the last call's arguments
    # Reads gradients of this rank, in the order of gradient_inputs: a weak reference to a method.
    on_gradients: Callable[[], Callable[[JointProgram, Sequence[Any]], None] | None] | None = None

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        model: nn.Module,
        tensors: Sequence[Tensor],
        options: Options,
        signature: int,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Compile a plan.

        signature: the number that ranks compare before every run. graphs: capture the program.
        """
        backend = options.compiler
        super().__init__(plan.captured, model)
        self.plan, self.groups, self.signature = plan, groups, signature
        self.by_values, self.draws = plan.is_dynamic, plan.draws
        names = [i.name for i in self.captured.inputs if i.kind == ARGUMENT]
        # A DTensor is not compared: ranks hold different shards.
        plain = ["" if isinstance(t, DTensor) else name for name, t in zip(names, tensors)]
        arguments = len(plain) - len(self.captured.state_inputs)
        self.values = ArgumentValues(plain[:arguments], tensors)
        self.takes_numbers = bool(self.captured.numbers())
        parameters = {
            i: table[name]
            for i, ((table, name), inp) in enumerate(zip(self.slots, self.captured.inputs))
            if inp.kind == PARAMETER
        }
        program = lower_plan(
            plan,
            Rank(
                groups,
                backend,
                parameters,
                self.settle,
                self.carry,
                frozenset(options.advanced.carriers),
            ),
            [not isinstance(t, DTensor) for t in tensors],
        )
        owner, targets = self.captured.constants, {n.target for n in program.graph.nodes}
        self.rank_check: RankCheck
        self.checked = False  # whether the ranks have compared a call of this program
        self.carries = self.carry in targets
        self.checks_in_forward = self.carries or self.settle in targets
        draws = [] if graphs is None else take_draws(program.graph)
        self.forward, self.watcher = compile_graph(owner, program.graph, backend), groups.watcher
        self.name = self.watcher.watch(self.forward)
        assert program.backward is not None, "the last pass splits the graph"
        self.backward_graph, self.pieces = program.backward.graph, None
        self.backward_sends = any(sending_nodes(self.backward_graph))
        self.compile = lambda graph: self._watched(compile_graph(owner, graph, backend, boxed=True))
        self.backward = self.compile(self.backward_graph)
        self.is_captured = graphs is not None
        if graphs is not None:
            self._capture_by(graphs, draws)

    def _capture_by(self, graphs: CudaGraphs, draws: list) -> None:
        halves = Halves(
            forward=self.forward,
            backward=self.backward if self.captured.has_backward else None,
            fixed=range(len(self.slots)),
            changed=self.mutated,
            results=self.outputs,
            differentiated=self.tangent_outputs,
            in_parts=bool(self.output_groups),
            draws=draws,
        )
        steps = StepGraphs(graphs, halves, self.groups.device)
        self.forward, self.backward = steps.forward, steps.backward

    def __call__(self, leaves: list, call: tuple[tuple, dict], rank_check: RankCheck) -> Any:
        """Run a call. rank_check: ends before anything else is sent, but as late as possible."""
        self.rank_check = rank_check
        # The phase first: a call that has begun is never in the phase of the one before.
        self.watcher.phase = "forward"
        self.watcher.step += 1
        meets = self.checks_in_forward or rank_check.compares
        self.watcher.begin(self.name, "forward", CALL if meets else "")
        results = super().__call__(leaves, call)
        self.watcher.phase = "forward ended"
        return results

    def _watched(self, function: Callable[[list], object]) -> Callable[[list], Any]:
        """Return a backward whose waits that end say for whom."""
        watcher, call = self.watcher, BACKWARD if self.backward_sends else ""
        name = watcher.watch(function)

        def backward(boxed: list) -> Any:
            watcher.begin(name, "backward", call)
            results = watcher.run(function, boxed)
            watcher.phase = "backward ended"
            return results

        return backward

    def in_pieces(self) -> PartialBackward | None:
        if self.is_captured:  # its graph runs as a whole
            return None
        # Compiled when a schedule first asks: most backwards run in one piece.
        if self.pieces is None:
            inputs = self.captured.inputs
            of_arguments = [
                k for k, i in enumerate(self.gradient_inputs) if inputs[i].kind == ARGUMENT
            ]
            self.pieces = PartialBackward(self.backward_graph, of_arguments, self.compile)
        return self.pieces

    def place(self, tensors: list[Tensor]) -> list[Tensor]:
        """Start the rank check. The program takes the tensors as they are."""
        # Begun early, so that its message is on its way during the forward.
        if not self.carries:
            self.rank_check.begin()
        return tensors

    def sizes_taken(self, flat: Sequence[Tensor]) -> list[int]:
        self.sizes = self.plan.sizes_of_run([t.shape for t in flat])
        return self.plan.size_inputs(self.sizes)

    def wrap(self, output: int, value: Tensor) -> Tensor:
        """Return an output with a layout as a DTensor."""
        spec = self.plan.out_specs[output]
        if spec is None or not spec.sharding_axes:
            return value
        shape = self.plan.result_shape(output, value.shape, self.sizes)
        return wrap_local(value, spec, shape, self.groups.mesh, self.groups.device_mesh)

    def settle(self) -> None:
        self.rank_check.check()

    def carry(self, x: Tensor) -> RankCheck:
        """Start the rank check, and the sum of x over the ranks with it."""
        return self.rank_check.begin(x)

    def run_backward(self, ctx: object, boxed: list, grads: tuple) -> Sequence[Any]:
        """Return the gradients that autograd needs, and let an audit read them."""
        results = super().run_backward(ctx, boxed, grads)
        if self.on_gradients is not None and (read := self.on_gradients()) is not None:
            read(self, results)
        return results

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Return (outputs, saved values); the rank check is finished by then."""
        if self.is_captured or not self.checks_in_forward:
            self.settle()
        return super().run_forward(flat)


# Ranks compare a call:
#     on the CPU    each call, before its program sends anything; the result may travel with a sum
#     on a GPU      the first call of a program so; later ones by messages that nobody waits for
# check="never": the first call of a program alone.
