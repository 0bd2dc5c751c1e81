"""Whether a program's values have the plan's dtypes: trials compute in 64 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ...comm.loop_call import loop_calls
from ...compat.operators import aten
from ...compiler.plan import Plan
from .claimed_layouts import cut
from .devices import At, DeviceError, Devices
from .inputs import Rewritten, device_of
from .trial import constants_of
from .wrong_values import fails, other_dtype


def check_dtypes(plan: Plan, inputs: Sequence[Tensor]) -> None:
    """Raise ShardingError if a value has another dtype than in the plan.

    inputs: a trial's, in the plan's dtypes.
    """
    allowed = {
        node.name: {node.meta["val"].dtype, node.meta.get("computed", node.meta["val"].dtype)}
        for node in plan.sharded.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }

    def claim(path: str, node: fx.Node, shards: list[Tensor], at: At) -> None:
        # A value that the plan lacks has no dtype to compare with.
        known = allowed.get(node.meta["value"], {shards[0].dtype})
        if shards[0].dtype not in known:
            raise other_dtype(node, shards[0].dtype, known)

    shards = [cut(t, spec, plan.mesh) for t, spec in zip(inputs, plan.input_layouts)]
    # Not widened: dtypes are what is checked here.
    graph = Rewritten(False, device_of(plan.captured)).graph(plan.program_graph)
    devices = Devices(constants_of(plan, wide=False), plan.mesh, graph, claim)
    sizes = plan.sizes_of_run([tuple(t.shape) for t in inputs])
    try:
        devices.run_devices(shards, plan.size_inputs(sizes))
    except DeviceError as error:
        raise fails(error.node, error, "the devices", "it") from error
    for graph in programs_of(plan.program_graph):
        for node in graph.nodes:
            _check_rounding(node)


def programs_of(graph: fx.Graph) -> Iterator[fx.Graph]:
    """Yield a program, and the programs in its loops' bodies."""
    yield graph
    for _, call in loop_calls(graph):
        for body in call.bodies:
            yield from programs_of(body.graph)


def _check_rounding(node: fx.Node) -> None:
    """Raise ShardingError if a value is rounded to a narrow dtype and back, which no value says."""
    back, cast = node, aten._to_copy.default
    narrow = back.args[0] if back.target is cast else None
    if not isinstance(narrow, fx.Node) or narrow.target is not cast or "value" in narrow.meta:
        return
    wide, small = back.kwargs.get("dtype"), narrow.kwargs.get("dtype")
    if wide is None or small is None or not (wide.is_floating_point and small.is_floating_point):
        return
    # Only a loss of digits is wrong: a cast to a wider dtype and back changes nothing.
    if torch.finfo(small).eps > torch.finfo(wide).eps:
        raise other_dtype(narrow, small, {wide})
