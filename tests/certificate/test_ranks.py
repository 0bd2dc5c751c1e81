"""Faults of the lowered program of one rank, or of all, are named with the node and the rank."""

import pytest
import torch
from torch import fx

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower.verify_in_flight import STARTS, WAIT
from torchgspmd.tools.certificate import certify, ranks

MESH = Mesh(data=2, model=2)


def starts(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in STARTS]


def another_group(graph: fx.Graph) -> None:
    node = next(n for n in starts(graph) if n.args[-1] == "data+model")
    node.args = (*node.args[:-1], "data")


def exchanged_groups(graph: fx.Graph) -> None:
    """Begin a collective behind the next one, of another group."""
    first, second = starts(graph)[1:3]
    assert first.args[-1] != second.args[-1]
    second.append(first)


def exchanged_operands(graph: fx.Graph) -> None:
    first, second = starts(graph)[3:5]
    second.prepend(first)
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])


def no_wait(graph: fx.Graph) -> None:
    node = [n for n in graph.nodes if n.target is WAIT][-1]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def no_wait_at_all(graph: fx.Graph) -> None:
    node = starts(graph)[-1]
    with graph.inserting_after(node):
        graph.call_function(node.target, node.args)


def written_operand(graph: fx.Graph) -> None:
    node = starts(graph)[0]
    with graph.inserting_after(node):
        graph.call_function(aten.neg_.default, (node.args[0],))


def other_splits(graph: fx.Graph) -> None:
    node = next(n for n in starts(graph) if n.target is c10d.all_to_all_single.default)
    x, received, sent, group = node.args
    node.args = (x, [*reversed(received)], [*reversed(sent)], group)


def left_out(graph: fx.Graph) -> None:
    node = starts(graph)[-1]
    (wait,) = node.users
    wait.replace_all_uses_with(node.args[0])
    graph.erase_node(wait)
    graph.erase_node(node)


def f(x, w, v):
    return x * 2, w + 1, v * 3, (x.sum() * w.sum() * v.sum()).neg()


@pytest.fixture(scope="module")
def right() -> gspmd.Plan:
    x, w, v = torch.ones(4, 6), torch.ones(4, 6), torch.ones(6, 4)
    specs = {"in_specs": ("data _", "model _", "_ data"), "out_specs": ("_ _", "_ _", "_ _", "")}
    return gspmd.plan(f, x, w, v, mesh=MESH, advanced={"skip_passes": ("bucket",)}, **specs)


def test_right_programs_have_no_fault(right):
    certificate = right.verify()
    assert certificate.complete and certificate.ranks == 4


FAULTS = (
    (another_group, range(4), "has .* not .*it is result 3"),
    (exchanged_groups, [1], "comes first here, and '%.*' on rank"),
    (exchanged_operands, [2], "has .* not .*it is result"),
    (no_wait, [3], "reads memory of '%.*', which is in flight"),
    (no_wait_at_all, range(4), "has no wait"),
    (written_operand, [0], "writes to memory of '%.*', which is in flight"),
    (other_splits, [1], "sends . rows to rank ., which expects "),
    (left_out, [2], "waits for ever: rank 0 at"),
)


@pytest.mark.parametrize("fault, on, found", FAULTS)
def test_a_fault_of_a_rank_is_named(fault, on, found, right, monkeypatch):
    lowered = ranks.lowered

    def with_fault(plan, rank, *rest):
        program = lowered(plan, rank, *rest)
        if rank in on:
            fault(program.graph)
            program.graph.lint()
        return program

    monkeypatch.setattr(ranks, "lowered", with_fault)
    with pytest.raises(ShardingError, match=rf"(?s)^'%\S+' of rank \d ({found})"):
        certify(right)
