"""Between CPU processes: the same numbers by other collectives, none of which gloo has trouble
with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, fx

from torchgspmd.comm import gloo_rewriter
from torchgspmd.comm.gloo_rewriter import PIECES, GlooLimits
from torchgspmd.compat.operators import aten, c10d
from torchgspmd.fx_passes.lower import lower_collectives as gloo_pass
from torchgspmd.fx_passes.lower.lower_collectives import gloo_all_to_all, wire_dtypes
from torchgspmd.fx_passes.lower.verify_in_flight import verify_in_flight

KNOWN = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
TYPES = [*sorted(KNOWN, key=str), torch.int16, torch.complex64, torch.complex128]
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


@dataclass(frozen=True)
class Ranks:
    """What the passes ask of Groups, on one rank."""

    count: int
    me: int
    is_gloo: bool = True
    hosts: list[str] | None = None

    def ranks(self, name: str) -> list[int]:
        return [*range(self.count)]

    def size(self, name: str) -> int:
        return self.count

    def position(self, name: str) -> int:
        return self.me


def program(op: str, dtype: torch.dtype, ranks: int, reduction: str = "sum") -> fx.Graph:
    """One collective on four rows a rank, of a reduce_scatter one row for each, and what is done
    with its result.
    """
    graph = fx.Graph()
    x = graph.call_function(aten.clone.default, (graph.placeholder("x"),))
    args = {"all_gather_into_tensor": (ranks,), "reduce_scatter_tensor": (reduction, ranks)}.get(
        op, (reduction,)
    )
    begun = graph.call_function(getattr(c10d, op).default, (x, *args, "0"))
    rows = {"all_gather_into_tensor": 4 * ranks, "reduce_scatter_tensor": 1}.get(op, 4)
    begun.meta = {"shape": [rows, 3], "dtype": dtype}
    graph.output(
        graph.call_function(
            aten.clone.default, (graph.call_function(c10d.wait_tensor.default, (begun,)),)
        )
    )
    return graph


class Rank(fx.Interpreter):
    """One of several in lockstep, as threads."""

    def __init__(self, graph: fx.Graph, me: int, all: list[Tensor], barrier: threading.Barrier):
        super().__init__(fx.GraphModule({}, graph))
        self.me, self.all, self.barrier = me, all, barrier
        self.sent: list[torch.dtype] = []

    def call_function(self, target, args, kwargs):
        kind = getattr(target, "namespace", None) == "_c10d_functional" and target._opname
        if not kind:
            return super().call_function(target, args, kwargs)
        if kind == "wait_tensor":
            return args[0]
        x, *rest, _ = args
        self.sent.append(x.dtype)
        assert x.is_contiguous()
        self.all[self.me] = x.clone()
        self.barrier.wait()
        everyone = [t.clone() for t in self.all]
        self.barrier.wait()
        if kind == "all_to_all_single":
            receives, sends = rest
            assert sum(sends) == len(x)
            return (
                torch.cat([t.split(sends)[self.me] for t in everyone]).clone()
                if len(set(sends)) == 1 and sends[0]
                else everyone[1 - self.me]
            )
        if kind == "all_gather_into_tensor":
            return torch.cat(everyone)
        total = everyone[0]
        for other in everyone[1:]:
            total = OPS[rest[0]](total, other)
        return (
            total[self.me : self.me + 1]
            if kind == "reduce_scatter_tensor"
            else x.copy_(total)
            if kind == "all_reduce_"
            else total
        )


def run(graphs: list[fx.Graph], inputs: list[Tensor]) -> tuple[list[Tensor], set[torch.dtype]]:
    """Every rank's result, and what was sent."""
    ranks, barrier, shared = len(graphs), threading.Barrier(len(graphs), timeout=20), list(inputs)
    workers, results = [Rank(g, me, shared, barrier) for me, g in enumerate(graphs)], [None] * ranks

    def work(me: int) -> None:
        results[me] = workers[me].run(inputs[me])

    threads = [threading.Thread(target=work, args=(me,)) for me in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, {dtype for w in workers for dtype in w.sent}


@pytest.mark.parametrize("few, many", [(0, 2**20), (2**20, 2**20), (0, 0), (2**20, 0)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "op", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_reduce_"]
)
def test_the_same_numbers(
    op: str, dtype: torch.dtype, ranks: int, few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_pass, "WITHIN", GlooLimits(few, many))
    torch.manual_seed(0)
    reductions = (
        ["sum", "product"]
        if dtype.is_complex
        else ["max", "min"]
        if dtype == torch.bool
        else list(OPS)
    )
    for reduction in reductions if "gather" not in op else ["sum"]:
        rows = ranks if op == "reduce_scatter_tensor" else 4
        x = [
            torch.randint(-3, 4, (rows, 3)).to(dtype) * (1 + 1j if dtype.is_complex else True)
            for _ in range(ranks)
        ]
        want, _ = run([program(op, dtype, ranks, reduction) for _ in x], x)
        graphs = [
            wire_dtypes(gloo_all_to_all(program(op, dtype, ranks, reduction), Ranks(ranks, me)))
            for me in range(ranks)
        ]
        got, sent = run([verify_in_flight(g) for g in graphs], x)
        assert all(
            torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(got, want, strict=True)
        ), reduction
        targets = {n.target for g in graphs for n in g.nodes}
        assert (
            c10d.all_gather_into_tensor.default not in targets
            and c10d.reduce_scatter_tensor.default not in targets
        )
        assert sent <= KNOWN


@pytest.mark.parametrize(
    "dtype, keeps", [(torch.float32, True), (torch.complex64, True), (torch.int16, False)], ids=str
)
def test_other_devices_keep_their_collectives(dtype: torch.dtype, keeps: bool) -> None:
    for op in ("reduce_scatter_tensor", "all_reduce", "all_reduce_"):
        graph = gloo_all_to_all(program(op, dtype, 4), Ranks(4, 0, is_gloo=False))
        found = graph.find_nodes(op="call_function", target=getattr(c10d, op).default)
        assert bool(found) == keeps
        for node in wire_dtypes(graph).find_nodes(
            op="call_function", target=getattr(c10d, op).default
        ):
            real = node.args[0].target is aten.view_as_real.default
            assert real == dtype.is_complex, "NCCL has no complex numbers"


def test_between_hosts_a_large_exchange_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_pass, "ACROSS", GlooLimits(few=0, many=40))
    for op, ranks, count in (
        ("all_gather_into_tensor", 2, PIECES),  # 48 bytes a rank
        ("all_gather_into_tensor", 4, PIECES),
        ("reduce_scatter_tensor", 2, 1),  # 12 bytes
    ):
        for hosts in (["a"] * ranks, ["a", *"b" * (ranks - 1)]):
            graph = program(op, torch.float32, ranks)
            gloo_all_to_all(graph, Ranks(ranks, 1, hosts=hosts))
            messages = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
            assert len(messages) == (count if "b" in hosts else 1)


def test_a_piece_has_at_most_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_pass, "ACROSS", GlooLimits(few=0, many=40))
    for piece, most, count in ((48, 64, PIECES), (8, 64, 6), (4, 9, 9)):  # of 48 bytes
        monkeypatch.setattr(gloo_rewriter, "PIECE", piece)
        monkeypatch.setattr(gloo_rewriter, "MOST_PIECES", most)
        graph = program("all_gather_into_tensor", torch.float32, 2)
        gloo_all_to_all(graph, Ranks(2, 1, hosts=["a", "b"]))
        messages = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
        assert len(messages) == count


class TestGolden(TestCase):
    maxDiff = None

    def code(self, op: str, ranks: int, dtype: torch.dtype = torch.float32) -> str:
        graph = wire_dtypes(gloo_all_to_all(program(op, dtype, ranks), Ranks(ranks, 1)))
        graph.lint()
        return graph.python_code("self").src.strip()

    def test_all_gather(self):
        self.assertExpectedInline(
            self.code("all_gather_into_tensor", 2),
            """\
def forward(self, x):
    clone_default = torch.ops.aten.clone.default(x);  x = None
    reshape_default = torch.ops.aten.reshape.default(clone_default, [-1])
    all_gather_into_tensor_default = torch.ops._c10d_functional.all_to_all_single.default(reshape_default, [12, 0], [12, 0], '0');  reshape_default = None
    wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default);  all_gather_into_tensor_default = None
    reshape_default_1 = torch.ops.aten.reshape.default(wait_tensor_default, [4, 3]);  wait_tensor_default = None
    cat_default = torch.ops.aten.cat.default([reshape_default_1, clone_default]);  reshape_default_1 = clone_default = None
    clone_default_1 = torch.ops.aten.clone.default(cat_default);  cat_default = None
    return clone_default_1""",
        )

    def test_all_gather_of_many(self):
        self.assertExpectedInline(
            self.code("all_gather_into_tensor", 4),
            """\
def forward(self, x):
    clone_default = torch.ops.aten.clone.default(x);  x = None
    expand_default = torch.ops.aten.expand.default(clone_default, [4, 4, 3]);  clone_default = None
    contiguous_default = torch.ops.aten.contiguous.default(expand_default);  expand_default = None
    all_gather_into_tensor_default = torch.ops._c10d_functional.all_to_all_single.default(contiguous_default, [1, 1, 1, 1], [1, 1, 1, 1], '0');  contiguous_default = None
    wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default);  all_gather_into_tensor_default = None
    reshape_default = torch.ops.aten.reshape.default(wait_tensor_default, [16, 3]);  wait_tensor_default = None
    clone_default_1 = torch.ops.aten.clone.default(reshape_default);  reshape_default = None
    return clone_default_1""",
        )

    def test_reduce_scatter_of_shorts(self):
        self.assertExpectedInline(
            self.code("reduce_scatter_tensor", 4, torch.int16),
            """\
def forward(self, x):
    clone_default = torch.ops.aten.clone.default(x);  x = None
    view_dtype = torch.ops.aten.view.dtype(clone_default, torch.float16);  clone_default = None
    reduce_scatter_tensor_default = torch.ops._c10d_functional.all_to_all_single.default(view_dtype, [1, 1, 1, 1], [1, 1, 1, 1], '0');  view_dtype = None
    wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter_tensor_default);  reduce_scatter_tensor_default = None
    view_dtype_1 = torch.ops.aten.view.dtype(wait_tensor_default, torch.int16);  wait_tensor_default = None
    sum_dim_int_list = torch.ops.aten.sum.dim_IntList(view_dtype_1, [0], True, dtype = torch.int16);  view_dtype_1 = None
    clone_default_1 = torch.ops.aten.clone.default(sum_dim_int_list);  sum_dim_int_list = None
    return clone_default_1""",
        )

    def test_all_reduce(self):
        self.assertExpectedInline(
            self.code("all_reduce_", 2),
            """\
def forward(self, x):
    clone_default = torch.ops.aten.clone.default(x);  x = None
    reshape_default = torch.ops.aten.reshape.default(clone_default, [-1])
    all_reduce__default = torch.ops._c10d_functional.all_to_all_single.default(reshape_default, [12, 0], [12, 0], '0');  reshape_default = None
    wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_reduce__default);  all_reduce__default = None
    reshape_default_1 = torch.ops.aten.reshape.default(wait_tensor_default, [4, 3]);  wait_tensor_default = None
    add__tensor = torch.ops.aten.add_.Tensor(clone_default, reshape_default_1);  clone_default = reshape_default_1 = None
    clone_default_1 = torch.ops.aten.clone.default(add__tensor);  add__tensor = None
    return clone_default_1""",
        )
