"""Mesh: axes, coordinates, groups, text."""

import itertools

import pytest
import torch
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgspmd import Mesh

MESHES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)),
    max_size=4,
    unique_by=lambda axis: axis[0],
).map(lambda axes: Mesh(**dict(axes)))


def test_axes_are_ordered_and_counted():
    mesh = Mesh(data=2, model=4)
    assert (mesh.names, mesh.shape, mesh.size) == (("data", "model"), (2, 4), 8)
    assert (mesh.count(("model",)), mesh.count(("model", "data")), mesh.count(())) == (4, 8, 1)
    assert (str(mesh), repr(mesh)) == ("data=2,model=4", "Mesh(data=2, model=4)")


def test_order_of_axes_is_part_of_a_mesh():
    assert Mesh(a=2, b=3) == Mesh(a=2, b=3) and hash(Mesh(a=2, b=3)) == hash(Mesh(a=2, b=3))
    assert Mesh(a=2, b=3) != Mesh(b=3, a=2)


def test_frozen():
    with pytest.raises(AttributeError):
        Mesh(a=2).axes = ()


def test_first_axis_is_major():
    mesh = Mesh(data=2, model=4)
    assert [mesh.coordinates(rank) for rank in (0, 3, 4, 7)] == [
        {"data": 0, "model": 0},
        {"data": 0, "model": 3},
        {"data": 1, "model": 0},
        {"data": 1, "model": 3},
    ]


def test_index_follows_the_order_of_its_axes():
    mesh = Mesh(a=2, b=3)
    assert mesh.index(("a", "b"), {"a": 1, "b": 2}) == 5
    assert mesh.index(("b", "a"), {"a": 1, "b": 0}) == 1
    assert mesh.index((), {"a": 1, "b": 0}) == 0


def test_groups():
    mesh = Mesh(a=2, b=3)
    assert list(mesh.groups(("a",))) == [[0, 3], [1, 4], [2, 5]]
    assert list(mesh.groups(("b",))) == [[0, 1, 2], [3, 4, 5]]
    assert list(mesh.groups(("b", "a"))) == [[0, 3, 1, 4, 2, 5]]
    assert list(Mesh().groups(())) == [[0]]


@settings(derandomize=True, deadline=None)
@given(MESHES)
def test_parse_and_rank_are_inverses(mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert eval(repr(mesh)) == mesh
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(
        range(mesh.size)
    )


@settings(derandomize=True, deadline=None)
@given(MESHES, st.data())
def test_groups_divide_the_devices_and_are_ordered_by_index(mesh, data):
    axes = tuple(data.draw(st.permutations(mesh.names)))[
        : data.draw(st.integers(0, len(mesh.names)))
    ]
    groups = list(mesh.groups(axes))
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    for group in groups:
        assert [mesh.index(axes, mesh.coordinates(rank)) for rank in group] == list(
            range(mesh.count(axes))
        )


class FakeDeviceMesh:
    """What from_device_mesh reads of a DeviceMesh, which needs a process group to be made."""

    def __init__(self, names):
        self.mesh_dim_names, self.mesh = names, torch.arange(6).view(2, 3)


def test_from_device_mesh():
    assert Mesh.from_device_mesh(FakeDeviceMesh(("data", "model"))) == Mesh(data=2, model=3)


def test_parse_allows_blanks():
    assert Mesh.parse(" data = 2 , model=3") == Mesh(data=2, model=3)


ERRORS = [
    (
        lambda: Mesh(a=0),
        "mesh axis 'a' has size 0; a size is an integer of at least 1\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(a=True),
        "mesh axis 'a' has size True; a size is an integer of at least 1\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(a="2"),
        "mesh axis 'a' has size '2'; a size is an integer of at least 1\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(a=2.0),
        "mesh axis 'a' has size 2.0; a size is an integer of at least 1\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(**{"a b": 2}),
        "'a b' cannot name a mesh axis; use a Python identifier other than '_'\n"
        "  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(_=2),
        "'_' cannot name a mesh axis; use a Python identifier other than '_'\n"
        "  where test_mesh.py:N",
    ),
    (
        lambda: Mesh.parse("a"),
        "'a' is not a mesh; write it as 'data=2,model=4'\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh.parse("a=b"),
        "'a=b' is not a mesh; write it as 'data=2,model=4'\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh.parse("a=2=3"),
        "'a=2=3' is not a mesh; write it as 'data=2,model=4'\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh.parse("a=0"),
        "mesh axis 'a' has size 0; a size is an integer of at least 1\n  where test_mesh.py:N",
    ),
    (lambda: Mesh.parse("a=2,a=3"), "'a' occurs twice in mesh 'a=2,a=3'\n  where test_mesh.py:N"),
    (
        lambda: Mesh.from_device_mesh(FakeDeviceMesh(None)),
        "the DeviceMesh has no dimension names\n  where test_mesh.py:N\n"
        "  fix   call init_device_mesh(..., mesh_dim_names=('data', 'model'))",
    ),
    (
        lambda: Mesh(data=2, model=4).check_axis("dta"),
        "mesh data=2,model=4 has no axis 'dta'; did you mean 'data'?\n  where test_mesh.py:N",
    ),
    (
        lambda: Mesh(data=2, model=4).check_axis("zzz"),
        "mesh data=2,model=4 has no axis 'zzz'; use one of 'data', 'model'\n  where test_mesh.py:N",
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors(number):
    action, text = ERRORS[number]
    assert message(action) == text
