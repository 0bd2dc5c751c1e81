"""Small annotated programs, drawn from a seed: what people train and serve, in the layouts they use
and in random ones.

    make(17, devices=8)     the same Program whenever it is called

A family names the dimensions of its tensors by letters (b batch, s sequence, m width, ...). A
layout says which axes go to which letter, for activations and for weights apart, so that one line
describes dp, tp, sp, fsdp and all between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from torchgspmd import Mesh

from .chains import pointwise_chain, product_chain, reshard_chain, shape_chain
from .convolutions import convolutions
from .draw import Draw, Program, trained
from .experts import moe
from .rows import cache, indexing, losses
from .steps import pipeline, step
from .transformers import transformer

MESHES = {
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
UNEVEN, TRAINED, OPEN = (
    0.12,
    0.65,
    0.15,
)  # how often sizes are odd, gradients asked for, results left open
FAMILIES = (
    transformer,
    transformer,
    transformer,
    moe,
    convolutions,
    convolutions,
    losses,
    pointwise_chain,
    shape_chain,
    product_chain,
    product_chain,
    reshard_chain,
    indexing,
    cache,
    step,
    pipeline,
)
TRAINABLE = {
    transformer,
    moe,
    convolutions,
    losses,
    pointwise_chain,
    shape_chain,
    product_chain,
    reshard_chain,
    indexing,
    pipeline,
}


def make(seed: int, devices: int = 8, only: Sequence[str] = (), train: bool = True) -> Program:
    """The program of a seed. only: families to choose from; train: whether it may return gradients.
    Uneven for 3 or 6 devices.
    """
    rng = random.Random(seed)
    sizes = rng.choice(MESHES[devices])
    mesh = Mesh(**dict(zip("xyz", sizes)))
    family = rng.choice([f for f in FAMILIES if not only or f.__name__ in only])
    draw = Draw(
        rng,
        mesh,
        rng.random() < (1 if devices % 3 == 0 else UNEVEN),
        torch.Generator().manual_seed(seed),
        words=[family.__name__],
    )
    function, result = family(draw)
    inputs, specs = draw.inputs, draw.specs
    out = None if result is None or draw.flip(OPEN) else draw.spec(result, draw.activations)
    outs: str | None | tuple = draw.results or out
    if train and family in TRAINABLE and draw.flip(TRAINED, "grad"):
        y = function(*inputs)
        floats = [s for t, s in zip(inputs, specs) if t.is_floating_point()]
        function, outs = trained(function, len(inputs)), (out, *floats)
        inputs = [
            torch.randn(y.shape, generator=draw.generator) if y.dim() else torch.ones(()),
            *inputs,
        ]
        specs = [out if out is not None else " ".join("_" * y.dim()), *specs]
    return Program(
        " ".join(draw.words) + " uneven" * draw.uneven,
        mesh,
        function,
        tuple(inputs),
        tuple(specs),
        outs,
    )
