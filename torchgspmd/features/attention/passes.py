"""Attention's passes, as rows of PIPELINE call them."""

from __future__ import annotations

from torch import fx

from ...fx_passes.program import Program, Request
from . import attention_rings as rings
from .balance_attention import balance
from .op import attention, attention_backward, attention_backward_in_blocks, attention_in_blocks
from .ring_keys import mark_rings

# Direct calls, which skip the overhead of PyTorch's operator registry.
IN_BLOCKS = {
    attention._opoverload: attention_in_blocks,
    attention_backward._opoverload: attention_backward_in_blocks,
}


def balance_attention(program: Program) -> fx.Graph | None:
    """Reorder tokens so that all devices have the same work under a causal mask."""
    request = program.request
    changed = balance(
        program.graph, program.layouts, program.rules, request.constants, _lends(request)
    )
    return program.graph if changed else None


def ring_keys(program: Program) -> fx.Graph | None:
    """Mark attention whose keys travel round a ring."""
    request = program.request
    # With regather="all" memory counts alone, so no ring has to hide its transfers.
    changed = request.regather != "never" and mark_rings(
        program.graph,
        program.mesh,
        request.constants.link_flops_per_byte,
        memory=request.regather == "all",
        lends=_lends(request),
    )
    return program.graph if changed else None


def _lends(request: Request) -> bool:
    """Return whether late devices of a ring may lend queries to early ones."""
    skipped = request.skip_passes & {"balance_attention", "attention_rings"}
    return request.regather != "never" and not skipped


def attention_rings(program: Program) -> fx.Graph:
    """Replace gathers by rings, where `ring_keys` marked attention."""
    return rings.attention_rings(program.graph)


def attention_kernels(program: Program) -> fx.Graph:
    """Call PyTorch's kernels block by block, past its operator registry."""
    for node in program.graph.nodes if program.request.device in ("cpu", "cuda") else ():
        if node.target in IN_BLOCKS and not _has_dropout(node):
            node.target = IN_BLOCKS[node.target]
    return program.graph


def _has_dropout(node: fx.Node) -> bool:
    """Return True if attention is computed tile by tile, which a compiler should not trace."""
    names = [argument.name for argument in node.target._schema.arguments]
    return any(node.args[names.index("seed") :])
