"""outline_loops: text before, text after, and the numbers of a loop in Python."""

import torch
from expecttest import assert_expected_inline
from fx_passes.graph_parser import local_program
from torch import fx

from torchgspmd import Mesh
from torchgspmd.features.loops.outline_loops import outline_loops
from torchgspmd.fx_passes.printer import program_text

NO_MESH = Mesh()  # a program without coordinates, which runs as it is


def outlined(text: str, mesh: Mesh = NO_MESH) -> fx.Graph:
    """Run the pass."""
    graph = outline_loops(local_program(text), mesh)
    assert graph is not None
    graph.lint()
    return graph


def test_a_loop_with_a_carry_and_rows() -> None:
    """%k follows from a value of outside alone: once. The body computes %i of the coordinate."""
    graph = outlined(
        """\
one device
  %a  :                = input
  %h0 : f32[4, 3]      = input
  %ws : f32[2, 3, 3]   = input
  %s  : f32[3]         = input
  %h  : f32[4, 3]      = loop_carry(%h0, 1x2)
  %w  : f32[3, 3]      = loop_row(%ws, 1x2)
  %k  : f32[3]         = neg(%s)
  %i  :                = add(%a, 1)
  %p  : f32[4, 3]      = mm(%h, %w)
  %q  : f32[4, 3]      = mul(%p, %i)
  %y  : f32[4, 3]      = mul(%q, %k)
  %e  : f32[4, 3]      = loop_next(%y, %y, %h, 1x2)
  %ys : f32[2, 4, 3]   = loop_stack(%p, 1x2)
  %t  : f32[3, 3]      = loop_total(%w, 1x2)
  return %e, %ys, %t""",
        Mesh(a=1),
    )
    assert_expected_inline(
        program_text(graph),
        """\
one device
  %a         :              = input
  %h0        : f32[4, 3]    = input
  %ws        : f32[2, 3, 3] = input
  %s         : f32[3]       = input
  %k         : f32[3]       = neg(%s)
  %i         :              = add(%a, 1)
  %loop_1x2  :              = loop_1x2([%h0], [%ws], [%k])
  %getitem   : f32[4, 3]    = %loop_1x2[0]
  %getitem_1 : f32[2, 4, 3] = %loop_1x2[1]
  %getitem_2 : f32[3, 3]    = %loop_1x2[2]
  return %getitem, %getitem_1, %getitem_2
body of loop_1x2, x 2
  %a :           = input
  %h : f32[4, 3] = input
  %w : f32[3, 3] = input
  %i :           = add(%a, 1)
  %k : f32[3]    = input
  %p : f32[4, 3] = mm(%h, %w)
  %q : f32[4, 3] = mul(%p, %i)
  %y : f32[4, 3] = mul(%q, %k)
  return %y, %y, %p, %w""",
    )


def test_a_loop_in_a_loop() -> None:
    """The inner body has the row of the outer one as a value of outside."""
    graph = outlined("""\
one device
  %h0 : f32[4]       = input
  %ws : f32[2, 4]    = input
  %us : f32[3, 4]    = input
  %h  : f32[4]       = loop_carry(%h0, 1x2)
  %w  : f32[4]       = loop_row(%ws, 1x2)
  %g  : f32[4]       = loop_carry(%h, 1x2/2x-3)
  %u  : f32[4]       = loop_row(%us, 1x2/2x-3)
  %m  : f32[4]       = mul(%g, %u)
  %n  : f32[4]       = add(%m, %w)
  %o  : f32[4]       = loop_next(%n, %n, %g, 1x2/2x-3)
  %e  : f32[4]       = loop_next(%o, %o, %h, 1x2)
  %s  : f32[3, 4]    = loop_stack(%m, 1x2/2x-3)
  %t  : f32[3, 4]    = loop_total(%s, 1x2)
  return %e, %t""")
    assert_expected_inline(
        program_text(graph),
        """\
one device
  %h0        : f32[4]    = input
  %ws        : f32[2, 4] = input
  %us        : f32[3, 4] = input
  %loop_1x2  :           = loop_1x2([%h0], [%ws], [%us])
  %getitem   : f32[4]    = %loop_1x2[0]
  %getitem_1 : f32[3, 4] = %loop_1x2[1]
  return %getitem, %getitem_1
body of loop_1x2, x 2
  %h         : f32[4]    = input
  %w         : f32[4]    = input
  %us        : f32[3, 4] = input
  %loop_2x_3 :           = loop_2x-3([%h], [%us], [%w])
  %getitem   : f32[4]    = %loop_2x_3[0]
  %getitem_1 : f32[3, 4] = %loop_2x_3[1]
  return %getitem, %getitem, %getitem_1
body of loop_2x-3, x 3
  %g : f32[4] = input
  %u : f32[4] = input
  %w : f32[4] = input
  %m : f32[4] = mul(%g, %u)
  %n : f32[4] = add(%m, %w)
  return %n, %n, %m""",
    )
    h, ws, us = torch.randn(4), torch.randn(2, 4), torch.randn(3, 4)
    end, total = fx.GraphModule({}, graph)(h, ws, us)
    want = torch.zeros(3, 4)
    for w in ws:
        for i in (2, 1, 0):
            want[i] += h * us[i]
            h = h * us[i] + w
    torch.testing.assert_close((end, total), (h, want))


def test_a_program_without_loops() -> None:
    text = "one device\n  %x : f32[4] = input\n  %y : f32[4] = neg(%x)\n  return %y"
    assert outline_loops(local_program(text), NO_MESH) is None
