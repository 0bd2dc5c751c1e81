"""Which neighbours in a mesh share a host."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchgspmd as gspmd
from torchgspmd.comm.hardware import hardware_of
from torchgspmd.comm.hosts import block_size, devices_of_a_host, host_name
from torchgspmd.comm.process_groups import ProcessGroups


@pytest.mark.parametrize(
    "hosts, size",
    [
        ("aaaa", 0),  # one host
        ("a", 0),
        ("abcd", 0),  # a device on each
        ("abab", 0),  # no neighbours share a host
        ("aabb", 2),
        ("aaaabbbb", 4),
        ("aaaaaabb", 2),  # hosts with six devices and with two
        ("aaabbb", 3),
        ("aabbaa", 2),
    ],
)
def test_neighbours_on_a_host(hosts, size):
    assert block_size(hosts) == size


def test_a_host_by_its_variable(monkeypatch):
    assert host_name() == host_name()
    monkeypatch.setenv("TORCHGSPMD_HOST", "rack 7")
    assert host_name() == "rack 7"


def test_nobody_answers_in_a_fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert devices_of_a_host(ProcessGroups(gspmd.Mesh(data=8), "cpu")) == 0
    finally:
        dist.destroy_process_group()


def test_links_of_hosts():
    """Between hosts a GPU has a card, and processes on CPUs share one. One host is as before."""
    for device in ("cpu", "cuda"):
        assert hardware_of(device) is hardware_of(device, hosts=0)
        inside, across = hardware_of(device, hosts=8).links
        assert inside.devices == 8 and inside.bandwidth == hardware_of(device).links[0].bandwidth
        assert across.bandwidth < inside.bandwidth and across.latency > inside.latency
    assert hardware_of("cpu", hosts=8).links[1].bandwidth * 8 == 1.25e9
