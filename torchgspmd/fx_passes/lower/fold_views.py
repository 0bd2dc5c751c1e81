"""Remove redundant views from one rank's program.

before   %a = reshape(%x, [8, 4]);  %b = reshape(%a, [32]);  %c = reshape(%x, [32])
after    %b = reshape(%x, [32])
needs    nothing; uses meta["shape"] where it is known
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...compat.fx_nodes import drop_unused
from ...compat.operators import aten

_RESHAPE = aten.reshape.default
_VIEWS = {
    _RESHAPE,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.contiguous.default,
}


def fold_views(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it.

    Forward and backward share no view, since saving its base is enough.
    """
    seen: dict[tuple, fx.Node] = {}
    # list(): views are replaced, but erased only after the loop.
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        source = node.args[0]
        # Only reshapes merge: their result depends on the elements' order alone.
        if node.target is _RESHAPE and source.target is _RESHAPE:
            source = source.args[0]
            node.replace_input_with(node.args[0], source)
        if node.target is _RESHAPE and _keeps_shape(source.meta.get("shape"), list(node.args[1])):
            node.replace_all_uses_with(source)
            continue
        same = seen.setdefault(
            (node.target, repr((node.args, node.kwargs)), node.meta.get("backward", False)), node
        )
        if same is not node:
            node.replace_all_uses_with(same)
    drop_unused(graph)
    return graph


def _keeps_shape(shape: Sequence[object] | None, wanted: list) -> bool:
    return shape is not None and (list(shape) == wanted or len(shape) == 1 and wanted == [-1])
