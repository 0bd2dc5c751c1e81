"""What several operations gain together: sums, bodies between contractions. Bytes against those of
the known best programs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.fx_passes import boundary
from torchgspmd.fx_passes.ir import Rules
from torchgspmd.fx_passes.partition.assignment import Assignment
from torchgspmd.fx_passes.partition.local_search import LocalSearch
from torchgspmd.fx_passes.partition.regions import bodies


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def with_gradients(function, names):
    """y = function(**arguments), and the gradients of the named arguments for the cotangent dy."""

    def run(dy, **arguments):
        leaves = {k: arguments[k].detach().requires_grad_() for k in names}
        y = function(**{**arguments, **leaves})
        return y, torch.autograd.grad(y, list(leaves.values()), dy)

    return run


def attention(x, q, k, v, o, mesh):
    """x[b, s, m]; only its layout, along the sequence, is marked."""
    h = F.layer_norm(x, x.shape[-1:])
    queries, keys, values = (torch.einsum("bsm,mnd->bsnd", h, w) for w in (q, k, v))
    future = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
    weights = (
        (torch.einsum("bsnd,btnd->bnst", queries, keys) * 0.1).masked_fill(future, -1e9).softmax(-1)
    )
    y = torch.einsum("bsnd,ndm->bsm", torch.einsum("bnst,btnd->bsnd", weights, values), o)
    return gspmd.mark_sharding(x + y, mesh, "data model _")


@pytest.mark.parametrize("data, model", [(2, 4), (4, 2)])
def test_the_softmax_follows_the_heads(data, model):
    """Scores, mask and softmax, forward and backward, between contractions that have the heads
    sharded.
    """
    mesh, (b, s, m, n, d) = Mesh(data=data, model=model), (8, 64, 256, 8, 32)
    arguments = {
        "x": r(b, s, m),
        **{w: r(m, n, d, seed=i) for i, w in enumerate("qkv")},
        "o": r(n, d, m, seed=4),
    }
    specs = {"x": "data model _", **dict.fromkeys("qkv", "_ model _"), "o": "model _ _"}
    run = with_gradients(lambda **a: attention(**a, mesh=mesh), list(arguments))

    def program(dy, *tensors):
        return run(dy, **dict(zip(arguments, tensors)))

    inputs = (r(b, s, m, seed=5), *arguments.values())
    plan = gspmd.plan(
        program,
        *inputs,
        mesh=mesh,
        in_specs=("data model _", *specs.values()),
        out_specs=("data model _", tuple(specs.values())),
    )
    stream, weights = b // data * s * m * 4, 4 * m * n * d // model * 4  # bytes of a device
    assert {c.kind for c in plan.collectives if "model" in c.axes} == {
        "all_gather",
        "reduce_scatter",
    }
    assert plan.sent_bytes == 4 * (model - 1) / model * stream + 2 * (data - 1) / data * weights
    assert_same(plan.simulate(*inputs), program(*inputs), terms=1024)


def mlps(x, up, down):
    """x[b, s, m] through residual blocks with up[l, m, h], down[l, h, m]."""
    for first, second in zip(up, down):
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ first) @ second
    return x


def test_the_residual_stream_leaves_the_layout_of_a_weight():
    """The lookup makes rows in parts, as the table is stored: they are exchanged once, not for
    every norm and product.
    """
    mesh, (b, s, m, v, h) = Mesh(data=4), (16, 64, 64, 512, 64)
    ids = torch.arange(b * s).reshape(b, s) % v

    def program(ids, dy, table, up, down):
        leaves = [w.detach().requires_grad_() for w in (table, *up, *down)]
        y = mlps(F.embedding(ids, leaves[0]), leaves[1:3], leaves[3:])
        return torch.autograd.grad(y, leaves, dy)

    inputs = (
        ids,
        r(b, s, m),
        r(v, m, seed=1),
        [r(m, h, seed=2), r(m, h, seed=3)],
        [r(h, m, seed=4), r(h, m, seed=5)],
    )
    weights = ["data _"] * 2, ["_ data"] * 2
    plan = gspmd.plan(
        program,
        *inputs,
        mesh=mesh,
        in_specs=("data _", "data _ _", "_ data", tuple(weights[0]), tuple(weights[1])),
        out_specs=("_ data", *weights[0], *weights[1]),
    )
    moved = [
        c
        for c in plan.collectives
        if c.payload_bytes >= b // 4 * s * m * 4 and c.kind == "all_to_all"
    ]
    assert len(moved) <= 2  # the rows, and their gradient
    assert_same(plan.simulate(*inputs), program(*inputs), terms=1024)


def test_bodies_are_what_lies_between_contractions():
    def program(x, w):
        return (torch.relu(x @ w) + 1).sin() @ w

    mesh = Mesh(a=2)
    graph = gspmd.plan(program, r(4, 8), r(8, 8), mesh=mesh).captured.graph
    (body,) = bodies({op.node: op for op in Rules().ops(graph)})
    assert [op.node.name for op in body.ops] == ["relu", "add", "sin"]
    assert [list(factors.values()) for factors in body.classes] == [["d0"] * 3, ["d1"] * 3]


def test_a_factor_that_an_operation_needs_whole_is_not_given_to_an_axis():
    """The stream of 4 tokens is best sharded along the width, but the norm needs it replicated."""
    mesh = Mesh(a=2, b=2)

    def program(x, dy, scale):
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        y = (
            F.layer_norm(gspmd.mark_sharding(x.sin(), mesh, "a b"), x.shape[-1:], scale).exp().cos()
            * x
        )
        return torch.autograd.grad(gspmd.mark_sharding(y, mesh, "_ a+b"), (x, scale), dy)

    inputs = r(4, 64), r(4, 64, seed=1), r(64, seed=2)
    for specs in (("_ a+b", "_ b", "a"), ("a b", "b a", "_")):
        plan = gspmd.plan(
            program, *inputs, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[2])
        )
        assert_same(plan.simulate(*inputs, _poison=True), program(*inputs), terms=1024)


def test_a_sum_that_would_be_reduced_at_several_places_is_reduced_where_it_is_made():
    """y is, also transposed, an operand of a product with itself and of both its gradients."""
    mesh = Mesh(x=2, y=2)
    program = with_gradients(lambda x, w: ((y := x @ w).mT @ y).tanh(), ("x", "w"))

    def run(dy, x, w):
        return program(dy, x=x, w=w)

    inputs = r(8, 8, 8), r(8, 8, 32), r(32, 8)
    plan = gspmd.plan(
        run,
        *inputs,
        mesh=mesh,
        in_specs=("_ _ _", "_ y x", "x y"),
        out_specs=("_ _ _", ("_ y x", "x y")),
    )
    y, square, w = 8 * 4 * 8 * 4, 8 * 8 * 8 * 4, 16 * 8 * 4  # bytes of a device
    assert (
        plan.sent_bytes == y + square + w / 2 + w / 2
    )  # a weight gathered, its gradient scattered
    assert_same(plan.simulate(*inputs, _poison=True), run(*inputs))


def test_heads_change_together_with_their_projections():
    """Small activations and large weights: the sequence is gathered for the heads' projections,
    which stay where they are stored.
    """
    mesh, (b, s, m, n, d) = Mesh(data=4, model=2), (8, 32, 32, 16, 8)

    def program(x, q, k, v, o):
        h = F.rms_norm(x, x.shape[-1:])
        queries, keys, values = ((h @ w).unflatten(-1, (n, d)).transpose(1, 2) for w in (q, k, v))
        return (
            x
            + F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
            @ o
        )

    inputs = (r(b, s, m), *(r(m, n * d, seed=i) for i in range(3)), r(n * d, m, seed=4))
    plan = gspmd.plan(
        program,
        *inputs,
        mesh=mesh,
        in_specs=("data model _", *("_ model",) * 3, "model _"),
        out_specs="data model _",
    )
    assert (
        plan.sent_bytes == 2 * (b // 4 * s * m * 4) / 2
    )  # gathered before, summed and scattered behind
    assert_same(plan.simulate(*inputs), program(*inputs), terms=1024)


def test_a_layer_is_sharded_by_its_hidden_units_if_its_weights_outweigh_its_tokens():
    """The axis `s` divides images in space, and no weights. As it is used for activations anyhow,
    each device computes the gradients of a half of both weights, and gathers the other half: 1.25
    of a weight instead of 1.75.
    """
    mesh, (b, t, m, h) = Mesh(data=4, s=2), (16, 16, 32, 256)

    def program(x, up, down, dy):
        leaves = [v.detach().requires_grad_() for v in (x, up, down)]
        normal = leaves[0] - leaves[0].mean(1, keepdim=True)
        y = torch.einsum(
            "bth,hm->btm", torch.einsum("btm,mh->bth", normal, leaves[1]).relu(), leaves[2]
        ).sin()
        return torch.autograd.grad(y, leaves, dy)

    inputs, specs = (
        (r(b, t, m), r(m, h, seed=1), r(h, m, seed=2), r(b, t, m, seed=3)),
        ("data s _", "_ _", "_ _", "data s _"),
    )
    plan = gspmd.plan(program, *inputs, mesh=mesh, in_specs=specs, out_specs=specs[:3])
    tokens, weights, means = b // 4 * t * m * 4, 2 * m * h * 4, b // 4 * m * 4
    assert (
        plan.sent_bytes
        <= (1.5 / 2 + 0.5) * weights + 4 * tokens / 2 + 2 * means
        < (2 * 7 / 8) * weights
    )
    assert_same(plan.simulate(*inputs), program(*inputs), terms=256)


@pytest.mark.parametrize("n", [2, 4])
def test_no_summand_stays_pending_where_all_can_be_made_without_a_sum(n):
    """Two layers of cross attention with the same weights: the gradient of the memory is a sum of
    four products, each of which was cheaper as a sum over the axis while the weights were not
    gathered yet. Only weights and their gradients are sent.
    """
    mesh, (b, t, m, h) = Mesh(x=n), (8, 32, 64, 16)

    def program(x, memory, q, k, v, o, dy):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, memory, q, k, v, o)]
        y, memory, q, k, v, o = leaves
        for _ in range(2):
            queries, keys, values = (
                (c @ w).unflatten(-1, (4, 4)).transpose(1, 2)
                for c, w in ((y, q), (memory, k), (memory, v))
            )
            y = (
                y
                + F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
                @ o
            )
        return torch.autograd.grad(y, leaves, dy)

    inputs = (
        r(b, t, m),
        r(b, t, m, seed=1),
        *(r(m, h, seed=i) for i in (2, 3, 4)),
        r(h, m, seed=5),
        r(b, t, m, seed=6),
    )
    specs = ("x _ _", "x _ _", "x _", "x _", "x _", "_ x")
    plan = gspmd.plan(program, *inputs, mesh=mesh, in_specs=(*specs, "x _ _"), out_specs=specs)
    assert plan.sent_bytes == 2 * 4 * m * h * 4 * (n - 1) / n
    assert_same(plan.simulate(*inputs), program(*inputs), terms=256)


def test_what_one_operand_has_sharded_alone_need_not_be_summed_over_in_parts():
    """h @ b, of which b has the rows of the sum sharded: b is gathered and the columns are divided,
    as those of h @ c are.
    """

    def gate(x, a, b, c):
        h = x @ a
        return torch.sigmoid(h @ b) * (h @ c)

    inputs = tuple(r(16, 16, seed=i) for i in range(4))
    plan = gspmd.plan(
        gate, *inputs, mesh=Mesh(x=2), in_specs=("_ _", "_ _", "x _", "_ _"), out_specs="_ _"
    )
    assert plan.sent_bytes == 2 * 16 * 16 * 4 / 2  # b, and the result
    assert not plan.replicated_ops
    assert_same(plan.simulate(*inputs), gate(*inputs))


def test_a_product_and_what_reshapes_it_change_together():
    """Keys of one head, projected with the weight's columns sharded: as h is gathered for the
    queries anyhow, each device makes a part of the columns and these are gathered. Alone, the
    product would rather stay a sum, which its reshapes pass on.
    """
    mesh, (b, s, m, n, d) = Mesh(x=2, y=2), (16, 32, 64, 8, 8)

    def program(h, q, k):
        queries = (h @ q).unflatten(-1, (n, d)).transpose(1, 2)
        keys = (h @ k).unflatten(-1, (1, d)).transpose(1, 2)
        turned = torch.cat([keys[..., d // 2 :].sin(), keys[..., : d // 2]], -1).squeeze(1)
        return torch.einsum("bnsd,btd->bnst", queries, turned)

    inputs = r(b, s, m), r(m, n * d, seed=1), r(m, d, seed=2)
    plan = gspmd.plan(
        program, *inputs, mesh=mesh, in_specs=("x _ y", "x y", "x y"), out_specs="x y _ _"
    )
    tokens, keys, weights = (
        b // 2 * s * m * 4 / 2,
        b // 2 * s * d * 4 / 2,
        (m * n * d / 2 + m * d / 2) * 4 / 2,
    )
    assert plan.sent_bytes == tokens + keys + weights
    assert_same(plan.simulate(*inputs), program(*inputs), terms=256)


def test_the_weights_of_a_loop_are_moved_once_for_all_its_rounds():
    """A pipeline whose stages are on y, and its weights not: any one round would rather have the
    stages gathered and summed up.
    """
    mesh, (micro, n, b, m, f) = Mesh(x=2, y=2), (16, 4, 8, 16, 64)

    def pipeline(inputs, up, down):
        state, outputs = inputs.new_zeros(n, b, m), []
        for rows in torch.cat([inputs, inputs.new_zeros(n - 1, b, m)]):
            state = torch.where((torch.arange(n) == 0)[:, None, None], rows, state.roll(1, 0))
            state = gspmd.mark_sharding(state, mesh, "y x _")
            state = torch.einsum(
                "lbf,lfm->lbm", torch.einsum("lbm,lmf->lbf", state, up).tanh(), down
            )
            outputs.append(state[-1])
        return torch.stack(outputs)[n - 1 :]

    inputs = r(micro, b, m), r(n, m, f, seed=1), r(n, f, m, seed=2)
    plan = gspmd.plan(
        pipeline, *inputs, mesh=mesh, in_specs=("_ x _", "_ x y", "_ y x"), out_specs="_ x _"
    )
    weights = (
        2 * (n * m * f / 2 - n * m * f / 8) * 4
    )  # half of the stages whole, of which a quarter was there
    stages, results = (micro + n - 2) * b / 2 * m * 4, micro * b / 2 * m * 4
    assert plan.sent_bytes == weights + stages + results
    assert_same(plan.simulate(*inputs), pipeline(*inputs))


def test_a_layout_that_lost_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = []
    force = LocalSearch.force

    def count(self: LocalSearch, *args: object) -> None:
        forced.append(args)
        force(self, *args)

    monkeypatch.setattr(LocalSearch, "force", count)
    mesh = Mesh(data=2, model=2)

    def stack(x, *weights):
        for w in weights:
            x = x + F.layer_norm(x, x.shape[-1:]).mul(w).softmax(1) @ w
        return x

    weights = [torch.ones(n, n) for n in (8,) * 4]
    specs = ("data model _", *["model data"] * len(weights))
    plans, counts = [], []
    for share in (0, 0.5):
        forced.clear()
        plans.append(
            gspmd.plan(
                stack,
                torch.ones(4, 8, 8),
                *weights,
                mesh=mesh,
                in_specs=specs,
                advanced={"costs": {"retry_share": share}},
            )
        )
        counts.append(len(forced))
    assert counts[1] < counts[0] and str(plans[0]) == str(plans[1])


def test_a_layout_that_lost_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undone trial leaves the assignment as a copy from before has it."""
    tables = "strategy_of", "layout_of", "required", "worklist", "stamps", "version"
    begin, undo = Assignment.begin_trial, Assignment.undo_trial
    copies: list[dict[str, object]] = []
    undone: list[int] = []

    def begin_trial(self: Assignment) -> None:
        copies.append(self.snapshot())
        begin(self)

    def undo_trial(self: Assignment) -> None:
        changed = self.strategy_of != copies[-1]["strategy_of"]
        undo(self)
        assert all(getattr(self, name) == copies[-1][name] for name in tables)
        # What is cached is what would be computed anew.
        for node, cached in list(self.neighborhood_cache.items()):
            del self.neighborhood_cache[node]
            assert self.neighborhood(self.ops[node]) is cached
        undone.append(changed)

    monkeypatch.setattr(Assignment, "begin_trial", begin_trial)
    monkeypatch.setattr(Assignment, "undo_trial", undo_trial)

    def stack(x, *weights):
        for w in weights:
            x = x + F.layer_norm(x, x.shape[-1:]).mul(w).softmax(1) @ w
        return x

    weights = [torch.ones(8, 8) for _ in range(3)]
    specs = ("data model _", *["model data"] * len(weights))
    mesh = Mesh(data=2, model=2)
    gspmd.plan(stack, torch.ones(4, 8, 8), *weights, mesh=mesh, in_specs=specs)
    assert any(undone)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each partitioning the number of layouts that were tried for bodies."""
    counts: list[int] = []
    force, partition = LocalSearch.force, boundary.partition_graph

    def count(self: LocalSearch, *args: object) -> None:
        counts[-1] += 1
        force(self, *args)

    def begin(*args: object, **options: object) -> object:
        counts.append(0)
        return partition(*args, **options)

    monkeypatch.setattr(LocalSearch, "force", count)
    monkeypatch.setattr(boundary, "partition_graph", begin)
    return counts


def test_the_second_way_starts_from_the_first(forced: list[int]) -> None:
    """Products by parts and whole: like layers are laid out once."""

    def layers(x, *weights):
        for up, down in zip(weights[::2], weights[1::2]):
            a, b = (F.layer_norm(x, x.shape[-1:]) @ up).chunk(2, -1)
            x = x + (a * b.softmax(1)) @ down
        return x

    inputs = [r(4, 8, 8), *[r(8, 16), r(8, 8)] * 4]
    plan = gspmd.plan(
        layers,
        *inputs,
        mesh=Mesh(data=2, model=2),
        in_specs=("data _ _", *["_ model", "model _"] * 4),
    )
    assert len(forced) == 2 and forced[1] < forced[0] / 2
    assert plan.sent_bytes == 1536  # as where each way starts from nothing
    assert_same(plan.simulate(*inputs), layers(*inputs))


class Shifted(nn.Module):
    """Its sizes, 7 and 8, leave rows over on 6 devices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 16, 7))

    def forward(self):
        x = self.weight[:, :8].reshape(7, 2, 4, 7).sin().mean(0)
        x = gspmd.mark_sharding(x, Mesh(x=6), "_ _ _")
        return torch.cat([torch.zeros_like(x[..., :1]), x[..., :-1]], -1)


def test_parts_of_an_axis_move_alone_where_sizes_are_uneven():
    """The whole axis of 6 divides no size; its parts of 2 and 3 may lie on two dimensions."""
    module = gspmd.annotate(Shifted(), Mesh(x=6), {"weight": "_ x _"})
    assert gspmd.plan(module, mesh=Mesh(x=6), grad=True).sent_bytes <= 1504
