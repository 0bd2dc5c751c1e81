"""Captures for `dynamic=`, with an error that names the sizes which the program fixes.

    plan(lambda x: F.batch_norm(x, mean, var), x, mesh=mesh, dynamic={"x": {1}})
    dimension 1 of 'x' cannot be dynamic
      why   RuntimeError: running_mean should contain n0 elements not 16
      fix   leave dimension 1 of 'x' out of dynamic=, or ...

Operations compare sizes with those of weights, each in its own words. So a program that fails with
dynamic sizes is traced again without one of them, then without all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.fx_nodes import fake_mode, reached
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line, user_line_of
from .argument_sizes import ArgumentSizes
from .captured import TANGENT, UNKNOWN, Captured
from .loop_form import Branching, branch_tests
from .state.object_trees import opened
from .trace import capture, leaf_names

# What PyTorch and models raise about sizes.
_ABOUT_SIZES = RuntimeError, ValueError, TypeError, IndexError, AssertionError


def capture_sized(
    fn: Callable, args: tuple, kwargs: dict, *rest: Any, dynamic: ArgumentSizes, **options: Any
) -> Captured:
    """Run `capture`; an error that only dynamic sizes cause becomes a ShardingError.

    Raises:
        ShardingError: The program needs the number of a dynamic size. Errors that it also has
            without dynamic sizes pass as they are then.
    """

    def capture_with(sizes: ArgumentSizes) -> Captured:
        return capture(fn, args, kwargs, *rest, dynamic=sizes, **options)

    try:
        return capture_with(dynamic)
    except ShardingError:
        raise
    except _ABOUT_SIZES as error:
        if not dynamic.dims:
            raise
        capture_with(ArgumentSizes())  # the program's own error has plain numbers
        raise _pinned_error(error, fn, opened((args, kwargs)), dynamic, capture_with) from error


def _pinned_error(
    error: Exception,
    fn: Callable,
    arguments: tuple[tuple, dict],
    dynamic: ArgumentSizes,
    capture_with: Callable[[ArgumentSizes], Captured],
) -> ShardingError:
    sizes = [*dict.fromkeys(name for name, _ in dynamic.dims.values())]
    pinned = sizes
    for name in sizes if len(sizes) > 1 else ():
        with suppress(*_ABOUT_SIZES):
            capture_with(_without(dynamic, {name}))
            pinned = [name]
            break
    tensors = [
        name
        for name, leaf in zip(leaf_names(fn, *arguments), pytree.tree_leaves(arguments))
        if isinstance(leaf, Tensor)
    ]
    dims = " and ".join(
        f"dimension {dim} of '{tensors[tensor]}'"
        for (tensor, dim), (name, _) in dynamic.dims.items()
        if name in pinned
    )
    # A trace numbers its symbols in the order of the sizes.
    text = re.sub(
        r"\bu(\d+)\b",
        lambda match: dict(enumerate(sizes)).get(int(match[1]), match[0]),
        f"{type(error).__name__}: {error}".partition("\n")[0],
    )
    return ShardingError(
        f"{dims} cannot be dynamic",
        where=user_line_of(error) or user_line(),
        why=f"the program needs its number ({text})",
        fix=f"leave {dims} out of dynamic=, or give the dimension that has to equal it the same "
        "name there; parallelize(dynamic=True) makes a program for each size",
    )


def _without(sizes: ArgumentSizes, names: Collection[str]) -> ArgumentSizes:
    dims = {dim: size for dim, size in sizes.dims.items() if size[0] not in names}
    return replace(sizes, dims=dims)


def cotangents_of(captured: Captured, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a cotangent for each floating output: ones, or zeros if it is not visible.

    tensors: all inputs in a call before the cotangents.
    """
    inputs = [each for each in captured.inputs if each.kind == TANGENT]
    shapes = {each.output: each.shape for each in inputs}
    if any(UNKNOWN in shape for shape in shapes.values()):
        try:
            shapes |= zip(shapes, _shapes(captured, tensors, list(shapes)))
        except Exception as error:  # a rank that lacks values
            raise ShardingError.here(
                "a result has a size that is known only when the program runs, "
                "and so has its gradient",
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
    tests = branch_tests(graph)
    needed = {*reached([graph.output_node(), *tests.values()])}
    for node in reversed(graph.nodes):  # impure ones too, which eliminate_dead_code keeps
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)
    unused = [None] * (len(captured.inputs) - len(tensors))  # cotangents
    values = Branching(fx.GraphModule(captured.constants, graph), tests)
    try:
        # The graph's constants are no fake tensors.
        with fake_mode(allow_non_fake_inputs=True) as mode:
            results = values.run(*map(mode.from_tensor, tensors), *unused)
            shapes = [tuple(map(int, value.shape)) for value in results]
    except Exception:  # an operation needs values: those of a run, whose draws stay to be drawn
        with torch.random.fork_rng(), torch.no_grad():
            shapes = [tuple(value.shape) for value in values.run(*tensors, *unused)]
    yield from shapes
