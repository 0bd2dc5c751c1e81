"""A profile of a step has the user's modules, their ranges, and a range for each collective."""

import torch
import torch.distributed as dist
from marked_block import Block
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.profiled_code import common_ranges, ranges_of, with_ranges, within
from torchgspmd.fx_passes.loop_call import loop_calls


class Model(nn.Module):
    def __init__(self, mesh, stacked=False):
        super().__init__()
        self.blocks = nn.Sequential(Block(mesh), Block(mesh))
        if stacked:
            self.blocks = gspmd.stack(self.blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        with torch.profiler.record_function("double"):
            x = x * 2
        return self.head(self.blocks(x)).square().mean()


def program(stacked=False):
    mesh = gspmd.Mesh(data=2, model=2)
    model = Model(mesh, stacked)
    plan = gspmd.plan(model, torch.ones(4, 8), mesh=mesh, in_specs="data _", grad=True)
    return plan.program_graph


def names(graph):
    """Return the ranges of the operations of a graph and of the loops in it, joined."""
    found = {" ".join(ranges_of(n)) for n in graph.nodes if n.op == "call_function"}
    for _, call in loop_calls(graph):
        found |= {name for body in call.bodies for name in names(body.graph)}
    return found


def test_operations_of_both_passes_have_their_module():
    found = names(program())
    for phase in ("forward", "backward"):
        for path in ("blocks.0.up", "blocks.1.down"):
            assert f"{phase} blocks {path.rpartition('.')[0]} {path}" in found
        assert f"{phase} head" in found
    assert "forward double" in found
    assert "forward blocks blocks.1 blocks.1.down all_reduce einsum_default_3, 64 B, model" in found


def test_bodies_of_loops_have_their_module():
    found = names(program(stacked=True))
    assert "forward blocks blocks.block blocks.block.up" in found
    assert "backward blocks blocks.block blocks.block.down" in found


def test_a_compiled_piece_has_the_ranges_of_all_its_operations():
    """A body of a loop, as Inductor compiles it, is in its module; the rest is in its phase."""
    graph = program(stacked=True)
    bodies = [body.graph for _, call in loop_calls(graph) for body in call.bodies]
    found = [" ".join(common_ranges(body)) for body in bodies]
    assert found == ["forward blocks blocks.block", "backward"]  # which adds up gradients, too
    assert common_ranges(graph) == []  # forward and backward
    with torch.profiler.profile() as profile, within(["outer", "inner"]):
        torch.ones(1)
    assert [e.name for e in profile.events()][:2] == ["outer", "inner"]


def test_ranges_are_nested_and_closed():
    depth, deepest, opened = 0, 0, 0
    for node in with_ranges(program()).nodes:
        name = getattr(node.target, "__name__", "")
        depth += (name == "open_range") - (name == "close_range")
        opened += name == "open_range"
        deepest = max(deepest, depth)
        assert depth >= 0
    assert depth == 0 and deepest >= 4 and opened > 10


def test_a_profile_of_a_step_has_them():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = gspmd.Mesh(data=1, model=1)
        for stacked in (False, True):
            torch.manual_seed(0)
            model = gspmd.parallelize(Model(mesh, stacked), mesh, in_specs="data _")
            plain = model(torch.ones(4, 8))
            with torch.profiler.profile() as profile:
                loss = model(torch.ones(4, 8))
                loss.backward()
            events = {event.name for event in profile.events()}
            block = "block" if stacked else "0"
            assert {"forward", "backward", "double", f"blocks.{block}.up", "head"} <= events
            assert loss == plain == model(torch.ones(4, 8))
    finally:
        dist.destroy_process_group()
