"""Rows picked and written: losses over vocabularies, gathers and scatters, caches of keys and
values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .draw import Draw


def losses(draw: Draw):
    draw.size(b=(8, 16), s=(8, 32), m=(16, 64), v=(64, 128, 256))
    draw.layout(
        "b s m v",
        "v m",
        {
            "dp": ("b", ""),
            "vocabulary": ("b|v", "|v"),
            "fsdp": ("b", "m"),
            "fsdp vocabulary": ("b", "v"),
            "wide": ("b|m", "|m"),
            "both": ("b|v", "m|v"),
            "sp": ("b|s", "|v"),
        },
    )
    kind = draw.pick("ce", "smooth", "nll", "bag", "mse", "one_hot", "gather", "contrastive")
    draw.value("b s", high=draw.sizes["v"]), draw.weight("v m"), draw.weight("v m")

    def run(ids, table, head):
        x = F.embedding(ids, table)
        if kind == "bag":
            return F.cross_entropy(x.mean(1) @ head.T, ids[:, 0])
        if kind == "mse":
            return F.mse_loss(x, F.embedding(ids, head))
        if kind == "contrastive":
            a, b = (
                F.normalize(x.mean(1), dim=-1),
                F.normalize(F.embedding(ids, head).mean(1), dim=-1),
            )
            return F.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0]))
        logits = draw.mark(x @ head.T, "b s v")
        if kind == "one_hot":
            return -(logits.log_softmax(-1) * F.one_hot(ids, logits.shape[-1])).sum(-1).mean()
        if kind == "gather":
            return -logits.log_softmax(-1).gather(-1, ids[..., None]).mean()
        if kind == "nll":
            return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), ids.flatten(), ignore_index=3)
        return F.cross_entropy(
            logits.transpose(1, 2), ids, label_smoothing=0.1 * (kind == "smooth")
        )

    return run, ""


def indexing(draw: Draw):
    draw.size(r=(64, 128), m=(16, 32), i=(16, 32, 64), b=(8,))
    draw.layout("r m i b", "r m i")
    kind = draw.pick(
        "select",
        "take",
        "gather",
        "scatter",
        "add",
        "put",
        "embedding",
        "rows",
        "top",
        "one",
        "mask",
    )
    batched = kind in ("gather", "scatter", "rows", "one")
    table = "b r m" if batched else "r m"
    draw.weight(table, scale=1)
    updates = "b i m" if batched else "i m"
    draw.value(updates, scale=1)
    draw.value("b i" if batched else "i", high=draw.sizes["r"])

    def run(x, new, index):
        if kind == "select":
            return x.index_select(0, index) * new
        if kind == "take":
            return x[index] + new
        if kind == "gather":
            return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1])) * new
        if kind == "scatter":
            return x.scatter_add(1, index[..., None].expand(-1, -1, x.shape[-1]), new)
        if kind == "add":
            return x.index_add(0, index, new)
        if kind == "put":
            return x.index_put((index,), new, accumulate=True)
        if kind == "embedding":
            return F.embedding(index, x) @ new.T
        if kind == "rows":
            return torch.vmap(lambda t, i: t[i])(x, index) * new
        if kind == "top":
            return x.topk(4, 0).values.sum(0) * new
        if kind == "one":
            return torch.einsum("bir,brm->bim", F.one_hot(index, x.shape[1]).to(x.dtype), x) * new
        return torch.where(x > 0, x, 0).sum(0) + new

    return run, table if kind in (
        "scatter",
        "add",
        "put",
    ) else None if kind == "embedding" else updates


def cache(draw: Draw):
    draw.size(b=(8, 16), t=(32, 64), n=(8,), d=(8, 16), m=(32, 64))
    draw.sizes |= {"o": 1, "l": 4}
    draw.layout(
        "b t n d",
        "m n d",
        {
            "dp": ("b", ""),
            "tp": ("b|n", "|n"),
            "long": ("b|t", ""),
            "long tp": ("t|n", "|n"),
            "all tp": ("n", "n"),
        },
    )
    kind = draw.pick("copy", "where", "scatter", "prefill", "shift")
    draw.value("b o m", scale=1), draw.value("b t n d"), draw.value("b t n d")
    for dims in ("m n d", "m n d", "m n d", "n d m"):
        draw.weight(dims)
    draw.inputs.append(torch.tensor(5))
    draw.specs.append("")

    def written(keys, new, at):
        if kind == "copy":
            return keys.index_copy(1, at[None], new)
        if kind == "where":
            return torch.where((torch.arange(keys.shape[1]) == at)[None, :, None, None], new, keys)
        if kind == "scatter":
            return keys.scatter(1, at.expand(new.shape), new)
        if kind == "prefill":
            return torch.cat([keys[:, :4], new.expand(-1, 4, -1, -1), keys[:, 8:]], 1)
        return torch.cat([keys[:, 1:], new], 1)

    def run(x, keys, values, wq, wk, wv, wo, at):
        q, k, v = (torch.einsum("bom,mnd->bond", x, w) for w in (wq, wk, wv))
        keys, values = written(keys, k, at), written(values, v, at)
        scores = torch.einsum("bond,btnd->bnot", q, keys) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.arange(keys.shape[1]) > at + 8, -torch.inf)
        y = torch.einsum("bnot,btnd->bond", scores.softmax(-1), values)
        return torch.einsum("bond,ndm->bom", y, wo), keys, values

    draw.results = tuple(draw.specs[:3])
    return run, None
