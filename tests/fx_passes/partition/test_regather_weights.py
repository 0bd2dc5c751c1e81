"""Weights gathered once more for the backward; updates stored in parts."""

import copy

import models
import pytest
import torch
from helpers import assert_same
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError

MESH = Mesh(data=4)


def planned(regather):
    model = models.block(MESH, "fsdp")
    x = torch.randn(8, 32, models.WIDTH, generator=torch.Generator().manual_seed(0))
    return (
        gspmd.plan(
            model,
            x,
            mesh=MESH,
            grad=True,
            in_specs="data _ _",
            out_specs="data _ _",
            advanced={"regather": regather},
        ),
        model,
        x,
    )


def gathers(plan, backward):
    return sum(
        n.meta["step"].kind == "all_gather"
        for n in plan.sharded.nodes
        if "step" in n.meta and bool(n.meta["backward"]) is backward
    )


def test_what_is_gathered_again_is_not_kept():
    kept, again = planned("never")[0], planned("always")[0]
    matrices = 6  # the gains of norms are not needed as they are
    assert gathers(again, False) == gathers(kept, False)
    assert gathers(again, True) >= matrices > gathers(kept, True) == 0
    for node in again.sharded.nodes:
        if (
            "step" in node.meta
            and node.meta["step"].kind == "all_gather"
            and node.args[0].op == "placeholder"
        ):
            assert len({bool(u.meta["backward"]) for u in node.users}) == 1, (
                f"{node} lives from the forward to the backward"
            )


def test_the_numbers_stay():
    plan, model, x = planned("always")
    out, grads = plan.simulate(x)
    want = model(x)
    assert_same(out, want)
    for (name, _), grad in zip(
        model.named_parameters(), torch.autograd.grad(want.sum(), list(model.parameters()))
    ):
        assert_same(grads[name], grad)


def test_a_cast_weight_is_gathered_and_cast_again():
    model = nn.Linear(8, 16, bias=False)
    gspmd.mark_sharding(model.weight, MESH, "data _")
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plan = gspmd.plan(
            model,
            x,
            mesh=MESH,
            grad=True,
            in_specs="data _",
            out_specs="data _",
            advanced={"regather": "always"},
        )
    assert gathers(plan, True) == gathers(plan, False) == 1


def test_unknown_options():
    with pytest.raises(
        ShardingError,
        match="there is no regather 'sometimes'; there are 'auto', 'always', 'all', 'never'",
    ):
        planned("sometimes")
    with pytest.raises(
        ShardingError, match="shard_updates names axis 'date', which mesh data=4 does not have"
    ):
        gspmd.parallelize(nn.Linear(2, 2), MESH, shard_updates="date")


def test_updates_are_cut_along_the_longest_free_dimension():
    from torchgspmd.runtime.module_proxy import mark_on, shard_updates

    mesh = Mesh(data=4, model=2)
    model = nn.ModuleDict(
        {"a": nn.Linear(6, 10), "b": nn.Linear(8, 4), "c": nn.Linear(3, 3, bias=False)}
    )
    frozen = copy.deepcopy(model["b"])
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    model["frozen"] = frozen
    gspmd.mark_sharding(model["b"].weight, mesh, "model _")
    shard_updates(model, mesh, "data")
    marks = {
        name: str(mark_on(p, mesh)) for name, p in model.named_parameters() if mark_on(p, mesh)
    }
    assert marks == {
        "a.weight": "data _",
        "a.bias": "data",
        "b.weight": "model data",
        "b.bias": "data",
        "c.weight": "data _",
    }


def test_keys_of_a_long_context_are_gathered_again():
    """Numbers are the same, and memory is less; bytes are one gather more."""
    mesh, spec = Mesh(seq=4), "_ seq _"

    class Context(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))

        def forward(self, x):  # [b, s, m], two heads
            for block in self.blocks:
                qkv = gspmd.mark_sharding(block(x), mesh, spec).unflatten(-1, (3, 2, 8))
                q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
                y = nn.functional.scaled_dot_product_attention(q, k, v)
                x = x + y.transpose(1, 2).flatten(2)
            return x

    torch.manual_seed(0)
    model, x = Context().double(), torch.randn(1, 64, 16, dtype=torch.float64)
    options = {"in_specs": spec, "out_specs": spec}
    kept, again = (
        gspmd.plan(
            model,
            x,
            mesh=mesh,
            grad=True,
            advanced={"regather": regather, "skip_passes": ("attention_rings",)},
            **options,
        )
        for regather in ("never", "all")
    )
    for a, b in zip(kept.simulate(x)[1].values(), again.simulate(x)[1].values(), strict=True):
        torch.testing.assert_close(a, b)
    assert gathers(kept, True) == 0 and gathers(again, True) == gathers(again, False) == 6
    assert again.memory.peak < kept.memory.peak


def test_a_permutation_that_gathers_is_done_again():
    """Weights on two axes reach a batch on both by one permutation: nothing else is kept."""
    mesh = Mesh(data=2, model=2)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    gspmd.annotate(model, mesh, {"*.weight": "data model"})
    x = torch.randn(1024, 16)
    options = dict(mesh=mesh, in_specs="data+model _", out_specs="data+model _", grad=True)
    plan = gspmd.plan(model, x, advanced={"regather": "always"}, **options)
    weights = [n for n in plan.sharded.nodes if "step" in n.meta and n.args[0].op == "placeholder"]
    assert {n.meta["step"].kind for n in weights} == {"permute"}
    # The first weight is needed in the forward alone, the second in both.
    assert [bool(n.meta["backward"]) for n in weights] == [False, False, True]
    for node in weights:
        assert len({bool(user.meta["backward"]) for user in node.users}) == 1, node
    out, gradients = plan.simulate(x)
    want = model(x)
    assert_same(out, want)
    wanted = torch.autograd.grad(want.sum(), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), wanted):
        assert_same(gradients[name], gradient)
