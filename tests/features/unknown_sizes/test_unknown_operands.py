"""Functions whose kernels take numbers for sizes, with sizes that only a run knows."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, message

import torchgspmd as gspmd

MESH = gspmd.Mesh(m=3)
PROGRAMS = {
    "lerp": lambda x: torch.lerp(x, x.mean(0, True), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.mean(0, True), value=0.5),
    "addcdiv": lambda x: x.addcdiv(x.sum(1, True), 2 + x.square()),
    "baddbmm": lambda x: torch.baddbmm(x[:, None, :1], x[:, :, None], x[:, None], alpha=2),
    "cosine similarity": lambda x: F.cosine_similarity(x[:, None], x[None], dim=-1),
    "attention over an open width": lambda x: F.scaled_dot_product_attention(
        x.T[None], x.T[None].sin(), x.T[None].cos()
    ),
    "one hot": lambda x: x.T * F.one_hot(x.detach().argmax(0), x.shape[0]),
    "identity": lambda x: torch.eye(x.shape[0], dtype=x.dtype) @ x,
    "linspace": lambda x: x * torch.linspace(0, 1, x.shape[0], dtype=x.dtype)[:, None],
    "whole numbers": lambda x: x * torch.linspace(1, 9, x.shape[0], dtype=torch.long)[:, None],
    "distances": lambda x: torch.cdist(x, x.flip(0) + 1),
    "trace": lambda x: (x @ x.T).trace() * x,
    "halves": lambda x: x.chunk(2)[0].sum(0) * x.chunk(2)[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_gradients(name):
    def f(x):
        y = PROGRAMS[name](x)
        return y, torch.autograd.grad(y.square().sum(), x)

    def rows(n):
        return torch.randn(n, 6, dtype=torch.double, requires_grad=True)

    plan = gspmd.plan(f, rows(7), mesh=MESH, in_specs="_ m", dynamic={"x": {0}})
    for n in (7, 2, 3, 12, 30):
        assert_same(plan.simulate(x := rows(n), _poison=True), f(x), name, terms=1 << 12)


def test_a_number_of_pieces_that_depends_on_the_size():
    x = torch.randn(7, 6)
    text = message(lambda: gspmd.plan(lambda x: x.chunk(3)[0], x, mesh=MESH, dynamic={"x": {0}}))
    assert text.startswith("the program depends on values: ")
    assert text.endswith("; or leave the size out of dynamic=")
