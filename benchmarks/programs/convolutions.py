"""Stacks of convolutions, pooling and norms, in one to three dimensions."""

from __future__ import annotations

import torch.nn.functional as F

from .draw import Draw

PLANES = {
    "batch": ("b", ""),
    "space": ("h", ""),
    "batch+space": ("b|h", ""),
    "space 2d": ("h|w", ""),
    "batch+channel": ("b|c o", "|o"),
    "channel": ("c o", "o c"),
    "fsdp": ("b", "o"),
    "batch+space 2d": ("b|h|w", ""),
}
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolutions(draw: Draw):
    rank = draw.random.choice([1, 2, 2, 2, 3])
    draw.words.append(f"{rank}d")
    draw.size(
        b=(8,),
        c=(8, 16),
        h=(16, 32, 64) if rank < 3 else (16, 32),
        w=(16, 32) if rank < 3 else (8, 16),
    )
    draw.sizes |= {"z": 8, "r": 3, "o": draw.sizes["c"], "p": 1, "g": draw.sizes["c"]}
    draw.layout("b c h w", "o c", PLANES)
    space = "h w z"[: 2 * rank - 1]
    group = "conv" if draw.sizes["c"] % 2 else "group"  # two groups need an even number of channels
    kinds = [
        draw.pick(
            "conv",
            "stride",
            "dilate",
            "depthwise",
            group,
            "up",
            "pool",
            "avg",
            "norm",
            "wide",
            "point",
            "residual",
        )
        for _ in range(draw.random.choice([1, 2, 3]))
    ]
    draw.value(f"b c {space}", scale=1)
    for kind in kinds:
        draw.sizes["r"] = {"wide": 7, "up": 2, "point": 1}.get(kind, 3)
        draw.sizes["i"] = (
            1
            if kind == "depthwise"
            else draw.sizes["c"] // 2
            if kind == "group"
            else draw.sizes["c"]
        )
        if kind not in ("pool", "avg", "norm"):
            dims = "c o" if kind == "up" else "o i" if kind in ("depthwise", "group") else "o c"
            draw.weight(
                dims + " r" * rank, scale=(draw.sizes["i"] * draw.sizes["r"] ** rank) ** -0.5
            )

    def layer(kind, x, rest):
        if kind in ("pool", "avg"):
            pool = {
                ("pool", 1): F.max_pool1d,
                ("pool", 2): F.max_pool2d,
                ("pool", 3): F.max_pool3d,
                ("avg", 1): F.avg_pool1d,
                ("avg", 2): F.avg_pool2d,
                ("avg", 3): F.avg_pool3d,
            }[kind, rank]
            return pool(x, 2)
        if kind == "norm":
            return F.batch_norm(x, None, None, training=True).relu()
        w = rest.pop(0)
        if kind == "up":
            return TRANSPOSED[rank](x, w, stride=2)
        y = CONVS[rank](
            x,
            w,
            stride=2 if kind == "stride" else 1,
            dilation=2 if kind == "dilate" else 1,
            padding=(w.shape[-1] // 2) * (2 if kind == "dilate" else 1),
            groups=x.shape[1] if kind == "depthwise" else 2 if kind == "group" else 1,
        )
        return x + y if kind == "residual" else y.tanh()

    def run(x, *weights):
        rest = list(weights)
        for kind in kinds:
            x = layer(kind, x, rest)
        return x

    halved = sum(k in ("stride", "pool", "avg") for k in kinds) - kinds.count("up")
    return run, None if halved > 2 or draw.uneven else f"b c {space}"
