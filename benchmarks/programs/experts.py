"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .draw import Draw

EXPERTS = {
    "ep": ("g e", "e"),
    "dp+ep": ("g|g e", "|e"),
    "ep+tp": ("g e|f", "e|f"),
    "ep replicated": ("e", "e"),
    "ep fsdp": ("g|g e", "m|e"),
}


class Experts:
    """A layer as it was drawn. kind: top1, top2 (GShard), choice (experts choose tokens), index
    (the same, without products).
    """

    def __init__(self, draw: Draw, kind: str):
        self.draw, self.kind, self.room, self.count = draw, kind, draw.sizes["c"], draw.sizes["e"]

    def __call__(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """x[g, s, m], up[e, m, f], down[e, f, m]."""
        odds = (x @ gate).softmax(-1)  # [g, s, e]
        return {"choice": self.choice, "index": self.index}.get(self.kind, self.top)(
            x, odds, up, down
        )

    def expert(self, sent: Tensor, up: Tensor, down: Tensor) -> Tensor:
        mark = self.draw.mark
        hidden = mark(torch.einsum("egcm,emf->egcf", mark(sent, "e g c m"), up).relu(), "e g c f")
        return mark(torch.einsum("egcf,efm->egcm", hidden, down), "e g c m")

    def slots(self, odds: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Each token to its best expert behind those that came before: where [g, s, e, c], and how
        many there are.
        """
        chosen = F.one_hot(odds.argmax(-1), self.count).to(odds.dtype)
        place = (chosen.cumsum(1) - chosen + before) * chosen
        kept = chosen * (place < self.room)
        where = F.one_hot((place * kept).sum(-1).long(), self.room).to(odds.dtype)
        return kept[..., None] * where[:, :, None], chosen.sum(1, keepdim=True)

    def top(self, x: Tensor, odds: Tensor, up: Tensor, down: Tensor) -> Tensor:
        mask, count = self.slots(odds, torch.zeros_like(odds[:, :1]))
        combine = mask * odds[..., None]
        if self.kind == "top2":
            second = odds * (1 - F.one_hot(odds.argmax(-1), self.count))
            more, _ = self.slots(second, count)
            mask, combine = mask + more, combine + more * second[..., None]
        y = self.expert(
            torch.einsum("gsec,gsm->egcm", self.draw.mark(mask, "g s e c"), x), up, down
        )
        return torch.einsum("gsec,egcm->gsm", combine, y)

    def choice(self, x: Tensor, odds: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, tokens = odds.transpose(1, 2).topk(self.room, -1)  # [g, e, c]
        taken = F.one_hot(tokens, x.shape[1]).to(x.dtype)  # [g, e, c, s]
        y = self.expert(torch.einsum("gecs,gsm->egcm", taken, x), up, down)
        return torch.einsum("gecs,gec,egcm->gsm", taken, weights, y)

    def index(self, x: Tensor, odds: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, tokens = odds.transpose(1, 2).topk(self.room, -1)
        rows = tokens.flatten(1)[..., None].expand(-1, -1, x.shape[-1])  # [g, e c, m]
        sent = x.gather(1, rows).unflatten(1, (self.count, self.room)).transpose(0, 1)
        y = self.expert(sent, up, down).transpose(0, 1) * weights[..., None]
        return torch.zeros_like(x).scatter_add(1, rows, y.flatten(1, 2))


def moe(draw: Draw):
    draw.size(g=(8, 16), s=(16, 32), m=(32, 64), f=(64, 128), e=(8, 16))
    draw.sizes["c"] = 2 * draw.sizes["s"] // 8
    draw.layout("g s m", "e m f", EXPERTS)
    layer = Experts(draw, draw.pick("top1", "top2", "choice", "index"))
    draw.value("g s m", scale=1), draw.weight("m e"), draw.weight("e m f"), draw.weight("e f m")
    return layer, "g s m"
