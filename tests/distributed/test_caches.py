"""KV caches in arguments, buffers and attributes, against one process: values, layout, bytes."""

import copy
import warnings

import torch
import torch.nn.functional as F
from ranks import distributed
from torch import nn
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 11, 3  # 3 heads and 11 rows: uneven on every mesh
ROWS = BATCH * HEADS * LENGTH * WIDTH * 8  # bytes of a cache


class Layer(nn.Module):
    """Attention of new tokens to a cache, into which each way of writing puts keys and values."""

    def __init__(self, write):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 6)
        self.write = write

    def attend(self, x, position, keys, values):
        tokens = x.shape[1]
        q, k, v = self.qkv(x).view(BATCH, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        rows = position + torch.arange(tokens)
        for cache, new in ((keys, k), (values, v)):
            if self.write == "index_copy":
                cache.index_copy_(2, rows, new)
            elif self.write == "assign":
                cache[:, :, rows] = new
            else:
                cache.scatter_(2, rows[:, None].expand_as(new), new)
        mask = torch.arange(LENGTH) <= rows[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class WithArgument(Layer):
    def forward(self, x, position, cache):
        return self.attend(x, position, cache["keys"], cache["values"])


class Bare(Layer):
    def forward(self, x, position, keys, values):
        return self.attend(x, position, keys, values)


class WithAttribute(Layer):
    def forward(self, x, position, cache):
        return self.attend(x, position, self.keys, self.values)


class WithBuffer(WithAttribute):
    def __init__(self, write):
        super().__init__(write)
        self.register_buffer("keys", torch.zeros(BATCH, HEADS, LENGTH, WIDTH))
        self.register_buffer("values", torch.zeros(BATCH, HEADS, LENGTH, WIDTH))


def new_cache():
    shape = BATCH, HEADS, LENGTH, WIDTH
    return {name: torch.zeros(shape, dtype=torch.float64) for name in ("keys", "values")}


def steps(model, cache):
    """The results for a prompt of five tokens, then for three single ones."""
    x = torch.randn(BATCH, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 8)):
            results.append(model(x[:, first:last], torch.tensor(first), cache))
    return torch.cat(results, 1)


def check(kind, write, layout, mesh):
    """Compare two generations, the second with new caches if they are arguments."""
    torch.manual_seed(0)
    reference = kind(write).double()
    expected_cache = new_cache()
    if kind is WithAttribute:
        reference.__dict__.update(expected_cache)
    model = copy.deepcopy(reference)
    expected = steps(reference, expected_cache)
    if kind is not WithArgument:
        expected_cache = {name: getattr(reference, name) for name in expected_cache}
        cache = {name: getattr(model, name) for name in expected_cache}
    gspmd.annotate(model, mesh, {"out.weight": "_ model"})
    sharded = model
    for _ in range(2 if kind is WithArgument else 1):
        cache = new_cache() if kind is WithArgument else cache
        for tensor in cache.values():
            gspmd.mark_sharding(tensor, mesh, layout)
        if sharded is model:
            sharded = gspmd.parallelize(model, mesh)
        torch.testing.assert_close(steps(sharded, cache), expected, rtol=1e-10, atol=1e-10)
        now = cache if kind is WithArgument else {name: getattr(model, name) for name in cache}
        for name, tensor in now.items():
            assert isinstance(tensor, DTensor)
            assert tensor.to_local().numel() < tensor.numel()
            torch.testing.assert_close(
                tensor.full_tensor(), expected_cache[name], rtol=1e-10, atol=1e-10
            )
        assert sharded.plan.sent_bytes < ROWS, sharded.plan
        programs = sum(map(len, sharded._programs.values()))
        assert programs == 2  # one for the prompt, one for a token


@distributed("model=2")
def test_heads_in_every_place(mesh):
    for kind in (WithArgument, WithBuffer, WithAttribute):
        check(kind, "index_copy", "_ model _ _", mesh)


@distributed("model=2,seq=2")
def test_every_way_to_write(mesh):
    check(WithArgument, "assign", "_ model seq _", mesh)
    check(WithBuffer, "scatter", "_ _ seq _", mesh)
    check(WithAttribute, "index_copy", "seq model _ _", mesh)


@distributed("model=2")
def test_an_argument_itself_is_gathered_with_a_warning(mesh):
    model = gspmd.parallelize(Bare("index_copy"), mesh)
    keys, values = (torch.zeros(BATCH, HEADS, LENGTH, WIDTH) for _ in range(2))
    gspmd.mark_sharding(keys, mesh, "_ model _ _")
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(torch.ones(BATCH, 1, 6), torch.tensor(0), keys, values)
    (text,) = [str(w.message) for w in caught if "gathered" in str(w.message)]
    assert text.startswith("'keys' is marked '_ model _ _' and changed in place, but gathered by ")
    assert "test_caches.py" in text
    assert keys[:, :, 0].all()
