"""Calls that differ in sizes only, on real processes: values, gradients and number of programs."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed, on_cpu
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchgspmd as gspmd

HEADS, WIDTH = 4, 3


class Attention(nn.Module):
    """Attention to a cache that grows, as transformers' DynamicCache does."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, HEADS * WIDTH) for _ in range(3))
        self.out = nn.Linear(HEADS * WIDTH, 6)

    def forward(self, x, cache=None):
        batch, length, _ = x.shape
        projected = (each(x).view(batch, length, HEADS, WIDTH) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in projected)
        if cache is not None:
            if "keys" in cache:
                k, v = torch.cat([cache["keys"], k], 2), torch.cat([cache["values"], v], 2)
            cache["keys"], cache["values"] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(length > 1))
        return x + self.out(y.transpose(1, 2).flatten(2))


def wrapped(model, mesh, **options):
    """The model on the mesh, heads over its axis, and a copy for one process."""
    alone = copy.deepcopy(model)
    gspmd.annotate(model, mesh, {"[qkv].weight": "model _", "out.weight": "_ model"})
    return gspmd.parallelize(model, mesh, **options), alone


def programs(model):
    return sum(map(len, model._programs.values()))


@distributed("model=2")
def test_lengths_in_training(mesh):
    model, alone = wrapped(Attention().double(), mesh)
    for step, (batch, length) in enumerate(
        ((2, 5), (2, 8), (2, 3), (2, 1), (2, 5), (3, 7), (4, 9))
    ):
        x = torch.randn(batch, length, 6, dtype=torch.float64)
        for each in (model, alone):
            each.zero_grad()
            result = each(x)
            result.square().mean().backward()
            gradients = [p.grad for p in each.parameters()]
            if each is model:
                found = [result, *(g.full_tensor() for g in gradients)]
        for value, expected in zip(found, [result, *gradients]):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        # of (2, 5), of lengths, of the length 1, and of batches besides
        assert programs(model) == (1, 2, 2, 3, 3, 4, 4)[step]


@distributed("model=2")
def test_a_cache_that_grows(mesh):
    model, alone = wrapped(Attention().double(), mesh)
    x, caches = torch.randn(2, 14, 6, dtype=torch.float64), ({}, {})
    with torch.no_grad():
        for first, last in ((0, 6), *((i, i + 1) for i in range(6, 14))):
            found, expected = (
                each(x[:, first:last], cache) for each, cache in zip((model, alone), caches)
            )
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            if first == 0:
                for tensor in caches[0].values():
                    gspmd.mark_sharding(tensor, mesh, "_ model _ _")
    assert programs(model) == 3  # of the prompt, of the first token, of all others
    for cached, whole in zip(caches[0].values(), caches[1].values()):
        assert isinstance(cached, DTensor) and cached.shape == whole.shape
        assert cached.to_local().shape[1] == HEADS // 2
        torch.testing.assert_close(cached.full_tensor(), whole)
    assert [c.kind for c in model.plan.collectives] == ["all_reduce"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if x.shape[0] % 3 else y


@distributed("data=2")
def test_a_program_that_needs_a_size_has_one_a_size(mesh):
    model = gspmd.parallelize(Branching(), mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (4, 8, 5, 4):
            x = torch.randn(size, 4)
            whole = {name: p.full_tensor() for name, p in model.named_parameters()}
            expected = torch.func.functional_call(Branching(), whole, (x,))
            torch.testing.assert_close(model(x), expected)
    (text,) = [str(w.message) for w in caught if "of its own, since" in str(w.message)]
    assert "test_changing_sizes.py" in text and programs(model) == 3


@distributed("data=2")
def test_a_sharded_dimension_of_any_size(mesh):
    model = gspmd.parallelize(nn.Linear(4, 4), mesh, in_specs=("data _ _",))
    for batch, length, count in ((4, 3, 1), (4, 5, 2), (3, 6, 3), (7, 7, 3), (2, 8, 3)):
        x = torch.randn(batch, length, 4)
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        torch.testing.assert_close(model(x), F.linear(x, whole["weight"], whole["bias"]))
        assert programs(model) == count


@distributed("data=2")
@on_cpu
def test_ranks_that_pass_other_sizes(mesh):
    model = gspmd.parallelize(nn.Linear(4, 4), mesh)
    for size in (3, 5, 6):
        model(torch.ones(size, 4))
    with pytest.raises(gspmd.ShardingError, match=r"\[7, 4\].*\[8, 4\]|\[8, 4\].*\[7, 4\]"):
        model(torch.ones(7 + torch.distributed.get_rank(), 4))


@distributed("data=2")
def test_named_sizes_and_none(mesh):
    named = gspmd.parallelize(nn.Linear(4, 4), mesh, dynamic={"input": {0}})
    numbers = gspmd.parallelize(nn.Linear(4, 4), mesh, dynamic=False)
    for size in (3, 5, 6):
        x = torch.ones(size, 4)
        for model in (named, numbers):
            whole = [p.full_tensor() for p in model.parameters()]
            torch.testing.assert_close(model(x), F.linear(x, *whole))
    assert (programs(named), programs(numbers)) == (1, 3)


@distributed("data=2")
def test_a_copy_has_had_no_calls(mesh):
    model = gspmd.parallelize(nn.Linear(4, 4), mesh)
    for each in (model, copy.deepcopy(model)):
        for size in (3, 5, 6, 7):
            each(torch.ones(size, 4))
        assert programs(each) == 2


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(self.up(x).relu()).softmax(0), x.sum(0)


@distributed("data=2")
def test_a_sharded_batch_of_any_size(mesh):
    """Whole tensors and DTensors, results that are sharded, fewer rows than devices."""
    alone = Shares().double()
    options = {"in_specs": ("data _",), "out_specs": ("data _", "_"), "dynamic": {"x": {0}}}
    model = gspmd.parallelize(copy.deepcopy(alone), mesh, **options)
    for rows in (8, 7, 3, 1):
        whole = torch.randn(rows, 4, dtype=torch.float64)
        shards = distribute_tensor(whole, model._groups.device_mesh, [Shard(0)])
        for passed in (whole.clone(), shards):
            x, passed = whole.clone().requires_grad_(), passed.requires_grad_()
            (found, total), (wanted, its_total) = model(passed), alone(x)
            assert found.shape == wanted.shape
            begin = torch.distributed.get_rank() % 2 * -(-rows // 2)
            assert found.to_local().shape == wanted[begin : begin + -(-rows // 2)].shape
            weights = torch.randn(rows, 3, dtype=torch.float64)
            for each in (model, alone):
                each.zero_grad()
            (found.full_tensor() * weights).sum().backward()
            (wanted * weights).sum().backward()
            pairs = [(found, wanted), (total, its_total), (passed.grad, x.grad)]
            pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters())]
            for one, two in pairs:
                one = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert programs(model) == 4  # of whole tensors and of shards; of 1 row and of all others


class Microbatches(Shares):
    def forward(self, x):
        parts = x.unflatten(0, (-1, 2)).transpose(0, 1)
        return sum(self.down(self.up(part).relu()).square().mean() for part in parts)


@distributed("data=2")
def test_microbatches_of_any_batch(mesh):
    """Of 6 rows in two microbatches the first rank has 4; the rank of no row has zeros."""
    alone = Microbatches().double()
    model = gspmd.parallelize(copy.deepcopy(alone), mesh, in_specs=("data _",))
    for rows in (8, 12, 6, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        for each in (model, alone):
            each.zero_grad()
        found, wanted = model(x), alone(x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        found.backward()
        wanted.backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-12)
    assert programs(model) == 2  # of 8 rows and of all others
    with pytest.raises(gspmd.ShardingError, match="size n0 is 7, .* 2 equal parts"):
        model(torch.randn(7, 4, dtype=torch.float64))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in (6, 10):
            x = torch.randn(rows, 4, dtype=torch.float64)
            shards = distribute_tensor(x, model._groups.device_mesh, [Shard(0)])
            torch.testing.assert_close(model(shards), alone(x), rtol=1e-10, atol=1e-12)
    assert any("each size has a program of its own" in str(each.message) for each in found)


class UpToABlock(nn.Module):
    """nanoGPT's way: it asserts a length, and computes short sequences otherwise."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 6), nn.Embedding(20, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        length = tokens.shape[1]
        assert length <= 20, f"{length} tokens are more than a block"
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        y = self.down(self.up(x).relu())
        return y * 2 if 3 * length + 1 > 31 else y - 1


@distributed("model=2")
def test_lengths_that_forward_compares(mesh):
    """A comparison is a guard: one program for each outcome, besides that of the first length."""
    alone = UpToABlock().double()
    marked = copy.deepcopy(alone)
    gspmd.annotate(marked, mesh, {"up.weight": "model _", "down.weight": "_ model"})
    model = gspmd.parallelize(marked, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (4, 5, 6, 9, 10, 11, 12, 20, 3, 19, 7):
            tokens = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(length))
            torch.testing.assert_close(model(tokens), alone(tokens), rtol=1e-10, atol=1e-12)
    assert programs(model) == 3
    with pytest.raises(AssertionError, match="more than a block"):
        model(torch.zeros(2, 21, dtype=torch.int64))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        q = self.q(x).unflatten(2, (4, 2)).transpose(1, 2)
        k, v = (t.unflatten(2, (1, 2)).transpose(1, 2) for t in self.kv(x).chunk(2, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@distributed("seq=2")
def test_a_sharded_sequence_of_any_length(mesh):
    """Keys travel round a ring; the second program is that of all other lengths."""
    alone = Layer().double()
    model = gspmd.parallelize(
        copy.deepcopy(alone),
        mesh,
        in_specs=("_ seq _",),
        out_specs="_ seq _",
        advanced={"regather": "all"},
    )
    for length in (8, 7, 2, 13):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        for each in (model, alone):
            each.zero_grad()
        found, wanted = model(x).full_tensor(), alone(x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        found.square().mean().backward()
        wanted.square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-12)
    assert programs(model) == 2


class LastToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        return self.up(x)[:, -1:]


@distributed("data=2")
def test_a_slice_of_known_size_is_in_a_shared_plan(mesh):
    torch.manual_seed(0)
    alone = LastToken()
    model = gspmd.parallelize(copy.deepcopy(alone), mesh, in_specs="data _ _")
    for length in (5, 7, 9):
        x = torch.randn(4, length, 4)
        found = model(x)
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, alone(x))
    assert len(model._all_programs()) == 2  # of the first length, and of all others
