"""Compute a pair of DualPipe as one program: a half's exchanges travel beside the other's products.

before   forward      %x_x = all_to_all(%x, ..); %y = einsum(.., %x_x, %up)   of one microbatch
         backward 1   %g_x = all_to_all(%g, ..); %dy = einsum(.., %g_x, %up)  of another one
after    forward + backward 1 + weights 1
         %g_x = all_to_all(%g, ..); %x_x = all_to_all(%x, ..); %dy = einsum(..); %y = einsum(..)
needs    one device's program, before start_wait
ensures  each half's operations keep their order, so a pair needs at most the memory of its halves
source   DeepSeek-V3 (arXiv 2412.19437, section 3.2.1), which orders a layer's parts by hand.

The halves have no value in common. merge_halves.py orders their operations. A pipeline gets joint
bodies if both halves have exchanges, and if a pair takes at least 1 % less time then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ...comm.kinds import StepKind
from ...compat.operators import draws
from ...fx_passes.loop_call import copy_of, loop_calls
from ...fx_passes.program import Program
from ...fx_passes.schedule.overlap import scheduled_seconds
from .call import StageCall
from .dual_pipe import ROUNDS
from .merge_halves import RULES, MergedHalves
from .parts import BACKWARD, FORWARD, JOINT, WEIGHTS, StageBody, StagePart

GAIN = 0.99  # Join stages if a pair takes at most this share of its time then.


def join_stages(program: Program) -> fx.Graph | None:
    """Add joint bodies to a graph's pipelines, in place, where they are faster."""
    if not program.hardware.beside or "overlap" in program.request.skip_passes:
        return None
    changed = False
    for node, call in loop_calls(program.graph):
        if isinstance(call, StageCall) and call.order.may_join:
            bodies = [_joint(call, ahead, program) for ahead in range(ROUNDS)]
            joined = tuple(body for body in bodies if body is not None)
            if joined:
                order = replace(call.order, joint=True)
                node.target = replace(call, pieces=(*call.pieces, *joined), order=order)
                changed = True
    return program.graph if changed else None


def _joint(call: StageCall, ahead: int, program: Program) -> StageBody | None:
    """Return the body of a round's forward beside the other's backward, if that is faster."""
    back = 1 - ahead
    found = [call.body(FORWARD, ahead), call.body(BACKWARD, back), call.body(WEIGHTS, back)]
    bodies = [body for body in found if body is not None]
    if len(bodies) < 2 or not all(_exchanges(body.graph) for body in bodies[:2]):
        return None
    if sum(any(draws(n.target) for n in body.graph.nodes) for body in bodies) > 1:
        return None  # in another order they would draw other numbers
    before = sum(_seconds(copy_of(body.graph), program) for body in bodies)
    ways = [_joined(call, bodies, program, rule) for rule in RULES]
    seconds = [_seconds(copy_of(body.graph), program) for body in ways]
    best = min(range(len(ways)), key=seconds.__getitem__)
    return ways[best] if seconds[best] <= GAIN * before else None


def _exchanges(graph: fx.Graph) -> bool:
    """Return whether a graph, or a loop in it, has a collective."""
    return any(isinstance(node.target, StepKind) for node in graph.nodes) or any(
        _exchanges(body.graph) for _, call in loop_calls(graph) for body in call.bodies
    )


def _seconds(graph: fx.Graph, program: Program) -> float:
    """Return the seconds of a graph with its loops, once it is scheduled; it changes."""
    inner = sum(
        call.loop.length * _seconds(body.graph, program)
        for _, call in loop_calls(graph)
        for body in call.bodies
    )
    return inner + scheduled_seconds(graph, program)


def _joined(call: StageCall, bodies: Sequence[StageBody], program: Program, rule: str) -> StageBody:
    """Return one body for a forward and, of another microbatch, a backward and its weights."""
    ahead, back, *weights = bodies
    halves = MergedHalves([body.graph for body in bodies], program.mesh, program.hardware, rule)
    first = [*ahead.graph.find_nodes(op="placeholder")]
    halves.add_inputs(first)
    parts = [StagePart(ahead.kind, ahead.round, ahead.inputs, ahead.outputs)]
    own: dict[str, fx.Node] = {}  # values of the backward's microbatch, by name
    for body in (back, *weights):
        nodes = [*body.graph.find_nodes(op="placeholder")]
        # The coordinates are the same for all.
        halves.share(nodes[: -len(body.inputs)], first)
        taken = dict(zip(body.inputs, nodes[-len(body.inputs) :]))
        known = [name for name in taken if name in own]
        halves.share([taken[name] for name in known], [own[name] for name in known])
        new = [name for name in taken if name not in own]
        halves.add_inputs([taken[name] for name in new])
        results: Any = body.graph.output_node().args[0]
        own |= {name: taken[name] for name in new} | dict(zip(body.outputs, results))
        kept = tuple(n for n in body.outputs if body is not back or _is_read(call, n, weights))
        parts.append(StagePart(body.kind, body.round, tuple(new), kept))
    halves.run()
    ended: Any = ahead.graph.output_node().args[0]
    ends = dict(zip(ahead.outputs, ended))
    values = [(own if i else ends)[name] for i, part in enumerate(parts) for name in part.outputs]
    halves.return_values(values)
    inputs = tuple(name for part in parts for name in part.inputs)
    outputs = tuple(name for part in parts for name in part.outputs)
    return StageBody(JOINT, ahead.round, halves.graph, inputs, outputs, tuple(parts))


def _is_read(call: StageCall, name: str, weights: Sequence[StageBody]) -> bool:
    """Return whether anything but the gradients of its weights reads a backward's value."""
    ends = {*call.stacks, *call.totals, *(link.sent for link in call.links)}
    others = (body for body in call.pieces if body not in weights)
    return name in ends or any(name in body.inputs for body in others)
