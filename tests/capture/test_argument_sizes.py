"""plan(dynamic=): one program for all sizes of a dimension, in simulate against eager PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import torchgspmd as gspmd

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # float64


class Block(nn.Module):
    """A Transformer block, causal, with a cross entropy of the shifted tokens."""

    def __init__(self, width=12, heads=3, words=7):
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def hidden(self, tokens, padding=None):
        batch, length = tokens.shape
        x = self.embed(tokens)
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mask = None if padding is None else padding[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, tokens, padding=None):
        words = self.hidden(tokens, padding) @ self.embed.weight.T
        return F.cross_entropy(words[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def marked(mesh):
    torch.manual_seed(0)
    model = Block().double()
    if "model" in mesh.names:
        names = {"qkv": "model _", "out": "_ model", "up": "model _", "down": "_ model"}
        gspmd.annotate(model, mesh, {f"{name}.weight": spec for name, spec in names.items()})
    return model


@pytest.mark.parametrize("mesh, with_mask", (("model=2", False), ("data=2,model=3", True)))
def test_a_block_forward_and_backward(mesh, with_mask):
    mesh = gspmd.Mesh.parse(mesh)
    model = marked(mesh)

    def arguments(length):
        tokens = torch.randint(7, (4, length))
        return (tokens, torch.rand(4, length) < 0.8) if with_mask else (tokens,)

    specs = ("data _" if "data" in mesh.names else None,) + ((None,) if with_mask else ())
    plan = gspmd.plan(
        model,
        *arguments(9),
        mesh=mesh,
        in_specs=specs,
        grad=True,
        dynamic={"tokens": {1}} | ({"padding": {1}} if with_mask else {}),
    )
    for length in (9, 5, 14):
        inputs = arguments(length)
        if with_mask:
            inputs[1][:, 0] = True
        model.zero_grad()
        loss = model(*inputs)
        loss.backward()
        result, gradients = plan.simulate(*inputs)
        torch.testing.assert_close(result, loss.detach(), **TOLERANCE)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, **TOLERANCE)


def test_sizes_that_differ_by_a_number():
    def grow(cache, new, mask):
        keys = torch.cat([cache, new], 1)
        if keys.shape[1] != mask.shape[1]:
            raise ValueError("another number of rows")
        return (keys * mask[:, :, None]).sum(1), keys

    plan = gspmd.plan(
        grow,
        torch.ones(2, 6, 4),
        torch.ones(2, 1, 4),
        torch.ones(2, 7),
        mesh=gspmd.Mesh(model=2),
        in_specs=("_ _ model", None, None),
        dynamic={"cache": {1: "rows"}, "mask": {1: "rows + 1"}},
    )
    for rows in (6, 2, 31):
        inputs = torch.randn(2, rows, 4), torch.randn(2, 1, 4), torch.rand(2, rows + 1)
        for result, expected in zip(plan.simulate(*inputs), grow(*inputs)):
            torch.testing.assert_close(result, expected)
    assert not plan.collectives


def test_sizes_of_0_and_1_have_plans_of_their_own():
    """They broadcast, and programs branch on them; a plan may be made with one, too."""

    def f(x, y):
        rows = x if x.shape[0] == 1 else x * 2
        return rows + y.squeeze(1).sum(0), torch.cat([rows, y[:, 0]]).softmax(0)

    for planned in ((5, 4), (1, 4), (1, 1)):
        plan = gspmd.plan(
            f,
            torch.randn(planned[0], 3),
            torch.randn(planned[1], 1, 3),
            mesh=gspmd.Mesh(m=2),
            in_specs=("_ m", "_ _ m"),
            dynamic={"x": {0: "n"}, "y": {0: "m"}},
        )
        for n, m in ((5, 5), (1, 4), (1, 1), (6, 1), (0, 3), (1, 7)):
            inputs = torch.randn(n, 3), torch.randn(m, 1, 3)
            for result, want in zip(plan.simulate(*inputs), f(*inputs)):
                torch.testing.assert_close(result, want)
        assert plan.simulate(*inputs)[1].shape == (8, 3)


COMPARISONS = {
    "n > 6": lambda n: n > 6,
    "7 <= n": lambda n: 7 <= n,
    "3 n + 1 < 20": lambda n: 3 * n + 1 < 20,
    "20 - 2 n >= 3": lambda n: 20 - 2 * n >= 3,
    "4 < n < 9": lambda n: 4 < n < 9,
    "n <= 40, n > 5": lambda n: n <= 40 and n > 5,
    "n in a table": lambda n: n <= torch.zeros(12).shape[0],
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_plan_is_for_the_sizes_that_branch_alike(name):
    """A comparison in forward is a guard: sizes with another outcome need another plan."""
    branch = COMPARISONS[name]

    def f(x):
        return (x * 2 if branch(x.shape[0]) else x - 1).cumsum(0)

    for planned in (4, 9):
        plan = gspmd.plan(
            f,
            torch.randn(planned, 4),
            mesh=gspmd.Mesh(m=2),
            in_specs="_ m",
            dynamic={"x": {0: "n"}},
        )
        for size in (2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 41):
            x = torch.randn(size, 4)
            if branch(size) == branch(planned) and plan.captured.dynamic.has_branches_of([x.shape]):
                torch.testing.assert_close(plan.simulate(x), f(x))
            else:
                with pytest.raises(gspmd.ShardingError, match="the plan is for sizes n from"):
                    plan.simulate(x)
        alike = {n for n in range(2, 50) if branch(n) == branch(planned)}
        taken = {n for n in range(2, 50) if plan.captured.dynamic.has_branches_of([[n, 4]])}
        # A chain of comparisons may stop at its first one, so that both ends need plans.
        assert planned in taken <= alike and ("<" in name[3:] or taken == alike)


def test_gradients_of_results_of_other_sizes():
    mesh, model = gspmd.Mesh(m=4), nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8)).double()
    gspmd.annotate(model, mesh, {"0.weight": "_ m", "1.weight": "m _"})
    tokens = torch.randint(10, (8, 5))
    plan = gspmd.plan(model, tokens, mesh=mesh, grad=True, dynamic={"input": {0}})
    for rows in (8, 7, 3, 1):
        tokens = torch.randint(10, (rows, 5))
        result, gradients = plan.simulate(tokens)
        model.zero_grad()
        expected = model(tokens)
        expected.sum().backward()
        torch.testing.assert_close(result, expected.detach(), **TOLERANCE)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, **TOLERANCE)


def test_bad_sizes_are_errors():
    mesh, x = gspmd.Mesh(data=2), torch.ones(4, 6)

    def plan(dynamic, fn=lambda x: torch.relu(x), **options):
        return gspmd.plan(fn, x, mesh=mesh, dynamic=dynamic, **options)

    with pytest.raises(gspmd.ShardingError, match="dynamic names 'y', which is no tensor"):
        plan({"y": {1}})
    with pytest.raises(gspmd.ShardingError, match="dimension 2 of 'x', which has 2"):
        plan({"x": {2}})
    with pytest.raises(gspmd.ShardingError, match="'rows - 1' of dimension 1"):
        plan({"x": {1: "rows - 1"}})
    with pytest.raises(gspmd.ShardingError, match="dimension 0 of .* has a size that depends"):
        plan({"x": {0}}, lambda x: gspmd.mark_sharding(x[1:], mesh, "data _"))
    with pytest.raises(gspmd.ShardingError, match="sizes that the plan takes for one"):
        plan({"x": {0: "rows", 1: "rows"}})
    result = plan({"x": {1}})
    with pytest.raises(gspmd.ShardingError, match="the plan was made for"):
        result.simulate(torch.ones(3, 1))
    with pytest.raises(gspmd.ShardingError, match="the plan was made for"):
        result.simulate(torch.ones(5, 6))


class LastPositions(nn.Module):
    def forward(self, x):
        y = x * 2
        # A known size, in the memory of a tensor whose size is open.
        return y[:, -1:].transpose(0, 1).square().sum()


def test_no_value_of_a_program_has_a_symbol_in_its_strides():
    plan = gspmd.plan(
        LastPositions(), torch.ones(4, 8), mesh=gspmd.Mesh(data=2), dynamic={"x": {1}}
    )
    values = [node.meta.get("val") for node in plan.captured.graph.nodes]
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    assert tensors and all(type(n) is int for x in tensors for n in (*x.shape, *x.stride()))
    x = torch.randn(4, 11)
    torch.testing.assert_close(plan.simulate(x), LastPositions()(x))
