"""Programs that flatten a sharded dimension: numbers, and bytes beside the same with it kept.

`kept` is the program as one would write it for the layout; None where no other form exists.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, eager
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd import Mesh
from torchgspmd.errors import ShardingError

D, V = 8, 24  # width, vocabulary
MESHES = (Mesh(data=2, seq=4), Mesh(seq=8), Mesh(data=2, seq=2, model=2), Mesh(data=3, seq=2))
SIZES = ((6, 16), (3, 19))  # rows and tokens; the second divide on no mesh


class Model(nn.Module):
    def __init__(self, forward, out: int = D, layouts=()):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, out, bias=False)
        self.gate, self.norm = nn.Linear(D, 4, bias=False), nn.LayerNorm(D)
        self.table, self.f = nn.Embedding(V, D), forward
        for name, mesh, spec in layouts:
            gspmd.mark_sharding(self.get_parameter(name), mesh, spec)

    def forward(self, *args):
        return self.f(self, *args)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def mlp(m, x):
    return m.b(F.gelu(m.a(x)))


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y)


def flat_entropy(logits: Tensor, y: Tensor, **options) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), y.reshape(-1), **options)


def router(m, x):
    tokens = x.view(-1, D)
    weights, chosen = m.gate(tokens).softmax(-1).topk(2)
    y = sum((weights * (chosen == e)).sum(-1, keepdim=True) * m.a(tokens) for e in range(4))
    return (y.view(x.shape) + x).square().mean()


def kept_router(m, x):
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    y = sum((weights * (chosen == e)).sum(-1, keepdim=True) * m.a(x) for e in range(4))
    return (y + x).square().mean()


def frames(m, x):  # (b t) n d attention
    b, t, d = x.shape
    z = m.a(x[:, :, None].expand(b, t, 4, d)).reshape(b * t, 4, d)
    return m.b(attend(z)).view(b, t, 4, d).square().mean()


def kept_frames(m, x):
    b, t, d = x.shape
    return m.b(attend(m.a(x[:, :, None].expand(b, t, 4, d)))).square().mean()


def masked(m, x, y):
    ignored = torch.where(y % 3 == 0, -100, y)
    return flat_entropy(m.b(m.a(x)), ignored, ignore_index=-100)


def heads(m, x):
    b, s, _ = x.shape
    tokens = m.norm(x).view(-1, D)
    q, k, v = (f(tokens).view(b, s, 2, 4).transpose(1, 2) for f in (m.a, m.b, m.a))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(-1, D).square().mean()


def statistics(m, x):
    t = m.a(x).flatten(0, 1)
    return ((t - t.mean(0)) / t.std(0)).square().mean() + t.amax(0).sum() + t.logsumexp(0).sum()


def columns(m, x, y):
    t, i = m.a(x).flatten(0, 1), y.flatten() % D
    twice = torch.cat([t, t * 2], 1).square() + torch.stack([t, t], 1).flatten(1)
    return t.gather(1, i[:, None]).sum() + t[:, i[0]].sum() + twice.mean()


def where(m, x, y):
    t, seen = m.a(x).flatten(0, 1), y.flatten() > 10
    mean = (t * seen[:, None]).sum() / seen.sum()
    return mean + t.masked_fill(~seen[:, None], 0).square().mean()


def convolved(m, x):
    images = m.a(x).view(-1, 1, 2, 4)
    kernels = m.a.weight[:4, :4].reshape(4, 1, 2, 2)
    return F.max_pool2d(F.conv2d(images, kernels, padding=1), 2).square().mean()


def ordered(m, x):
    """Operations that need the flat order."""
    t = m.a(x.view(-1, D))
    sums = t.cumsum(0).tanh() + t.sort(0)[0] + t.flip(0) + t.roll(3, 0)
    return sums.square().mean() + t[5:9].sum() + t[t.argmax(0)].sum() + t.unfold(0, 4, 2).sum()


def twice_cut(m, x):
    """Windows of tokens, which cut the flattened dimension elsewhere."""
    t = m.a(x.flatten(0, 1))
    return m.b(t.view(2, -1, D).softmax(1)).square().mean()


ROWS = {  # name: flattened, kept, output width, whether it takes labels
    "mlp": (
        lambda m, x: mlp(m, x.view(-1, D)).square().mean(),
        lambda m, x: mlp(m, x).square().mean(),
    ),
    "residual": (
        lambda m, x: (mlp(m, x.view(-1, D)).view(x.shape) + x).square().mean(),
        lambda m, x: (mlp(m, x) + x).square().mean(),
    ),
    "loss": (lambda m, x, y: flat_entropy(m.b(m.a(x)), y), lambda m, x, y: entropy(m.b(m.a(x)), y)),
    "losses": (
        lambda m, x, y: sum(flat_entropy(m.b(m.a(x) * k), y) for k in (1, 2, 3)),
        lambda m, x, y: sum(entropy(m.b(m.a(x) * k), y) for k in (1, 2, 3)),
    ),
    "shifted": (
        lambda m, x, y: flat_entropy(m.b(m.a(x))[:, :-1], y[:, 1:]),
        lambda m, x, y: entropy(m.b(m.a(x))[:, :-1], y[:, 1:]),
    ),
    "masked": (masked, None),
    "router": (router, kept_router),
    "frames": (frames, kept_frames),
    "table": (
        lambda m, y: m.b(m.table(y.view(-1))).square().mean(),
        lambda m, y: m.b(m.table(y)).square().mean(),
    ),
    "heads": (heads, None),
    "statistics": (statistics, None),
    "columns": (columns, None),
    "where": (where, None),
    "convolved": (convolved, None),
    "ordered": (ordered, None),
    "result": (lambda m, x: mlp(m, x.view(-1, D)), None),
    "back": (lambda m, x: mlp(m, x.view(-1, D)).view(x.shape), lambda m, x: mlp(m, x)),
}
LABELS = {"loss", "losses", "shifted", "masked", "columns", "where"}


def arguments(name: str, size: tuple[int, int], seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*size, D, dtype=torch.float64, generator=draw)
    y = torch.randint(V, size, generator=draw)
    return (y,) if name == "table" else (x, y) if name in LABELS else (x,)


def specs_on(mesh: Mesh, args: tuple[Tensor, ...]) -> tuple[str, ...]:
    spec = "data seq" if "data" in mesh.names else "_ seq"
    return tuple(spec + " _" * (a.dim() - 2) for a in args)


def planned(f, name: str, mesh: Mesh, args, layouts=()) -> tuple[nn.Module, gspmd.Plan]:
    torch.manual_seed(1)
    model = Model(f, V if name in LABELS else D, layouts).double()
    return model, gspmd.plan(model, *args, mesh=mesh, in_specs=specs_on(mesh, args), grad=True)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_bytes(name, mesh, size):
    args = arguments(name, size)
    flat, kept = ROWS[name]
    model, plan = planned(flat, name, mesh, args)
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=1024)
    if kept is not None:
        _, other = planned(kept, name, mesh, args)
        assert plan.sent_bytes <= 1.05 * other.sent_bytes
        assert plan.memory.peak <= 1.05 * other.memory.peak
        messages = (sum(c.count for c in p.collectives) for p in (plan, other))
        assert next(messages) <= next(messages)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_certificate_covers_flattened_dimensions(mesh):
    args = arguments("columns", (3, 10))
    _, plan = planned(columns, "columns", mesh, args)
    assert "certified" in str(plan.verify())


def image_windows(x: Tensor) -> Tensor:
    b, h, w, d = x.shape
    return x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)


def windowed(m, x):
    b, h, w, d = x.shape
    y = attend(m.a(image_windows(x)))
    back = y.view(b, h // 2, w // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
    return m.b(back + x).square().mean()


def kept_windowed(m, x):
    b, h, w, d = x.shape
    y = x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).flatten(3, 4)
    y = attend(m.a(y)).unflatten(3, (2, 2)).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
    return m.b(y + x).square().mean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [(6, 32, 4), (3, 20, 6)], ids=str)
def test_windows_of_an_image_and_back(mesh, size):
    x = torch.randn(*size, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, plan = planned(windowed, "mlp", mesh, (x,))
    assert_same(plan.simulate(x, _poison=True), eager(model, x), terms=1024)
    if size[1] == 32:  # else no device has whole windows, in neither program
        _, other = planned(kept_windowed, "mlp", mesh, (x,))
        assert plan.sent_bytes <= 1.05 * other.sent_bytes


@pytest.mark.parametrize("spec", ["model _", "_ model"])
@pytest.mark.parametrize("name", ["loss", "losses", "shifted", "router", "mlp"])
def test_beside_tensor_parallelism(name, spec):
    """A vocabulary, or the width, over a third axis."""
    mesh, args = Mesh(data=2, seq=2, model=2), arguments(name, (4, 16))
    layouts = [("b.weight", mesh, spec)]
    flat, kept = ROWS[name]
    model, plan = planned(flat, name, mesh, args, layouts)
    assert_same(plan.simulate(*args, _poison=True), eager(model, *args), terms=1024)
    _, other = planned(kept, name, mesh, args, layouts)
    assert plan.sent_bytes <= 1.05 * other.sent_bytes


def test_dropout_draws_the_numbers_of_the_flat_order():
    def dropped(m, x):
        return F.dropout(m.a(x.view(-1, D)), 0.5).view(x.shape)

    (x,) = arguments("mlp", (6, 16))
    results = []
    for mesh in (Mesh(seq=1), Mesh(data=2, seq=4), Mesh(seq=8)):
        _, plan = planned(dropped, "mlp", mesh, (x,))
        torch.manual_seed(3)
        results.append(plan.simulate(x)[0])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_flat_result_has_the_layout_that_out_specs_asks_for():
    mesh, (x,) = Mesh(data=2, seq=4), arguments("mlp", (6, 16))
    model = Model(lambda m, x: mlp(m, x.view(-1, D))).double()
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data seq _", out_specs="data+seq _")
    assert str(plan.out_specs[0]) == "data+seq _"
    assert_same(plan.simulate(x, _poison=True), model(x))
    whole = 6 * 16 * D * 8
    assert plan.sent_bytes < whole / 2  # an exchange, not a gather


def test_a_flat_argument_takes_the_layout_of_its_parts():
    """Labels come flat: each device takes its own, and sends nothing."""

    def loss(m, x, y):
        return F.cross_entropy(m.b(m.a(x)).view(-1, V), y)

    x, y = arguments("loss", (6, 16))
    model = Model(loss, V).double()
    mesh = Mesh(data=2, seq=4)
    plan = gspmd.plan(model, x, y.flatten(), mesh=mesh, in_specs=("data seq _", None), grad=True)
    assert_same(
        plan.simulate(x, y.flatten(), _poison=True), eager(model, x, y.flatten()), terms=1024
    )
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


def test_a_mark_on_a_flattened_value_stays():
    mesh, (x,) = Mesh(data=2, seq=2), arguments("mlp", (4, 8))

    def marked(m, x):
        tokens = gspmd.mark_sharding(m.a(x.view(-1, D)), mesh, "data+seq _")
        return m.b(tokens).square().mean()

    model, plan = planned(marked, "mlp", mesh, (x,))
    assert_same(plan.simulate(x, _poison=True), eager(model, x), terms=1024)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x.view(-1, D)))).view(x.shape)


@pytest.mark.parametrize("indices", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("spec", ["_ _", "model _", "_ model"])
def test_rows_of_a_table_are_split_into_heads(spec, indices):
    # torch's own shape function asserts that the table has two dimensions.
    mesh = Mesh(model=2, n=2)

    def rows(table, index):
        heads = F.embedding(index, table).unflatten(-1, (3, 4)) * 1
        return gspmd.mark_sharding(heads, mesh, (None,) * (heads.dim() - 1) + ("model",)).sin()

    table, index = torch.randn(10, 12), torch.arange(math.prod(indices)).view(indices)
    plan = gspmd.plan(rows, table, index, mesh=mesh, in_specs=(spec, "_ " * index.dim()))
    assert_same(plan.simulate(table, index), rows(table, index))


def test_in_the_blocks_of_a_stack():
    torch.manual_seed(0)
    mesh, (x,) = Mesh(data=2, seq=2), arguments("mlp", (4, 8))
    blocks = [Block().double() for _ in range(3)]
    plain = nn.Sequential(*blocks)
    model = nn.Sequential(gspmd.stack(blocks))
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data seq _", out_specs="data seq _")
    assert_same(plan.simulate(x, _poison=True), plain(x), terms=1024)
    assert plan.sent_bytes == 0


def test_a_saved_plan_has_calls_on_flattened_dimensions(tmp_path):
    args = arguments("router", (4, 16))
    _, plan = planned(router, "router", Mesh(data=2, seq=2), args)
    assert "flat_" in plan.text(full=True)
    plan.save(tmp_path / "plan.json")
    loaded = gspmd.Plan.load(tmp_path / "plan.json")
    assert loaded.text(full=True) == plan.text(full=True)


def test_a_saved_plan_has_several_results_of_a_flat_call(tmp_path):
    def best(x):
        values, places = x.view(-1, D).topk(2, 1)
        return values.sum() + (values * places).sum()

    (x,) = arguments("mlp", (4, 6))
    plan = gspmd.plan(best, x, mesh=Mesh(data=2, seq=2), in_specs="data seq _")
    assert "flat_topk" in plan.text(full=True)
    assert_same(plan.simulate(x, _poison=True), best(x))
    plan.save(tmp_path / "plan.json")
    assert_same(gspmd.Plan.load(tmp_path / "plan.json").simulate(x), best(x))


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_of_reshapes(seed):
    """Merges and cuts at random borders, with operations in between."""
    draw = torch.Generator().manual_seed(seed)

    def choose(options):
        return options[int(torch.randint(len(options), (), generator=draw))]

    sizes = [choose([2, 3, 4, 6]) for _ in range(4)]
    steps = []
    shape = [*sizes]
    for _ in range(8):
        kind = choose(["merge", "cut", "act", "norm", "sum", "permute", "scan"])
        if kind == "merge":
            if len(shape) > 2:
                d = choose(range(len(shape) - 1))
                shape[d : d + 2] = [shape[d] * shape[d + 1]]
                steps.append(lambda x, d=d: x.flatten(d, d + 1))
        elif kind == "cut":
            d = choose(range(len(shape)))
            parts = [n for n in range(2, shape[d]) if shape[d] % n == 0]
            if parts:
                n = choose(parts)
                shape[d : d + 1] = [n, shape[d] // n]
                steps.append(lambda x, d=d, n=n: x.unflatten(d, (n, -1)))
        elif kind == "permute":
            order = torch.randperm(len(shape), generator=draw).tolist()
            shape = [shape[d] for d in order]
            steps.append(lambda x, order=order: x.permute(order))
        else:
            d = choose(range(len(shape)))
            steps.append(
                {
                    "act": lambda x: torch.tanh(x) * 1.5,
                    "norm": lambda x, d=d: x.softmax(d) + x.mean(d, keepdim=True),
                    "sum": lambda x, d=d: x - x.amax(d, keepdim=True),
                    "scan": lambda x, d=d: x.cumsum(d) / 4,
                }[kind]
            )

    def program(x):
        for step in steps:
            x = step(x)
        return x

    x = torch.randn(sizes, dtype=torch.float64, generator=draw)
    axes = torch.randperm(4, generator=draw).tolist()
    spec = " ".join("a" if d == axes[0] else "b" if d == axes[1] else "_" for d in range(4))
    mesh = choose([Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2)])
    try:
        plan = gspmd.plan(program, x, mesh=mesh, in_specs=spec)
    except ShardingError as error:  # more devices than rows
        assert "rows" in str(error) or "size" in str(error), error
        return
    assert_same(plan.simulate(x, _poison=True), program(x), terms=1024)
    assert math.isfinite(plan.sent_bytes)


FLATTENED = 4096 * 64  # flattened
FACTORIES = (  # the first and the last guard
    lambda x: x + torch.full((FLATTENED, D), 2.0),
    lambda x: x + torch.zeros(FLATTENED, D),
    lambda x: x * torch.arange(FLATTENED * D).view(FLATTENED, D),
    lambda x: x * torch.rand_like(x),
    lambda x: x * torch.ones_like(x),
    lambda x: x + x.new_full(x.shape, 2.0),
)


class RealTensors(TorchDispatchMode):
    """Notes the largest tensor with memory."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(results):
            if type(x) is Tensor and x.device.type != "meta":
                self.largest = max(self.largest, x.numel())
        return results


@pytest.mark.parametrize("function", FACTORIES)
def test_a_plan_on_the_meta_device_takes_no_memory(function):
    x = torch.empty(4096, 64, D, device="meta")
    with RealTensors() as seen:
        gspmd.plan(lambda x: function(x.flatten(0, 1)), x, mesh=Mesh(a=2, b=2), in_specs="a b _")
    assert seen.largest < FLATTENED
