"""Each further layer sends as many bytes as the second one, however many there are."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import moe

WIDTH, HIDDEN, HEADS, EXPERTS, TOKENS = 64, 96, 8, 8, 32
FEW, MANY = (1, 2), 5  # layers: a path through five has more products than one through three


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Tokens are sent to the experts of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(WIDTH, EXPERTS))
        self.gate, self.up = (nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.router).softmax(-1).topk(2)
        rows = moe.dispatch(x, chosen, EXPERTS, shards=EXPERTS, groups=2, capacity=1.25)
        gate, up = (moe.grouped_mm(rows.rows, w, rows.ends) for w in (self.gate, self.up))
        return moe.combine(moe.grouped_mm(F.silu(gate) * up, self.down, rows.ends), rows, weights)


class Layer(nn.Module):
    def __init__(self, feed: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.feed = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), feed()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d]
        q, k, v = self.qkv(self.first(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))


def zero(model: nn.Module, mesh: gspmd.Mesh) -> None:
    """Mark each weight's largest dimension along data (ZeRO-3)."""
    for weight in model.parameters():
        if weight.dim() > 1:
            largest = max(range(weight.dim()), key=weight.shape.__getitem__)
            words = ["_"] * weight.dim()
            words[largest] = "data:p1"
            gspmd.mark_sharding(weight, mesh, " ".join(words))


def experts(model: nn.Module, mesh: gspmd.Mesh) -> None:
    gspmd.annotate(
        model, mesh, dict.fromkeys(("*.feed.gate", "*.feed.up", "*.feed.down"), "expert _ _")
    )


def tensor(model: nn.Module, mesh: gspmd.Mesh) -> None:
    layouts = {
        "*.feed.up.weight": "model _",
        "*.feed.down.weight": "_ model",
        "*.o.weight": "_ model",
    }
    gspmd.annotate(model, mesh, {**layouts, "*": "data model _"})


@pytest.mark.parametrize(
    "feed, mesh, marks, spec",
    [
        (Feed, gspmd.Mesh(data=16), zero, "data _ _"),
        (Feed, gspmd.Mesh(data=4, model=4), tensor, "data model _"),
        (Experts, gspmd.Mesh(data=16), zero, "data _ _"),
        (Experts, gspmd.Mesh(data=2, expert=8), experts, "data+expert _ _"),
    ],
    ids=["feed zero", "feed tensor", "experts zero", "experts sent"],
)
def test_layers_cost_alike(feed, mesh, marks, spec):
    sent = {}
    for count in (*FEW, MANY):
        model = nn.Sequential(*(Layer(feed) for _ in range(count)))
        marks(model, mesh)
        x = torch.empty(TOKENS, TOKENS, WIDTH)
        sent[count] = gspmd.plan(model, x, mesh=mesh, in_specs=spec, grad=True).sent_bytes
    one, two = FEW
    assert sent[MANY] - sent[two] <= (MANY - two) * (sent[two] - sent[one])
