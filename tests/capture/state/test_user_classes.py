"""Classes that users register with pytree, and tuples and lists with methods of their own."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch
from helpers import assert_same, message
from torch import nn
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2, model=2)


class Rows:
    """Rows of several lengths; the constructor checks both tensors, as torchrec's JaggedTensor."""

    def __init__(self, values, lengths):
        assert lengths.dtype == torch.int64 and values.numel() >= 0
        self.values, self.lengths = values, lengths


pytree.register_pytree_node(
    Rows, lambda r: ([r.values, r.lengths], None), lambda children, _: Rows(*children)
)


class Features:
    """An object that pytree does not know, with rows that a program computes."""

    def __init__(self):
        self.cache = {}


class Project(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.place = place

    def forward(self, x, lengths, features):
        rows = Rows(self.linear(x), lengths + 1)
        if self.place == "argument":
            features.cache["rows"] = [rows, {"again": Rows(rows.values * 2, lengths)}]
        if self.place == "attribute":
            self.last = [Rows(rows.values.detach() * 2, lengths)]
        inside = {"rows": [rows, rows.values.sum()], "first": lengths * 3}
        return rows if self.place == "result" else inside if self.place == "inside" else x + 1


def parts(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("mark", ["model data", "_ model", "data _"])
@pytest.mark.parametrize("place", ["argument", "inside", "result", "attribute"])
def test_registered_classes_get_tensors(place, mark):
    torch.manual_seed(0)
    one = Project(place).double()
    arguments = {"x": torch.randn(5, 6).double(), "lengths": torch.arange(5)}
    features = Features()
    want = one(**arguments, features=features)
    gspmd.mark_sharding(one.linear.weight, MESH, mark)
    grad = place in ("inside", "result")
    other = Features()
    plan = gspmd.plan(one, mesh=MESH, grad=grad, features=other, **arguments)
    got = plan.simulate(_poison=True, features=other, **arguments)
    if grad:
        got, grads = got
        loss = sum(t.sum() for t in parts(want) if t.requires_grad)
        known = torch.autograd.grad(loss, [*one.parameters()])
        assert_same([grads[n] for n, _ in one.named_parameters()], [*known])
    assert type(got) is type(want)
    assert_same(parts(got), parts(want))
    assert_same(parts(other.cache), parts(features.cache))


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 7)

    def forward(self, rows):
        return [self.linear(r.values) * r.lengths[:, None] for r in rows]


@pytest.mark.parametrize("spec", ["data model", "_ model"])
def test_a_registered_class_without_names_is_an_argument(spec):
    torch.manual_seed(0)
    one = Joined().double()
    rows = [Rows(torch.randn(n, 6).double(), torch.arange(n)) for n in (5, 3)]
    gspmd.mark_sharding(one.linear.weight, MESH, spec)
    plan = gspmd.plan(one, rows, mesh=MESH)
    assert_same(plan.simulate(rows, _poison=True), one(rows))


class Sealed(tuple):
    """A tuple whose length is no number of items, as e3nn's Irrep."""

    def __len__(self):
        raise NotImplementedError

    def __contains__(self, item):
        raise NotImplementedError


class Doubled(tuple):
    def __iter__(self):
        yield from (2 * tuple.__getitem__(self, i) for i in range(tuple.__len__(self)))


class Unsized(list):
    def __len__(self):
        raise NotImplementedError


class Scale(nn.Module):
    def __init__(self, cls, nested):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.numbers = cls([2, 3])
        self.nested = [cls([self.numbers, torch.ones(6).double()])] if nested else ()

    def forward(self, x):
        y = self.linear(x) * self.numbers[0] + self.numbers[1]
        return y * self.nested[0][1] if self.nested else y


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("cls", [Sealed, Unsized, Doubled])
def test_collections_with_methods_of_their_own(cls, nested):
    torch.manual_seed(0)
    one = Scale(cls, nested).double()
    x = torch.randn(5, 6).double()
    want = one(x).detach()
    gspmd.mark_sharding(one.linear.weight, MESH, "model data")
    plan = gspmd.plan(one, mesh=MESH, x=x)
    assert_same(plan.simulate(_poison=True, x=x), want)
    one.numbers = cls([2, 4])  # a plan knows that its numbers have changed
    assert "numbers" in message(lambda: plan.simulate(x=x))


ROWS, COLUMNS = torch.tensor([0, 1, 1, 3, 5]), torch.tensor([2, 0, 4, 1, 3])
COMPRESSED = {
    "csr": lambda v: torch.sparse_csr_tensor(ROWS, COLUMNS, v, size=(4, 5)),
    "csc": lambda v: torch.sparse_csc_tensor(ROWS, COLUMNS, v, size=(5, 4)),
    "bsr": lambda v: torch.sparse_bsr_tensor(ROWS, COLUMNS, v[:, None, None], size=(4, 5)),
    "compressed": lambda v: torch.sparse_compressed_tensor(
        ROWS, COLUMNS, v, size=(4, 5), layout=torch.sparse_csr
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_matrices_are_named(name):
    values, x = torch.rand(5), torch.randn(5, 3)
    said = message(lambda: gspmd.plan(COMPRESSED[name], mesh=MESH, v=values))
    assert "compressed sparse matrix" in said and "torch.sparse_coo_tensor" in said

    def instead(values, x):  # what the error says
        rows = torch.repeat_interleave(torch.arange(4), ROWS.diff(), output_size=len(values))
        return torch.sparse_coo_tensor(torch.stack([rows, COLUMNS]), values, (4, 5)) @ x

    plan = gspmd.plan(instead, mesh=MESH, values=values, x=x)
    want = COMPRESSED["csr"](values) @ x
    assert_same(plan.simulate(values=values, x=x), want)


@pytest.mark.parametrize("body", ["return array.dtype.itemsize.none", "return max(array, key=3)"])
def test_arrays_in_other_packages_are_named(body, tmp_path, monkeypatch):
    folder = tmp_path / "other-packages"
    folder.mkdir()
    (folder / "foreign.py").write_text(f"def convert(array):\n    {body}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "foreign", raising=False)
    foreign = importlib.import_module("foreign")
    said = message(
        lambda: gspmd.plan(lambda x: x * foreign.convert(x.numpy()), torch.ones(4), mesh=MESH)
    )
    assert "passes a NumPy array of values" in said and "to foreign" in said
    with pytest.raises(ZeroDivisionError):  # an error of the program's own stays
        gspmd.plan(lambda x: x * (1 / (np.ndim(x.numpy()) - 1)), torch.ones(4), mesh=MESH)
