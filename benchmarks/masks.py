"""Masks and biases that people publish, along a sharded sequence: numbers, bytes, balance.

    python benchmarks/masks.py [--only window] [--meshes seq=4] [--big]

Each case is plain PyTorch: flex_attention, F.scaled_dot_product_attention or varlen_attn, forward
and backward in float64 on simulated devices with poisoned padding, beside all scores of one device.
"""

from __future__ import annotations

import argparse
import math
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    _vmap_for_bhqkv,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

import torchgspmd as gspmd
from torchgspmd.features.attention import tiles as attention_tiles

warnings.filterwarnings("ignore")
B, H, HK, D = 2, 4, 2, 8


class Case(NamedTuple):
    """Functions of flex_attention. make(s, *params) returns mask_mod and score_mod.

    params(s): tensors that need gradients (floating) or do not.  inside: they are made in forward.
    """

    make: Callable[..., Any]
    params: Callable[[int], list[Tensor]] = lambda s: []
    lse: bool = False
    inside: bool = False
    square: int = 0  # a length that the case needs


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable:
    def add(make: Callable) -> Callable:
        CASES[name] = Case(make, **options)
        return make

    return add


def ends(s: int) -> list[int]:
    return [0, s // 5, s // 5 + 2, s // 2, s - s // 7, s]


def docs(s: int) -> Tensor:
    e = torch.tensor(ends(s)[1:-1])
    return (torch.arange(s, device="cpu").unsqueeze(1) >= e).sum(1)


def causal(b, h, q, k):
    return q >= k


def window_of(w):
    def window(b, h, q, k):
        return (q >= k) & (q - k < w)

    return window


@case("causal")
def _(s):
    return causal, None


@case("noop")
def _(s):
    return None, None


@case("sliding window")
def _(s):
    return window_of(max(3, s // 8)), None


@case("symmetric window")
def _(s):
    w = max(2, s // 10)
    return lambda b, h, q, k: (q - k).abs() <= w, None


@case("symmetric window torch.abs")
def _(s):
    w = max(2, s // 10)
    return lambda b, h, q, k: torch.abs(q - k) <= w, None


@case("document causal")
def _(s):
    d = docs(s)
    return lambda b, h, q, k: (d[q] == d[k]) & (q >= k), None


@case("document")
def _(s):
    d = docs(s)
    return lambda b, h, q, k: d[q] == d[k], None


@case("document window")
def _(s):
    d = docs(s)
    return and_masks(lambda b, h, q, k: d[q] == d[k], window_of(max(3, s // 9))), None


@case("document per batch row")
def _(s):
    d = torch.stack([docs(s), docs(s).flip(0)])
    return lambda b, h, q, k: (d[b, q] == d[b, k]) & (q >= k), None


@case("document per batch row, sliced")
def _(s):
    d = torch.stack([docs(s), docs(s).flip(0)])
    return lambda b, h, q, k: (d[b][q] == d[b][k]) & (q >= k), None


@case("document argument", params=lambda s: [torch.stack([docs(s), docs(s).flip(0)])], inside=True)
def _(s, d):
    return lambda b, h, q, k: (d[b, q] == d[b, k]) & (q >= k), None


@case("cu_seqlens argument", params=lambda s: [torch.tensor(ends(s))], inside=True)
def _(s, cu):
    d = torch.searchsorted(cu, torch.arange(s, device="cpu"), right=True)
    return lambda b, h, q, k: (d[q] == d[k]) & (q >= k), None


@case("prefix lm")
def _(s):
    p = s // 3
    return or_masks(causal, lambda b, h, q, k: k < p), None


@case("prefix lm per batch row")
def _(s):
    p = torch.tensor([s // 3, s // 2])
    return lambda b, h, q, k: (k < p[b]) | (q >= k), None


@case("prefix lm per document")
def _(s):
    d = docs(s)
    offsets, n = torch.tensor(ends(s)), torch.tensor([2, 1, 3, 4, 2])

    def mask(b, h, q, k):
        same = d[q] == d[k]
        inner = (q - offsets[d[q]] >= k - offsets[d[k]]) | (k - offsets[d[k]] < n[d[k]])
        return same & inner

    return mask, None


@case("doc mask mod of attention gym")
def _(s):
    d, offsets = docs(s), torch.tensor(ends(s))

    def mask(b, h, q, k):
        same = d[q] == d[k]
        return torch.where(same, window_of(5)(b, h, q - offsets[d[q]], k - offsets[d[k]]), False)

    return mask, None


@case("dilated window")
def _(s):
    w, r = max(4, s // 6), 2
    return lambda b, h, q, k: (q >= k) & (q - k < w) & ((q - k) % r == 0), None


@case("strided (Sparse Transformer)")
def _(s):
    n = 5
    return lambda b, h, q, k: (q >= k) & ((q - k < n) | ((q - k) % n == 0)), None


@case("fixed (Sparse Transformer)")
def _(s):
    n = 6
    return lambda b, h, q, k: (q >= k) & ((q // n == k // n) | (k % n >= n - 2)), None


@case("bigbird")
def _(s):
    n = -(-s // 4)
    torch.manual_seed(2)
    drawn = torch.rand(n, n) < 0.2

    def mask(b, h, q, k):
        qb, kb = q // 4, k // 4
        return (qb == 0) | (kb == 0) | ((qb - kb).abs() <= 1) | drawn[qb, kb]

    return mask, None


@case("longformer")
def _(s):
    is_global = torch.zeros(s, dtype=torch.bool)
    is_global[[0, 1, s // 2]] = True
    return lambda b, h, q, k: is_global[q] | is_global[k] | ((q - k).abs() <= 3), None


@case("natten 2d", square=36)
def _(s):
    w, kernel = 6, 3

    def mask(b, h, q, k):
        qx, qy, kx, ky = q // w, q % w, k // w, k % w
        cx = qx.clamp(kernel // 2, (w - 1) - kernel // 2)
        cy = qy.clamp(kernel // 2, (w - 1) - kernel // 2)
        return ((cx - kx).abs() <= kernel // 2) & ((cy - ky).abs() <= kernel // 2)

    return mask, None


@case("natten 3d", square=48)
def _(s):
    w = 4

    def mask(b, h, q, k):
        qt, qx, qy = q // (w * w), q % (w * w) // w, q % w
        kt, kx, ky = k // (w * w), k % (w * w) // w, k % w
        return ((qt - kt).abs() <= 1) & ((qx - kx).abs() <= 1) & ((qy - ky).abs() <= 1)

    return mask, None


@case("sliding tile (STA) 2d", square=64)
def _(s):
    def mask(b, h, q, k):
        qt, kt = q // 4, k // 4
        qx, qy, kx, ky = qt // 4, qt % 4, kt // 4, kt % 4
        cx, cy = qx.clamp(1, 2), qy.clamp(1, 2)
        return ((cx - kx).abs() <= 1) & ((cy - ky).abs() <= 1)

    return mask, None


@case("radius", square=36)
def _(s):
    def mask(b, h, q, k):
        dx, dy = (q // 6 - k // 6).float(), (q % 6 - k % 6).float()
        return torch.sqrt(dx * dx + dy * dy) <= 2.3

    return mask, None


@case("log sparse")
def _(s):
    return lambda b, h, q, k: (q >= k) & (((q - k) & (q - k - 1)) == 0), None


@case("alibi")
def _(s):
    def alibi(score, b, h, q, k):
        return score + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q)

    return causal, alibi


@case("alibi slopes captured")
def _(s):
    slopes = 2.0 ** -torch.arange(1, H + 1).double()
    return causal, lambda score, b, h, q, k: score - slopes[h] * (q - k)


@case("softcap")
def _(s):
    return None, lambda score, b, h, q, k: 2 * torch.tanh(score / 2)


@case("softcap window")
def _(s):
    return window_of(7), lambda score, b, h, q, k: torch.tanh(score / 2) * 2


@case("relative bias table")
def _(s):
    torch.manual_seed(5)
    table = torch.randn(H, 2 * s - 1, dtype=torch.float64)
    return causal, lambda score, b, h, q, k: score + table[h, q - k + s - 1]


def bucket(rel, n=8, far=20):
    rel = torch.maximum(-rel, torch.zeros_like(rel))
    exact = n // 2
    large = exact + (
        torch.log(torch.maximum(rel, torch.ones_like(rel)).double() / exact)
        / math.log(far / exact)
        * (n - exact)
    ).to(rel.dtype)
    large = torch.minimum(large, torch.full_like(large, n - 1))
    return torch.where(rel < exact, rel, large)


@case("t5 bias")
def _(s):
    torch.manual_seed(5)
    table = torch.randn(8, H, dtype=torch.float64)
    return causal, lambda score, b, h, q, k: score + table[bucket(k - q), h]


@case("per-head windows")
def _(s):
    w = torch.tensor([2, 5, 9, 30])
    return lambda b, h, q, k: (q >= k) & (q - k < w[h]), None


@case("heads of two kinds")
def _(s):
    return lambda b, h, q, k: (q >= k) & ((h % 2 == 0) | (q - k < 4)), None


@case("streaming sinks")
def _(s):
    return lambda b, h, q, k: (q >= k) & ((k < 3) | (q - k < 6)), None


@case("llama 4 chunks")
def _(s):
    return lambda b, h, q, k: (q // 8 == k // 8) & (q >= k), None


@case("jagged offsets")
def _(s):
    offsets = torch.tensor(ends(s))
    d = torch.repeat_interleave(torch.arange(5), offsets.diff())
    return lambda b, h, q, k: (d[q] == d[k]) & (q - offsets[d[q]] >= k - offsets[d[k]]), None


@case("block causal video")
def _(s):
    return lambda b, h, q, k: q // 7 >= k // 7, None


@case("block diffusion (BD3-LM)", square=48)
def _(s):
    n, size = s // 2, 4

    def mask(b, h, q, k):
        x0q, x0k = q >= n, k >= n
        bq = torch.where(x0q == 1, (q - n) // size, q // size)
        bk = torch.where(x0k == 1, (k - n) // size, k // size)
        diagonal = (bq == bk) & (x0q == x0k)
        offset = (bq > bk) & (x0k == 1) & (x0q == 0)
        block_causal = (bq >= bk) & (x0k == 1) & (x0q == 1)
        return diagonal | offset | block_causal

    return mask, None


@case("tree by table")
def _(s):
    torch.manual_seed(3)
    parent = [0] + [int(torch.randint(i, ())) for i in range(1, s)]
    anc = torch.eye(s, dtype=torch.bool)
    for i in range(1, s):
        anc[i] |= anc[parent[i]]
    return lambda b, h, q, k: anc[q, k], None


@case("tree by intervals")
def _(s):
    begin = torch.arange(s)
    end = torch.minimum(begin + 1 + (begin * 7) % 11, torch.tensor(s))
    return lambda b, h, q, k: (k <= q) & (q < end[k]), None


@case("padding lengths")
def _(s):
    n = torch.tensor([s - 3, s // 2])
    return lambda b, h, q, k: (q >= k) & (k < n[b]), None


@case("transfusion spans")
def _(s):
    span = torch.tensor([-1] * (s // 4) + [0] * (s // 3) + [-1] * (s - s // 4 - s // 3))
    return lambda b, h, q, k: (q >= k) | ((span[q] >= 0) & (span[q] == span[k])), None


@case("floor of a quotient")
def _(s):
    return lambda b, h, q, k: torch.floor(q / 5) == torch.floor(k / 5), None


@case("div rounding floor")
def _(s):
    return (
        lambda b, h, q, k: (
            torch.div(q, 5, rounding_mode="floor") >= torch.div(k, 5, rounding_mode="trunc")
        ),
        None,
    )


@case("max and min of positions")
def _(s):
    return lambda b, h, q, k: torch.maximum(q, k) - torch.minimum(q, k) <= 4, None


@case("shuffled order (any-order LM)")
def _(s):
    torch.manual_seed(1)
    order = torch.randperm(s)
    return lambda b, h, q, k: order[q] >= order[k], None


def normal(*size):
    return [torch.randn(*size, dtype=torch.float64)]


@case("learned bias h q k", params=lambda s: normal(H, s, s))
def _(s, bias):
    return causal, lambda score, b, h, q, k: score + bias[h, q, k]


@case("learned relative bias", params=lambda s: normal(H, 2 * s - 1))
def _(s, bias):
    return None, lambda score, b, h, q, k: score + bias[h, q - k + s - 1]


@case("learned t5 bias", params=lambda s: normal(8, H))
def _(s, bias):
    return causal, lambda score, b, h, q, k: score + bias[bucket(k - q), h]


@case("learned alibi slopes", params=lambda s: normal(H))
def _(s, slopes):
    return window_of(6), lambda score, b, h, q, k: score + slopes[h] * (k - q)


@case("learned gate and cap", params=lambda s: normal(H) + normal(()))
def _(s, gate, cap):
    return causal, lambda score, b, h, q, k: torch.tanh(score * gate[h]) * cap


@case("learned document bias", params=lambda s: normal(5, H))
def _(s, bias):
    d = docs(s)
    return causal, lambda score, b, h, q, k: score + bias[d[k], h] * (d[q] != d[k])


@case("learned swin table", params=lambda s: normal(121, H), square=36)
def _(s, table):
    i = torch.arange(36)
    x, y = i // 6, i % 6
    index = (x[:, None] - x + 5) * 11 + (y[:, None] - y + 5)
    return None, lambda score, b, h, q, k: score + table[index[q, k], h]


@case("lse as sinks (gpt-oss)", lse=True, params=lambda s: normal(H))
def _(s, sinks):
    return window_of(6), None


@case("lse, softcap", lse=True, params=lambda s: normal(H))
def _(s, sinks):
    return causal, lambda score, b, h, q, k: 2 * torch.tanh(score / 2)


def program(c: Case, s: int) -> Callable:
    made = None if c.params(s) or c.inside else c.make(s)
    blocks = None
    if made is not None and made[0] is not None:
        blocks = create_block_mask(made[0], B, H, s, s, device="cpu")

    def attend(q, k, v, params):
        mask, score = made or c.make(s, *params)
        block_mask = blocks
        if blocks is None and mask is not None:
            block_mask = create_block_mask(mask, B, H, s, s, device="cpu")
        aux = AuxRequest(lse=True) if c.lse else None
        out = flex_attention(q, k, v, score, block_mask, enable_gqa=True, return_aux=aux)
        if c.lse:
            out, aux = out
            out = out * torch.sigmoid(aux.lse - params[0].view(1, -1, 1)).unsqueeze(-1)
        return out

    return attend


def reference(c: Case, s: int) -> Callable:
    def attend(q, k, v, params):
        mask, score = c.make(s, *params)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if score is not None:
            args = [torch.arange(n) for n in (B, H, q.shape[2], k.shape[2])]
            f = _vmap_for_bhqkv(score, prefix=(0,))
            scores = f(scores, *args)
        if mask is not None:
            seen = create_mask(mask, B, H, q.shape[2], k.shape[2], "cpu")
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        out = (scores - torch.where(lse == -math.inf, 0, lse).unsqueeze(-1)).exp() @ v
        if c.lse:
            out = out * torch.sigmoid(lse - params[0].view(1, -1, 1)).unsqueeze(-1)
        return out

    return attend


def step(attend: Callable) -> Callable:
    def run(q, k, v, grad, *params):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        params = [x.detach().requires_grad_(x.is_floating_point()) for x in params]
        out = attend(*leaves, params)
        wrt = [*leaves, *(x for x in params if x.requires_grad)]
        return out, *torch.autograd.grad(out, wrt, grad)

    return run


MESHES = {
    "seq=2": (gspmd.Mesh(seq=2), "_ _ seq _"),
    "seq=4": (gspmd.Mesh(seq=4), "_ _ seq _"),
    "seq=8": (gspmd.Mesh(seq=8), "_ _ seq _"),
    "data=2,seq=2": (gspmd.Mesh(data=2, seq=2), "data _ seq _"),
    "seq=2,model=2": (gspmd.Mesh(seq=2, model=2), "_ model seq _"),
}


def check(name: str, c: Case, mesh: str, ring: bool) -> str:
    devices, spec = MESHES[mesh]
    s = c.square or 37
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(B, h, s, D, dtype=torch.float64) for h in (H, HK, HK, H))
    params = c.params(s)
    args = (q, k, v, grad, *params)
    specs = (spec,) * 4 + tuple(" ".join("_" * p.dim()) if p.dim() else "" for p in params)
    options = {"advanced": {"regather": "all"}} if ring else {}
    plan = gspmd.plan(step(program(c, s)), *args, mesh=devices, in_specs=specs, **options)
    want = step(reference(c, s))(*args)
    got = plan.simulate(*args, _poison=True)
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        worst = max(worst, ((a - b).abs().max() / max(1.0, b.abs().max())).item())
    nodes = [str(n.target) for n in plan.program.graph.nodes]
    flags = []
    if not worst < 1e-10:
        flags.append(f"WRONG {worst:.1e}")
    if not any("flex_attention" in t or "ring_attention" in t for t in nodes):
        flags.append("DENSE")
    if any("ring_attention" in t for t in nodes):
        flags.append("ring")
    if plan.replicated_ops:
        flags.append(f"replicated {len(plan.replicated_ops)}")
    kv = (k.nbytes + v.nbytes) / devices.size
    n = devices.count(("seq",))
    of_ring = 3 * (n - 1) * kv
    flags.append(f"{plan.sent_bytes / of_ring:.2f} of a ring")
    return ", ".join(flags)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--meshes", default="")
    parser.add_argument("-v", action="store_true")
    args = parser.parse_args()
    attention_tiles.TILE_KEYS, attention_tiles.TILE = 5, 8 * 4 * 5
    for name, c in CASES.items():
        if args.only not in name:
            continue
        for i, mesh in enumerate(MESHES):
            if args.meshes and mesh not in args.meshes.split(";"):
                continue
            begin = time.time()
            try:
                result = check(name, c, mesh, ring=i % 2 == 1)
            except Exception as error:
                if args.v:
                    traceback.print_exc()
                result = f"ERROR {type(error).__name__}: {str(error)[:300]}"
            print(f"{name:32} {mesh:14} {result}  {time.time() - begin:.1f}s", flush=True)


if __name__ == "__main__":
    main()
