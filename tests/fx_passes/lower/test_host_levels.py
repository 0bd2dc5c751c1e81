"""Text of collectives in two levels; tests/comm/kinds/test_kinds.py compares their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower import host_levels as host_pass
from torchgspmd.fx_passes.lower.host_levels import host_levels


@dataclass
class Ranks:
    """Process groups as rank 1 sees them, with four ranks on hosts."""

    hosts: list[str] | None
    is_gloo: bool = True
    created: list[list[int]] = field(default_factory=list)

    def ranks(self, name: str) -> list[int]:
        return [0, 1, 2, 3]

    def size(self, name: str) -> int:
        return 4

    def position(self, name: str) -> int:
        return 1

    def name_of(self, ranks: list[int]) -> str:
        self.created.append(ranks)
        return "+".join(map(str, ranks))


def program(rows: int, op: str, *args: object) -> fx.Graph:
    """Return the program with one collective on f32[4, 3], and the clone of its result."""
    graph = fx.Graph()
    begun = graph.call_function(getattr(c10d, op).default, (graph.placeholder("x"), *args, "all"))
    begun.meta = {"shape": [rows, 3], "dtype": torch.float32}
    arrived = graph.call_function(c10d.wait_tensor.default, (begun,))
    graph.output(graph.call_function(aten.clone.default, (arrived,)))
    return graph


def text(rows: int, op: str, *args: object) -> str:
    graph = host_levels(program(rows, op, *args), Ranks(["a", "a", "b", "b"]))
    graph.lint()
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = f"{node.target._opname}({', '.join(map(str, node.args))})"
            lines.append(f"{node.name} = {name}")
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pass, "LEAST", 0)


def test_all_gather() -> None:
    assert_expected_inline(text(16, "all_gather_into_tensor", 4), """""")


def test_reduce_scatter() -> None:
    assert_expected_inline(text(1, "reduce_scatter_tensor", "sum", 4), """""")


def test_all_reduce() -> None:
    assert_expected_inline(text(3, "all_reduce_", "sum"), """""")


@pytest.mark.parametrize(
    "groups",
    [
        Ranks(None),
        Ranks(["a"] * 4),
        Ranks(["a", "b", "c", "d"]),
        Ranks(["a", "b", "a", "b"]),
        Ranks(["a", "a", "b", "b"], is_gloo=False),
    ],
    ids=["unknown", "one host", "one each", "no neighbours", "NCCL"],
)
def test_one_level_stays(groups: Ranks) -> None:
    graph = host_levels(program(4, "all_reduce_", "sum"), groups)
    assert graph.find_nodes(op="call_function", target=c10d.all_reduce_.default)
    assert not groups.created


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, op, args in (
        (4, "all_reduce_", ("sum",)),
        (1, "reduce_scatter_tensor", ("sum", 4)),
        (4, "all_gather_into_tensor", (4,)),
    ):
        for least, stays in ((48, False), (49, True)):  # bytes of f32[4, 3]
            monkeypatch.setattr(host_pass, "LEAST", least)
            groups = Ranks(["a", "a", "b", "b"])
            host_levels(program(rows, op, *args), groups)
            assert stays == (not groups.created)
