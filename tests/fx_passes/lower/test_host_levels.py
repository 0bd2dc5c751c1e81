"""Text of collectives in two levels; tests/comm/kinds/test_kinds.py compares their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower import lower_collectives as host_pass
from torchgspmd.fx_passes.lower.lower_collectives import host_levels


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
    assert_expected_inline(
        text(16, "all_gather_into_tensor", 4),
        """\
reshape_default = reshape(x, [1, 12])
all_gather_into_tensor_default_1 = all_gather_into_tensor(reshape_default, 2, 1+3)
wait_tensor_default_1 = wait_tensor(all_gather_into_tensor_default_1)
reshape_default_1 = reshape(wait_tensor_default_1, [1, 24])
all_gather_into_tensor_default_2 = all_gather_into_tensor(reshape_default_1, 2, 0+1)
wait_tensor_default_2 = wait_tensor(all_gather_into_tensor_default_2)
reshape_default_2 = reshape(wait_tensor_default_2, [2, 2, -1])
permute_default = permute(reshape_default_2, [1, 0, 2])
contiguous_default = contiguous(permute_default)
reshape_default_3 = reshape(contiguous_default, [16, 3])
clone_default = clone(reshape_default_3)
""",
    )


def test_reduce_scatter() -> None:
    assert_expected_inline(
        text(1, "reduce_scatter_tensor", "sum", 4),
        """\
reshape_default = reshape(x, [2, 2, -1])
permute_default = permute(reshape_default, [1, 0, 2])
contiguous_default = contiguous(permute_default)
reshape_default_1 = reshape(contiguous_default, [2, -1])
reduce_scatter_tensor_default_1 = reduce_scatter_tensor(reshape_default_1, sum, 2, 0+1)
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default_1)
reshape_default_2 = reshape(wait_tensor_default_1, [2, 3])
reduce_scatter_tensor_default_2 = reduce_scatter_tensor(reshape_default_2, sum, 2, 1+3)
wait_tensor_default_2 = wait_tensor(reduce_scatter_tensor_default_2)
reshape_default_3 = reshape(wait_tensor_default_2, [1, 3])
clone_default = clone(reshape_default_3)
""",
    )


def test_all_reduce() -> None:
    assert_expected_inline(
        text(3, "all_reduce_", "sum"),
        """\
reshape_default = reshape(x, [-1])
constant_pad_nd_default = constant_pad_nd(reshape_default, [0, 1])
reshape_default_1 = reshape(constant_pad_nd_default, [2, 5])
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default_1, sum, 2, 0+1)
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default)
all_reduce_default = all_reduce(wait_tensor_default_1, sum, 1+3)
wait_tensor_default_2 = wait_tensor(all_reduce_default)
all_gather_into_tensor_default = all_gather_into_tensor(wait_tensor_default_2, 2, 0+1)
wait_tensor_default_3 = wait_tensor(all_gather_into_tensor_default)
reshape_default_2 = reshape(wait_tensor_default_3, [-1])
slice_tensor = slice(reshape_default_2, 0, 0, 9)
reshape_default_3 = reshape(slice_tensor, [3, 3])
copy__default = copy_(x, reshape_default_3)
reshape_default_4 = reshape(copy__default, [3, 3])
clone_default = clone(reshape_default_4)
""",
    )


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
