"""outline_stages: text before, text after. tests/model_api/test_scheduled.py has numbers."""

import pytest
from expecttest import assert_expected_inline
from fx_passes.graph_parser import local_program
from torch import fx

from torchgspmd import Mesh
from torchgspmd.features.loops.outline_loops import outline_loops
from torchgspmd.features.pipelines.call import StageCall
from torchgspmd.features.pipelines.outline_stages import outline_stages
from torchgspmd.fx_passes.loop_call import loop_calls
from torchgspmd.fx_passes.printer import program_text

MESH = Mesh(stage=2)
# Forward: tanh(c w). Loss: the sum of the last stage's. Backward: the gradient that is sent back.
TRAINED = """\
one device
  %stage :              = input
  %w     : f32[3, 3]    = input
  %xs    : f32[2, 4, 3] = input
  %c0    : f32[4, 3]    = input
  %x     : f32[4, 3]    = loop_row(%xs, 1x2)
  %c     : f32[4, 3]    = loop_carry(%c0, 1x2)
  %g     : f32[4, 3]    = loop_carry(%c0, 1x2)
  %i     : f32[4, 3]    = add(%c, %x)
  %m     : f32[4, 3]    = mm(%i, %w)
  %y     : f32[4, 3]    = tanh(%m)
  %h     : f32[4, 3]    = stage_head(%y)
  %l     : f32[]        = sum(%h)
  %d     : f32[4, 3]    = neg(%h)
  %e     : f32[4, 3]    = add(%d, %g)
  %b     : f32[4, 3]    = tanh_backward(%e, %y)
  %t     : f32[3, 3]    = transpose(%w, 0, 1)
  %dx    : f32[4, 3]    = mm(%b, %t)
  %it    : f32[3, 4]    = transpose(%i, 0, 1)
  %dw    : f32[3, 3]    = mm(%it, %b)
  %s     : f32[4, 3]    = stage_send(%y, 1, [0, 0], stage, {schedule} 2x2)
  %r     : f32[4, 3]    = stage_send(%dx, -1, [0, 0], stage, {schedule} 2x2)
  %n     : f32[4, 3]    = loop_next(%s, %s, %c, 1x2)
  %o     : f32[4, 3]    = loop_next(%r, %r, %g, 1x2)
  %loss  : f32[]        = loop_total(%l, 1x2)
  %grad  : f32[3, 3]    = loop_total(%dw, 1x2)
  return %loss, %grad"""


def outlined(schedule: str) -> fx.Graph:
    """Run the pass, on loops that are outlined."""
    graph = outline_loops(local_program(TRAINED.format(schedule=schedule)), MESH)
    assert graph is not None
    graph = outline_stages(graph, MESH)
    assert graph is not None
    graph.lint()
    return graph


def test_pieces_of_a_zero_bubble_schedule() -> None:
    """Gradients of weights are a piece of their own."""
    assert_expected_inline(
        program_text(outlined("zero_bubble")),
        """\
one device
  %stage      :              = input
  %w          : f32[3, 3]    = input
  %xs         : f32[2, 4, 3] = input
  %c0         : f32[4, 3]    = input
  %t          : f32[3, 3]    = transpose(%w, 0, 1)
  %stages_1x2 :              = stages_1x2([%c0, %c0], [%xs], [%w, %t])
  %getitem_2  : f32[]        = %stages_1x2[0]
  %getitem_3  : f32[3, 3]    = %stages_1x2[1]
  return %getitem_2, %getitem_3
forward of stages_1x2, x 2
  %stage :           = input
  %c     : f32[4, 3] = input
  %x     : f32[4, 3] = input
  %w     : f32[3, 3] = input
  %i     : f32[4, 3] = add(%c, %x)
  %m     : f32[4, 3] = mm(%i, %w)
  %y     : f32[4, 3] = tanh(%m)
  return %i, %y
loss of stages_1x2, x 2
  %stage :           = input
  %y     : f32[4, 3] = input
  %l     : f32[]     = sum(%y)
  %d     : f32[4, 3] = neg(%y)
  return %l, %d
backward of stages_1x2, x 2
  %stage :           = input
  %d     : f32[4, 3] = input
  %g     : f32[4, 3] = input
  %y     : f32[4, 3] = input
  %t     : f32[3, 3] = input
  %e     : f32[4, 3] = add(%d, %g)
  %b     : f32[4, 3] = tanh_backward(%e, %y)
  %dx    : f32[4, 3] = mm(%b, %t)
  return %b, %dx
weights of stages_1x2, x 2
  %stage :           = input
  %i     : f32[4, 3] = input
  %b     : f32[4, 3] = input
  %it    : f32[3, 4] = transpose(%i, 0, 1)
  %dw    : f32[3, 3] = mm(%it, %b)
  return %dw""",
    )


def test_links_of_a_pipeline() -> None:
    """Forward to the next stage, backward to the one before."""
    ((_, call),) = loop_calls(outlined("zero_bubble"))
    assert isinstance(call, StageCall)
    assert [(link.kind, link.sent, link.carries) for link in call.links] == [
        ("F", "y", ("c",)),
        ("B", "dx", ("g",)),
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_schedules_have_the_gradients_of_weights_in_the_backward(schedule: str) -> None:
    ((_, call),) = loop_calls(outlined(schedule))
    assert [body.__name__ for body in call.bodies] == ["forward", "loss", "backward"]
    assert len(call.bodies[-1].graph.output_node().args[0]) == 2


def test_a_loop_that_sends_nothing_stays() -> None:
    text = "\n".join(
        line.replace("stage_send(%y, 1, [0, 0], stage, {schedule} 2x2)", "neg(%y)").replace(
            "stage_send(%dx, -1, [0, 0], stage, {schedule} 2x2)", "neg(%dx)"
        )
        for line in TRAINED.splitlines()
    )
    graph = outline_loops(local_program(text), MESH)
    assert graph is not None and outline_stages(graph, MESH) is None
