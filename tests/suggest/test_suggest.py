"""suggest finds what trying everything finds, keeps to the memory, and its code runs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgspmd as gspmd
from torchgspmd import Hardware
from torchgspmd.hardware import Link
from torchgspmd.suggest import search
from torchgspmd.suggest.proposal import Marks
from torchgspmd.suggest.shorten import like_layers, shortened

# Slow products and fast links: weights are worth dividing. The other way round: they are not.
SLOW_PRODUCTS = Hardware("slow", {4: 1e9}, 1e12, 1e9, (Link(8, 1e9, 1e-7),), launch=0.0)
SLOW_LINKS = Hardware("links", {4: 1e12}, 1e12, 1e9, (Link(8, 1e6, 1e-4),), launch=0.0)


class Feed(nn.Module):
    """Two products, of which the weights are large beside the tokens."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).square().mean()


class Classes(nn.Module):
    """A table of words and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.table(tokens)), tokens)


class Deep(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


MODELS = {
    "feed": (Feed, lambda: torch.zeros(8, 32)),
    "classes": (Classes, lambda: torch.zeros(8, dtype=torch.long)),
}


@pytest.mark.parametrize("hardware", [SLOW_PRODUCTS, SLOW_LINKS], ids=lambda h: h.name)
@pytest.mark.parametrize("name", MODELS)
def test_it_finds_what_trying_everything_finds(name, hardware):
    model, batch = MODELS[name][0](), MODELS[name][1]()
    best = gspmd.suggest(model, (batch,), devices=4, hardware=hardware, seconds=600)[0]
    captures = search._captures(model, (batch,), {})
    everything = search._Search(captures, hardware, hardware.memory, float("inf"))
    matrices = [group for group in everything.groups if len(group.shape) > 1]
    least = min(
        everything.score(mesh, Marks(tuple((p, d) for p, d in dims if d is not None), zero))
        for mesh in search._meshes(4)
        for dims in itertools.product(
            *([(g.pattern, d) for d in [None, *range(len(g.shape))]] for g in matrices)
        )
        for zero in (False, True)
    )
    assert best.seconds <= least[1] * (1 + 2 * search.MIN_GAIN)
    assert best.seconds >= best.bound


def test_less_memory_gives_other_marks():
    model, batch = Feed(128), torch.zeros(8, 128)
    free = gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_LINKS, seconds=30)[0]
    bound = free.memory / 2
    tight = gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_LINKS, memory=bound, seconds=30)
    assert tight[0].memory <= bound < free.memory and tight[0].seconds >= free.seconds


def test_its_code_gives_its_numbers():
    """Pasted, the marks lead to the plan that was judged."""
    model, batch = Feed(), torch.zeros(8, 32)
    for found in gspmd.suggest(model, (batch,), devices=4, hardware=SLOW_PRODUCTS, seconds=30):
        wrapped = {}
        names = {
            "gspmd": gspmd,
            "model": Feed(),
            "keep": lambda *a, wrapped=wrapped, **k: wrapped.update(args=a, **k),
        }
        exec(found.code.replace("gspmd.parallelize(", "keep("), names)
        model, mesh = wrapped["args"]
        result = gspmd.plan(model, batch, mesh=mesh, in_specs=wrapped["in_specs"], grad=True)
        assert result.sent_bytes == pytest.approx(found.sent_bytes)
        assert result.estimate(SLOW_PRODUCTS).seconds == pytest.approx(found.seconds)


def test_like_layers_are_judged_by_two():
    model, batch = Deep(6), torch.zeros(8, 16)
    lists, length = like_layers(model)
    assert lists == [model.layers] and length == 6
    with shortened(lists, 2):
        assert len(model.layers) == 2
    assert len(model.layers) == 6
    best = gspmd.suggest(model, (batch,), devices=2, hardware=SLOW_PRODUCTS, seconds=30)[0]
    assert best.layers == (2, 6) and "2 of 6 layers" in str(best)
    mesh = best.mesh
    whole = gspmd.plan(
        gspmd.annotate(model, mesh, best.marks), batch, mesh=mesh, in_specs=best.in_specs, grad=True
    )
    assert best.seconds == pytest.approx(whole.estimate(SLOW_PRODUCTS).seconds, rel=0.05)


def test_marks_of_the_model_do_not_count():
    """Neither those on a mesh, nor those by names, which no layout binds."""
    best = []
    for marks in ({}, {"up.weight": "hidden _"}):
        model = gspmd.annotate(Feed(), marks)
        if not marks:
            gspmd.annotate(model, gspmd.Mesh(other=3), {"up.weight": "other _"})
        best.append(gspmd.suggest(model, (torch.zeros(8, 32),), devices=2, seconds=30)[0])
    assert best[0] == best[1]


def test_what_it_does_not_take():
    with pytest.raises(gspmd.ShardingError, match="is no size"):
        gspmd.suggest(Feed(), (torch.zeros(8, 32),), devices=2, memory="much")
    assert search.size_of("80GB") == 80e9 and search.size_of("2 GiB") == 2**31
