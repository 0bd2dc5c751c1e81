"""fold_views: text before, text after, and the same numbers."""

import torch
from expecttest import assert_expected_inline
from fx_passes.graph_parser import local_program
from torch import fx

from torchgspmd.fx_passes.lower.local_rewrites import fold_views
from torchgspmd.fx_passes.printer import program_text


def folded(text: str) -> str:
    """Run the pass; the program computes what it did before."""
    graph = local_program(text)
    shapes = [node.meta["shape"] for node in graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(shape) for shape in shapes]
    want = fx.GraphModule({}, graph)(*inputs)
    got = fx.GraphModule({}, fold_views(graph))(*inputs)
    assert all(map(torch.equal, got, want))
    return program_text(graph)


def test_a_view_of_a_view() -> None:
    """%a is used by %b alone, and goes; %c is %b again."""
    text = folded("""\
one device
  %x : f32[4, 8] = input
  %a : f32[8, 4] = reshape(%x, [8, 4])
  %b : f32[32]   = reshape(%a, [32])
  %c : f32[32]   = reshape(%x, [32])
  %d : f32[32]   = mul(%b, %c)
  return %d""")
    assert_expected_inline(
        text,
        """\
one device
  %x : f32[4, 8] = input
  %b : f32[32]   = reshape(%x, [32])
  %d : f32[32]   = mul(%b, %b)
  return %d""",
    )


def test_a_view_that_changes_nothing() -> None:
    """%c has the shape of %x. A transposition is no reshape, even if it has the same shape."""
    text = folded("""\
one device
  %x : f32[4, 4] = input
  %a : f32[16]   = reshape(%x, [16])
  %c : f32[4, 4] = reshape(%a, [4, 4])
  %t : f32[4, 4] = transpose(%c, 0, 1)
  %u : f32[4, 4] = transpose(%x, 0, 1)
  %y : f32[4, 4] = add(%t, %u)
  return %y, %c""")
    assert_expected_inline(
        text,
        """\
one device
  %x : f32[4, 4] = input
  %t : f32[4, 4] = transpose(%x, 0, 1)
  %y : f32[4, 4] = add(%t, %t)
  return %y, %x""",
    )


def test_forward_and_backward_share_no_view() -> None:
    """To save the base of a view is enough."""
    graph = local_program("""\
one device
  %x : f32[4, 8] = input
  %a : f32[32]   = reshape(%x, [32])
  %y : f32[32]   = neg(%a)
  %b : f32[32]   = reshape(%x, [32])
  %z : f32[32]   = neg(%b)
  return %y, %z""")
    for node in list(graph.nodes)[3:5]:
        node.meta["backward"] = True
    before = program_text(graph)
    assert program_text(fold_views(graph)) == before


def test_other_operators_are_not_merged() -> None:
    """Equal calls that are no views stay: they are the affair of other passes."""
    text = """\
one device
  %x : f32[4, 8] = input
  %a : f32[4, 8] = neg(%x)
  %b : f32[4, 8] = neg(%x)
  return %a, %b"""
    assert folded(text) == text
