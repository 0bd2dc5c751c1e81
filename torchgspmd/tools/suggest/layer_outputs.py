"""Marks on layer outputs in a search: one capture notes all outputs, each plan marks some."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ...capture import Captured
from ...compat.private_apis import _pytree as pytree
from ...layout.mark import mark_sharding_op
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .layers import Layers

MARK = mark_sharding_op._opoverload


@contextmanager
def noted(layers: Layers) -> Generator[None]:
    """Capture a mark behind each output in the block: with a glob in place of a mesh."""
    handles = [module.register_forward_hook(_note(glob)) for glob, module in layers.named_parts()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(glob: str) -> Callable[[nn.Module, object, object], Any]:
    """Return a forward hook that marks what annotate would, if all of it has one shape."""

    def hook(module: nn.Module, args: object, output: object) -> Any:
        floats = [x for x in pytree.tree_leaves(output) if _is_float(x)]
        shapes = {tuple(x.shape) for x in floats}
        if len(shapes) != 1 or len(floats[0].shape) < 2:
            return output
        spec = " ".join("?" * len(floats[0].shape))
        return pytree.tree_map(
            lambda x: mark_sharding_op(x, glob, spec) if _is_float(x) else x, output
        )

    return hook


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def output_groups(
    captured: Captured, layers: Layers
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return (shape, globs) for the layers' outputs, and for these and their parts' of that shape.

    captured: with `noted`.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for node in captured.graph.find_nodes(op="call_function", target=MARK):
        shapes.setdefault(node.args[1], set()).add(tuple(node.meta["val"].shape))
    single = {glob: next(iter(each)) for glob, each in shapes.items() if len(each) == 1}
    outer = [glob for glob in layers.globs() if glob in single]
    if not outer:
        return []
    shape = single[outer[0]]
    every = tuple(glob for glob in single if single[glob] == shape)
    whole = tuple(glob for glob in outer if glob in every)
    return [(shape, globs) for globs in dict.fromkeys([whole, every])]


def with_marks(
    captured: Captured, mesh: Mesh, spec_of: Callable[[str, Sequence[int]], ShardSpec | None]
) -> Captured:
    """Return a program that was captured with `noted`, with marks on some outputs.

    spec_of: an output's layout, from its glob and shape; None for no mark.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.target is not MARK:
            new[node] = graph.node_copy(node, new.__getitem__)
            continue
        value, glob, _ = node.args
        spec = spec_of(glob, node.meta["val"].shape)
        new[node] = new[value]
        if spec is not None:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].args = (new[value], str(mesh), str(spec))
    return replace(captured, graph=graph)
