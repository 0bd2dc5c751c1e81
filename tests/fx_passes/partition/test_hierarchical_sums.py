"""Sums over hosts and the devices in them, in steps where that takes less time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Hardware, Mesh
from torchgspmd.comm.hardware import Link
from torchgspmd.compiler import api

HOSTS = Hardware(
    "hosts of two", {4: 1e12}, 1e11, 1e10, (Link(2, 1e10, 1e-6), Link(math.inf, 1e9, 1e-6))
)
FLAT = Hardware("one host", {4: 1e12}, 1e11, 1e10, (Link(math.inf, 1e10, 1e-6),))


def program(x, w):
    return x.T @ w


def planned(rows: int, hardware: Hardware | None, mesh: Mesh = Mesh(host=2, core=2)):
    x, w = torch.randn(64, rows), torch.randn(64, 66)
    layouts = {"in_specs": ("host+core _", "host+core _"), "out_specs": "_ _"}
    plan = gspmd.plan(program, x, w, mesh=mesh, hardware=hardware, **layouts)
    torch.testing.assert_close(plan.simulate(x, w, _poison=True), program(x, w))
    return plan


def test_between_hosts_each_device_sends_its_part():
    before, after = (
        {c.axes: (c.kind, c.sent_bytes) for c in planned(64, hardware).collectives}
        for hardware in (FLAT, HOSTS)
    )
    size = 64 * 66 * 4
    assert before == {("host", "core"): ("all_reduce", 1.5 * size)}
    assert after["host",] == ("all_reduce", size / 2)
    kinds = [c.kind for c in planned(64, HOSTS).collectives]
    assert kinds == ["reduce_scatter", "all_reduce", "all_gather"]
    text = str(planned(64, HOSTS)).partition("\n\n")[0].splitlines()
    assert [line.split(" = ")[1] for line in text[-4:-1]] == [
        "reduce_scatter(%einsum, sum, 0, core)",
        "all_reduce(%einsum_r_rs, sum, host)",
        "all_gather(%einsum_r_r, 0, core)",
    ]


@pytest.mark.parametrize(
    "rows, hardware, mesh",
    [
        (8, HOSTS, Mesh(host=2, core=2)),  # small: one message is sooner there than three
        (64, FLAT, Mesh(host=2, core=2)),
        (64, None, Mesh(host=2, core=2)),
        (65, HOSTS, Mesh(host=2, core=4)),  # 65 rows and 66 columns do not divide by 4
    ],
)
def test_where_one_message_is_left(rows, hardware, mesh):
    assert [c.kind for c in planned(rows, hardware, mesh).collectives] == ["all_reduce"]


def test_gradients():
    """Of weights whose sizes divide or do not; over the slow links half of the bytes, or less."""
    mesh, slow = Mesh(host=2, core=2), []
    model = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 65)).double()
    x = torch.randn(1024, 33, dtype=torch.float64)
    y = model(x)
    y.sum().backward()
    for hardware in (FLAT, HOSTS):
        layouts = {"in_specs": "host+core _", "out_specs": "host+core _"}
        plan = gspmd.plan(model, x, mesh=mesh, grad=True, hardware=hardware, **layouts)
        got, gradients = plan.simulate(x, _poison=True)
        torch.testing.assert_close(got, y)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
        slow.append(sum(c.sent_bytes for c in plan.collectives if "host" in c.axes))
    assert slow[1] <= slow[0] / 2


@pytest.mark.parametrize("hosts, is_divided", [(0, False), (2, True), (4, False)])
def test_round_numbers_for_gpus_on_several_hosts(hosts, is_divided):
    """Pairs send half over their cards; four cards together are as fast as the links of a host.

    A device sends the same bytes, on whatever hosts.
    """
    x, w = torch.empty(1 << 18, 2048, device="meta"), torch.empty(1 << 18, 1024, device="meta")
    mesh, layouts = Mesh(host=2, core=max(hosts, 2)), ("host+core _", "host+core _")
    flat = gspmd.plan(program, x, w, mesh=mesh, in_specs=layouts, out_specs="_ _")
    assert flat.request is not None and flat.request.hosts == 0
    plan = api._plan(dataclasses.replace(flat.request, hosts=hosts))
    steps = ["reduce_scatter", "all_reduce", "all_gather"] if is_divided else ["all_reduce"]
    assert [c.kind for c in plan.collectives] == steps
    assert plan.sent_bytes == flat.sent_bytes


def test_an_unknown_name():
    with pytest.raises(gspmd.ShardingError, match="there is no hardware 'h1000'"):
        planned(8, "h1000")
