"""Cotangents for results whose sizes follow from those of a call's arguments.

    y = x @ w       x [u0, 8]       a run with x [5, 8] has a cotangent [5, 4] for y [5, 4]

The forward runs on tensors without values. A value-dependent size cannot be found this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ..compat.fake_mode import fake_mode
from ..errors import ShardingError, user_line
from .captured import TANGENT, UNKNOWN, Captured


def cotangents_of(captured: Captured, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a cotangent for each floating output: ones, or zeros if it is not visible.

    tensors: all inputs in a call before the cotangents.
    """
    inputs = [each for each in captured.inputs if each.kind == TANGENT]
    shapes = {each.output: each.shape for each in inputs}
    if any(UNKNOWN in shape for shape in shapes.values()):
        try:
            shapes |= zip(shapes, _shapes(captured, tensors, list(shapes)))
        except Exception as error:  # an operation needs values
            raise ShardingError(
                "a result has a size that is known only when the program runs, "
                "and so has its gradient",
                where=user_line(),
                why="the devices are simulated forward and backward at once",
                fix="return a sum of it, or a loss",
            ) from error
    summed = captured.visible()
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return [
        (torch.ones if i.output in summed else torch.zeros)(
            shapes[i.output], dtype=i.dtype, device=device
        )
        for i in inputs
    ]


def _shapes(
    captured: Captured, tensors: Sequence[Tensor], outputs: list[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that outputs have for these inputs."""
    results = [captured.graph.output_node().args[0][i] for i in outputs]
    # Only the asked outputs run, so others may still depend on values.
    graph, new = fx.Graph(), {}
    graph.graph_copy(captured.graph, new)
    graph.output(tuple(new[result] for result in results))
    graph.eliminate_dead_code()
    # The graph's constants are no fake tensors.
    with fake_mode(allow_non_fake_inputs=True) as mode:
        fakes = map(mode.from_tensor, tensors)
        unused = len(captured.inputs) - len(tensors)  # cotangents
        values = fx.Interpreter(fx.GraphModule(captured.constants, graph))
        for value in values.run(*fakes, *[None] * unused):
            yield tuple(value.shape)
