"""Sends between pipeline stages, as steps that a plan counts.

before   %s : f32[4@stage, 2, 16] = stage_send(%y, 1, [0, 0], stage, 1f1b 4x8)
after    the same, with meta["step"]: a permute
needs    the graph on the requested mesh
ensures  a sent value's first dimension is the stages, sharded along their axis
"""

from __future__ import annotations

import math

from torch import fx

from ...comm.kinds import permute
from ...errors import ShardingError
from ...layout.mesh import Mesh
from .op import SEND


def stage_sends(graph: fx.Graph, mesh: Mesh) -> fx.Graph | None:
    """Annotate a graph in place and return it; None if it has no pipeline."""
    nodes = graph.find_nodes(op="call_function", target=SEND)
    for node in nodes:
        axis, spec, val = node.args[3], node.meta["spec"], node.meta["val"]
        if spec.dims[0] != (axis,) or spec.pending:
            raise ShardingError(
                f"what a stage of a pipeline along '{axis}' sends is laid out as '{spec}'",
                where=node.meta.get("source"),
                fix=f"mark no weight or value of the blocks along '{axis}'",
            )
        payload = float(math.prod(spec.local_shape(val.shape, mesh)) * val.dtype.itemsize)
        node.meta["step"] = permute.step(mesh, node.args[1:], spec, (axis,), payload)
    return graph if nodes else None
