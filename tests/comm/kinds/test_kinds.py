"""Every row of the table of kinds: complete, true on simulated devices, and lowered to the same.

A new kind in comm/kinds is tested by these tests as soon as it has a row.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchgspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.comm import kinds
from torchgspmd.comm.kinds import KINDS, CollectiveKind, Kind, Step, StepKind, registered
from torchgspmd.comm.kinds.all_to_all import ALL_TO_ALL
from torchgspmd.comm.kinds.kind import no_moves
from torchgspmd.comm.local_ops import take_window
from torchgspmd.comm.process_groups import ProcessGroups
from torchgspmd.compat.operators import c10d
from torchgspmd.fx_passes import localize_graph
from torchgspmd.fx_passes.lower import lower_collectives as host_pass
from torchgspmd.fx_passes.lower.lower_collectives import (
    gloo_all_to_all,
    host_levels,
    lower_collectives,
)
from torchgspmd.fx_passes.lower.verify_in_flight import verify_in_flight
from torchgspmd.fx_passes.partition.cost_constants import CostConstants
from torchgspmd.fx_passes.partition.reshard_search import ReshardSearch
from torchgspmd.fx_passes.schedule.bucket import join, start_wait
from torchgspmd.fx_passes.simulator import Simulator, split_global

ROOT = Path(torchgspmd.__file__).parent
MESHES = (Mesh(a=2, b=2), Mesh(b=2, a=3), Mesh(a=1, b=2), Mesh(a=4, b=1))
STEPS = [kind for kind in KINDS.values() if isinstance(kind, StepKind)]
_TYPE = r"f32\[((?:[^\[\]]|\[[^\]]*\])*)\]((?: \w+@[\w+]+)?)"


def defined_outside() -> StepKind:
    """Return the kind that docs/adding_a_collective.md adds."""
    page = (ROOT.parent / "docs" / "adding_a_collective.md").read_text()
    space: dict[str, Any] = {"__name__": "page"}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], space)
    return next(v for v in space.values() if isinstance(v, CollectiveKind) and v.name == "reorder")


# ------------------------------------------------------------------------------------- complete


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_row_is_complete(kind: Kind) -> None:
    assert not kind.missing(), f"{kind} lacks {', '.join(kind.missing())}"
    assert kind.signature.startswith(f"{kind.name}(")
    if isinstance(kind, CollectiveKind):
        assert getattr(CostConstants(), kind.fee) > 0


@pytest.mark.parametrize(
    "name", ["signature", "meaning", "picture", "suffix", "payload", "sent", "simulate", "lower"]
)
def test_what_a_row_lacks_is_named(name: str) -> None:
    full = KINDS["all_gather"]
    empty = CollectiveKind(name="new")
    assert name in empty.missing()
    assert replace(full, **{name: getattr(empty, name)}).missing() == [name]


def test_every_kind_has_a_row() -> None:
    for module in pkgutil.iter_modules(kinds.__path__):
        for value in vars(importlib.import_module(f"{kinds.__name__}.{module.name}")).values():
            if isinstance(value, Kind):
                assert KINDS.get(value.name) is value, f"{module.name}: no row for '{value}'"


def test_names_of_values_tell_the_kinds_apart() -> None:
    suffixes = [kind.suffix for kind in STEPS]
    assert len(set(suffixes)) == len(suffixes)


def test_a_kind_is_registered_for_a_block() -> None:
    kind = replace(KINDS["all_gather"], name="another")
    with registered(kind):
        assert KINDS["another"] is kind
        with pytest.raises(ValueError, match="there is a kind 'another' already"):
            with registered(kind):
                pass
    assert "another" not in KINDS


# What may ask for one kind rather than for what a kind says, and why.
ASKS_FOR_ONE = {
    # it times each by itself, with the arguments of that one; others are sent like one of them
    "tools.calibrate": {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"},
    "fx_passes.partition.reshard": {"term", "window"},  # it makes a value a sum; and windows
    "features.pipelines.__init__": {"permute"},  # what a plan reports of neighboring stages
    # one sum in steps, which are these
    "fx_passes.partition.insert_collectives": {"all_gather", "all_reduce", "reduce_scatter"},
    "fx_passes.partition.reshard_search": {"all_reduce"},  # the path that always exists
    "fx_passes.schedule.collective_matmul": {"einsum_scatter", "gather_einsum"},  # its result
    "features.exchanges.find_chains": {  # those whose parts are sent like the whole
        *("all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"),
    },
    "features.attention.ring_keys": {"reduce_scatter"},  # what becomes of gradients in a ring
    "fx_passes.lower.insert_rank_check": {"all_reduce"},  # a comparison of ranks that is one
    "tools.report.kernels": {"all_to_all"},  # which dispatchers send
    "tools.decoders.run_kernels": {"all_to_all"},  # which no CUDA graph has
    "tools.decoders.run_steps": {"all_gather", "reduce_scatter"},  # weights and gradients, by FSDP
}


def test_nobody_else_knows_a_kind() -> None:
    names = {*KINDS} - {"permute", "term", "window", "shard"}  # words with other meanings
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        # A certificate has a table of its own on purpose: it checks the kinds. The marks by
        # transformers' plans have transformers' words.
        if module.startswith(("comm.kinds", "tools.certificate", "layout.family_marks")):
            continue
        others = {n for n in names if f"features.{KINDS[n].feature}." not in module}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in others:
                pytest.fail(f"{module}:{node.lineno} knows '{node.value}'")
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("comm.kinds"):
                if asked := {alias.name for alias in node.names} & {*KINDS}:
                    found[module] = asked
    assert found == ASKS_FOR_ONE


# ------------------------------------------------------------------------- the example, simulated


@dataclass(frozen=True)
class Example:
    """The signature of a kind, bound to a mesh."""

    kind: StepKind
    shape: tuple[int, ...]
    before: ShardSpec
    args: tuple[Any, ...]
    after: ShardSpec

    @classmethod
    def of(cls, kind: StepKind) -> Example:
        match = re.fullmatch(rf"\w+\({_TYPE}(.*)\) -> {_TYPE}", kind.signature)
        assert match, f"{kind}: '{kind.signature}' is not a signature"
        dims, pending, args, new_dims, new_pending = match.groups()
        return cls(
            kind,
            tuple(int(n) for n in re.findall(r"(?:^|, )(\d+)", re.sub(r"\[.*?\]", "", dims))),
            _spec(dims, pending),
            tuple(int(a) if a.isdigit() else a for a in args.split(", ")[1:]),
            _spec(new_dims, new_pending),
        )

    def price(self, mesh: Mesh) -> Step | None:
        """Return the step with its price, if the search takes such steps."""
        search = ReshardSearch(mesh, self.shape, 4, self.after, CostConstants())
        moves = self.kind.moves(search, self.before, float("inf"))
        return next((m for m in moves if (m.args, m.spec) == (self.args, self.after)), None)

    def graph(self, inputs: int = 1) -> fx.Graph:
        """Return a graph with a step of each of the inputs."""
        graph = fx.Graph()
        axes = tuple(dict.fromkeys(a for s in (self.before, self.after) for a in _axes(s)))
        step = Step(self.kind, self.args, self.after, axes)
        values = [graph.placeholder(f"x{i}") for i in range(inputs)]
        for value in values:
            value.meta = {"val": torch.empty(self.shape), "spec": self.before}
        results = [graph.call_function(self.kind, (v, *self.args)) for v in values]
        for result in results:
            result.meta = {"val": torch.empty(self.shape), "spec": self.after, "step": step}
        graph.output(tuple(results))
        return graph


def _spec(dims: str, pending: str) -> ShardSpec:
    words = [
        (word.partition("@")[2] or "_")
        for word in re.findall(r"\d+(?:@[\w+]+(?:\[[^\]]*\])?)?", dims)
    ]
    return ShardSpec.parse(" ".join(words) + pending)


def _axes(spec: ShardSpec) -> tuple[str, ...]:
    return (*spec.sharding_axes, *spec.pending)


def shards(x: Tensor, spec: ShardSpec, mesh: Mesh) -> list[Tensor]:
    """Return the shards of x; padding is poisoned, and pending terms have the sum x."""
    count = mesh.count(spec.pending)
    terms = [torch.randint(-9, 9, x.shape).to(x.dtype) for _ in range(count - 1)]
    parts = [split_global(t, spec, mesh, poison=True) for t in [*terms, x - sum(terms)]]
    return [parts[mesh.index(spec.pending, mesh.coordinates(r))][r] for r in range(mesh.size)]


def check(results: list[Tensor], x: Tensor, example: Example, mesh: Mesh) -> None:
    """On one device all steps are the identity: the shards are those of x, their terms add up."""
    after = example.after
    expected, inside = (split_global(t, after, mesh) for t in (x, torch.ones_like(x)))
    if after.windows:
        expected = [x] * mesh.size
    for d, window in enumerate(after.windows):
        if window is not None:
            places = [mesh.index(after.dims[d], mesh.coordinates(r)) for r in range(mesh.size)]
            expected = [take_window(t, d, i, str(window)) for t, i in zip(expected, places)]
            inside = [torch.ones_like(t) for t in expected]
    for group in mesh.groups(after.pending):
        total = sum(results[rank] for rank in group)
        assert torch.equal(torch.where(inside[group[0]] > 0, total, 0), expected[group[0]])


def examples() -> list[Any]:
    rows = [*STEPS, defined_outside()]
    return [
        pytest.param(Example.of(kind), mesh, id=f"{kind}-{mesh}")
        for kind in rows
        for mesh in MESHES
        if not Example.of(kind).after.windows or mesh.count("a") == 2
    ]


EXAMPLES = examples()


@pytest.mark.parametrize("example, mesh", EXAMPLES)
def test_the_example_is_true_on_simulated_devices(example: Example, mesh: Mesh) -> None:
    torch.manual_seed(0)
    x = torch.randint(-9, 9, example.shape).float()
    program = fx.GraphModule(nn.Module(), localize_graph(example.graph(), mesh))
    results = Simulator(program, mesh).run_devices([shards(x, example.before, mesh)])
    check(results[0], x, example, mesh)


# -------------------------------------------------------------------------------------- lowered


class Groups(ProcessGroups):
    """The process groups of one of the ranks that are threads here."""

    def __init__(self, mesh: Mesh, rank: int, each: int = 0) -> None:
        self.mesh, self.rank, self.device_type = mesh, rank, "cpu"
        self.hosts = [str(r // each) for r in range(mesh.size)] if each else None
        self.created = []
        self.is_gloo, self.is_fake = True, False
        self.coordinates, self.by_axes = mesh.coordinates(rank), {}

    def _create(self, axes: tuple[str, ...]) -> str:
        return "+".join(axes)

    def _new_group(self, positions: Any, name: str, backend: str | None = None) -> Any:
        return SimpleNamespace(group_name=f"{name} of {[*positions]}")


class Rank(fx.Interpreter):
    """One of several ranks in lockstep, as threads."""

    def __init__(
        self, graph: fx.Graph, groups: Groups, board: list[Any], barrier: threading.Barrier
    ) -> None:
        super().__init__(fx.GraphModule(nn.Module(), graph))
        self.groups, self.board, self.barrier = groups, board, barrier
        self.moved = 0  # elements
        self.met: set[tuple[int, ...]] = set()  # ranks of each group
        self.results: tuple[Tensor, ...] = ()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is c10d.wait_tensor.default:
            return args[0]
        if getattr(target, "namespace", None) != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        x, *rest, name = args
        assert x.is_contiguous()
        ranks, me = self.groups.ranks(name), self.groups.position(name)
        self.met.add(tuple(ranks))
        self.board[self.groups.rank] = x.clone(), rest
        self.barrier.wait()
        others = [self.board[rank] for rank in ranks]
        self.barrier.wait()
        if target is c10d.all_to_all_single.default:
            receives, sends = rest
            arrived = [t.split(s[1])[me] for t, s in others]
            assert [len(t) for t in arrived] == receives
            row = x[0].numel() if len(x) and x.dim() > 1 else 1
            self.moved += row * max(
                sum(n for i, n in enumerate(side) if i != me) for side in (sends, receives)
            )
            return torch.cat(arrived)
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat([t for t, _ in others])
        total = sum(t for t, _ in others)
        if target is c10d.reduce_scatter_tensor.default:
            return total[me : me + 1]
        return x.copy_(total) if target is c10d.all_reduce_.default else total


def run_ranks(local: fx.Graph, mesh: Mesh, inputs: list[list[Tensor]], each: int = 0) -> list[Rank]:
    """Run the program of each rank, as threads. each: ranks of a host, if there are several."""
    board: list[Any] = [None] * mesh.size
    barrier = threading.Barrier(mesh.size, timeout=30)
    ranks = []
    for r in range(mesh.size):
        groups = Groups(mesh, r, each)
        graph = verify_in_flight(lower_collectives(local, groups))
        graph = gloo_all_to_all(host_levels(graph, groups), groups)
        ranks.append(Rank(verify_in_flight(graph), groups, board, barrier))

    def work(r: int) -> None:
        ranks[r].results = ranks[r].run(*(x[r] for x in inputs))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


SENDING = [p for p in EXAMPLES if isinstance(p.values[0].kind, CollectiveKind)]


def graph_of_ranks(example: Example, mesh: Mesh, merged: bool) -> fx.Graph:
    """Return the program of one device with two steps, sent as one if `merged`."""
    graph = localize_graph(example.graph(inputs=2), mesh)
    if merged:
        join(graph, [n for n in graph.nodes if n.target is example.kind])
    return start_wait(graph)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("example, mesh", SENDING)
def test_the_programs_of_ranks_do_the_same(example: Example, mesh: Mesh, merged: bool) -> None:
    torch.manual_seed(0)
    kind, tensors = example.kind, torch.randint(-9, 9, (2, *example.shape)).float()
    assert isinstance(kind, CollectiveKind)
    if merged and kind.merged is None:
        return
    with registered(kind) if kind.name not in KINDS else contextlib.nullcontext():
        ranks = run_ranks(
            graph_of_ranks(example, mesh, merged),
            mesh,
            [shards(x, example.before, mesh) for x in tensors],
        )
    for i, x in enumerate(tensors):
        check([rank.results[i] for rank in ranks], x, example, mesh)
    if kind.wire == (ALL_TO_ALL,) and (step := example.price(mesh)) is not None:
        moved = max(rank.moved for rank in ranks) / 2 * x.element_size()
        assert moved == step.sent or 1 in mesh.shape and moved < step.sent


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("count, each", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("kind", [k for k in STEPS if getattr(k, "over_hosts", None)], ids=str)
def test_between_hosts_a_rank_meets_one_of_each(
    kind: StepKind, count: int, each: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pass, "LEAST", 0)
    torch.manual_seed(0)
    example, mesh = Example.of(kind), Mesh(a=count * each, b=1)
    tensors = torch.randint(-9, 9, (2, *example.shape)).float()
    inputs = [shards(x, example.before, mesh) for x in tensors]
    ranks = run_ranks(graph_of_ranks(example, mesh, merged), mesh, inputs, each)
    for i, x in enumerate(tensors):
        check([rank.results[i] for rank in ranks], x, example, mesh)
    for r, rank in enumerate(ranks):
        host = r - r % each
        assert rank.met == {
            tuple(range(host, host + each)),
            tuple(range(r % each, mesh.size, each)),
        }


@pytest.mark.parametrize(
    "example, mesh", [p for p in EXAMPLES if p.values[0].kind.moves is not no_moves]
)
def test_a_search_may_take_the_example(example: Example, mesh: Mesh) -> None:
    assert example.price(mesh) is not None
