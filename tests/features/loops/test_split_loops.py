"""split_loops: text before, text after, and the same numbers."""

import operator

import torch
from expecttest import assert_expected_inline
from fx_passes.graph_parser import local_program
from torch import fx

from torchgspmd import Mesh
from torchgspmd.features.loops.outline_loops import outline_loops
from torchgspmd.features.loops.split_loops import drop_unused_results, split_loop
from torchgspmd.fx_passes.loop_call import LoopCall, loop_calls
from torchgspmd.fx_passes.printer import program_text

BACKWARD = """\
one device
  %g0  : f32[4, 3]    = input
  %ws  : f32[2, 3, 3] = input
  %xs  : f32[2, 4, 3] = input
  %g   : f32[4, 3]    = loop_carry(%g0, 1x2)
  %w   : f32[3, 3]    = loop_row(%ws, 1x2)
  %x   : f32[4, 3]    = loop_row(%xs, 1x2)
  %wt  : f32[3, 3]    = transpose(%w, 0, 1)
  %g1  : f32[4, 3]    = mm(%g, %wt)
  %xt  : f32[3, 4]    = transpose(%x, 0, 1)
  %dw  : f32[3, 3]    = mm(%xt, %g)
  %db  : f32[3]       = sum(%g, [0])
  %end : f32[4, 3]    = loop_next(%g1, %g1, %g, 1x2)
  %dws : f32[2, 3, 3] = loop_stack(%dw, 1x2)
  %b   : f32[3]       = loop_total(%db, 1x2)
  return %end, %dws, %b"""
INPUTS = torch.randn(4, 3), torch.randn(2, 3, 3), torch.randn(2, 4, 3)


def loop_of() -> tuple[fx.Graph, fx.Node]:
    graph = outline_loops(local_program(BACKWARD), Mesh())
    assert graph is not None
    ((node, _),) = loop_calls(graph)
    return graph, node


def test_gradients_of_weights_get_a_loop_of_their_own() -> None:
    """The first loop stacks %g, which the second one reads; result 1 (%dws) is of the second."""
    graph, node = loop_of()
    want = fx.GraphModule({}, graph)(*INPUTS)
    split_loop(node, {2})
    graph.lint()
    assert_expected_inline(
        program_text(graph),
        """\
one device
  %g0         : f32[4, 3]    = input
  %ws         : f32[2, 3, 3] = input
  %xs         : f32[2, 4, 3] = input
  %loop_1x2_1 :              = loop_1x2([%g0], [%ws], [])
  %getitem_3  : f32[2, 4, 3] = %loop_1x2_1[1]
  %loop_1x2_2 :              = loop_1x2([], [%xs, %getitem_3], [])
  %getitem    : f32[4, 3]    = %loop_1x2_1[0]
  %getitem_1  : f32[2, 3, 3] = %loop_1x2_2[0]
  %getitem_2  : f32[3]       = %loop_1x2_1[2]
  return %getitem, %getitem_1, %getitem_2
body of loop_1x2, x 2
  %g  : f32[4, 3] = input
  %w  : f32[3, 3] = input
  %wt : f32[3, 3] = transpose(%w, 0, 1)
  %g1 : f32[4, 3] = mm(%g, %wt)
  %db : f32[3]    = sum(%g, [0])
  return %g1, %g1, %g, %db
body of loop_1x2, x 2
  %x  : f32[4, 3] = input
  %g  : f32[4, 3] = input
  %xt : f32[3, 4] = transpose(%x, 0, 1)
  %dw : f32[3, 3] = mm(%xt, %g)
  return %dw""",
    )
    assert all(map(torch.equal, fx.GraphModule({}, graph)(*INPUTS), want))


def test_a_loop_whose_results_are_all_of_the_first_stays() -> None:
    graph, node = loop_of()
    before = program_text(graph)
    split_loop(node, {1, 2})
    assert program_text(graph) == before


def test_results_that_nobody_reads_are_dropped() -> None:
    graph, node = loop_of()
    want = fx.GraphModule({}, graph)(*INPUTS)
    output = graph.output_node()
    output.args = ((output.args[0][0], output.args[0][2]),)
    drop_unused_results(graph)
    graph.lint()
    ((node, call),) = loop_calls(graph)
    assert isinstance(call, LoopCall) and (call.stacks, call.rows) == (0, 1)
    assert [u.args[1] for u in node.users if u.target is operator.getitem] == [0, 1]
    end, total = fx.GraphModule({}, graph)(*INPUTS)
    assert torch.equal(end, want[0]) and torch.equal(total, want[2])
