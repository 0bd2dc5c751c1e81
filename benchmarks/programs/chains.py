"""Random operations one after the other, with random marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from torchgspmd import mark_sharding

from .draw import MARKED, Draw, random_spec


class Chain:
    """Steps on one value, drawn one after the other while its dimensions are followed; each is a
    function of it and the other arguments.
    """

    def __init__(self, draw: Draw, dims: str):
        self.draw, self.dims, self.steps = draw, dims.split(), []
        draw.value(dims, scale=1)

    def add(
        self, word: str, step: Callable, dims: Sequence[str] | None = None, marked: bool = True
    ) -> None:
        self.draw.words.append(word)
        self.steps.append(step)
        self.dims = list(dims if dims is not None else self.dims)
        if marked and self.draw.flip(MARKED):
            spec = random_spec(self.draw, self.dims)
            self.steps.append(lambda x, args, spec=spec: mark_sharding(x, self.draw.mesh, spec))

    def made(self):
        def run(x, *args):
            for step in self.steps:
                x = step(x, args)
            return x

        return run, " ".join(self.dims)


def pointwise_chain(draw: Draw):
    draw.size(a=(8, 16, 32), b=(16, 32), c=(8, 16, 64))
    draw.layout("a b c", "a b c")
    chain = Chain(draw, "a b c")
    for _ in range(draw.random.randint(2, 6)):
        d = draw.random.randrange(3)
        name = chain.dims[d]
        kind = draw.random.choice(
            [
                "gelu",
                "exp",
                "bias",
                "scale",
                "softmax",
                "cumsum",
                "center",
                "normalize",
                "max",
                "sort",
                "residual",
                "layer",
                "logsumexp",
            ]
        )
        if kind == "bias":
            at = draw.weight(name)
            shape = [-1 if i == d else 1 for i in range(3)]
            chain.add(kind, lambda x, args, at=at, shape=shape: x + args[at - 1].view(shape))
        elif kind == "scale":
            at = draw.weight(" ".join(chain.dims))
            chain.add(kind, lambda x, args, at=at: x * args[at - 1])
        else:
            chain.add(
                f"{kind}{d}",
                {
                    "gelu": lambda x, _: F.gelu(x),
                    "exp": lambda x, _: x.clamp(-2, 2).exp(),
                    "softmax": lambda x, _, d=d: x.softmax(d),
                    "cumsum": lambda x, _, d=d: x.cumsum(d) / x.shape[d],
                    "center": lambda x, _, d=d: x - x.mean(d, keepdim=True),
                    "normalize": lambda x, _, d=d: F.normalize(x, dim=d),
                    "max": lambda x, _, d=d: x - x.amax(d, keepdim=True),
                    "sort": lambda x, _, d=d: x.sort(d).values,
                    "residual": lambda x, _: x + x.tanh(),
                    "layer": lambda x, _: F.layer_norm(x, x.shape[-1:]),
                    "logsumexp": lambda x, _, d=d: x - x.logsumexp(d, keepdim=True),
                }[kind],
            )
    return chain.made()


MOVES = {
    "roll": lambda x, d: x.roll(1, d),
    "flip": lambda x, d: x.flip(d),
    "tanh": lambda x, d: x.tanh(),
    "shift": lambda x, d: torch.cat(
        [torch.zeros_like(x.narrow(d, 0, 1)), x.narrow(d, 0, x.shape[d] - 1)], d
    ),
}
SIZED = {
    "cat": (lambda n: 2 * n, lambda x, d: torch.cat([x, x.cos()], d)),
    "repeat": (lambda n: 2 * n, lambda x, d: x.repeat_interleave(2, d)),
    "pad": (lambda n: n + 4, lambda x, d: F.pad(x.movedim(d, -1), (1, 3)).movedim(-1, d)),
    "slice": (lambda n: n // 2, lambda x, d: x.narrow(d, 0, x.shape[d] // 2)),
    "split": (
        lambda n: n // 2,
        lambda x, d: (
            x.narrow(d, 0, x.shape[d] // 2) * x.narrow(d, x.shape[d] // 2, x.shape[d] // 2)
        ),
    ),
    "step": (lambda n: -(-n // 2), lambda x, d: x.movedim(d, 0)[::2].movedim(0, d)),
}


def shape_chain(draw: Draw):
    """Dimensions that are joined, divided, cut, lengthened and moved."""
    draw.size(a=(8, 16, 32), b=(16, 32), c=(8, 16))
    draw.layout("a b c", "a b c")
    chain = Chain(draw, "a b c")
    for step in range(draw.random.randint(2, 5)):
        d = draw.random.randrange(len(chain.dims))
        kind = draw.random.choice(
            [*MOVES, *SIZED, "another", "flatten", "unflatten", "transpose", "mean"]
        )
        name, dims = chain.dims[d], chain.dims
        size, new = draw.sizes[name], f"{name}{step}"
        if kind in MOVES:
            chain.add(kind, lambda x, _, d=d, move=MOVES[kind]: move(x, d))
        elif kind in SIZED:
            draw.sizes[new] = SIZED[kind][0](size)
            chain.add(
                kind,
                lambda x, _, d=d, change=SIZED[kind][1]: change(x, d),
                [*dims[:d], new, *dims[d + 1 :]],
            )
        elif kind == "another":
            at, draw.sizes[new] = draw.value(" ".join(dims)), 2 * size
            chain.add(
                kind,
                lambda x, args, d=d, at=at: torch.cat([x, args[at - 1]], d),
                [*dims[:d], new, *dims[d + 1 :]],
            )
        elif kind == "flatten" and d + 1 < len(dims) > 2:
            draw.sizes[new] = size * draw.sizes[dims[d + 1]]
            chain.add(
                kind, lambda x, _, d=d: x.flatten(d, d + 1).sin(), [*dims[:d], new, *dims[d + 2 :]]
            )
        elif kind == "unflatten" and size % 2 == 0 and len(dims) < 4:
            draw.sizes |= {new: 2, f"{new}i": size // 2}
            chain.add(
                kind,
                lambda x, _, d=d: x.unflatten(d, (2, -1)).sin(),
                [*dims[:d], new, f"{new}i", *dims[d + 1 :]],
            )
        elif kind == "transpose" and len(dims) > 1:
            chain.add(
                kind, lambda x, _: x.transpose(0, -1).contiguous(), [dims[-1], *dims[1:-1], dims[0]]
            )
        elif kind == "mean" and len(dims) > 2:
            chain.add(kind, lambda x, _, d=d: x.mean(d), [*dims[:d], *dims[d + 1 :]])
    return chain.made()


def product_chain(draw: Draw):
    draw.size(a=(8, 16, 64), b=(16, 32, 128), c=(16, 64), d=(32, 128))
    draw.layout("a b", "a b c d")
    batched = draw.flip(0.4, "batched")
    draw.sizes["l"] = 8
    chain = Chain(draw, "l a b" if batched else "a b")
    for _ in range(draw.random.randint(2, 5)):
        last = chain.dims[-1]
        kind = draw.random.choice(
            ["mm", "mm", "mm", "tanh", "transpose", "gram", "residual", "branch"]
        )
        new = draw.random.choice("abcd")
        if kind == "mm":
            own = random_spec(draw, [last, new])
            at = draw.weight(f"{last} {new}", scale=draw.sizes[last] ** -0.5)
            draw.specs[at] = own
            chain.add(kind, lambda x, args, at=at: x @ args[at - 1], [*chain.dims[:-1], new])
        elif kind == "branch":
            first, second = (
                draw.weight(f"{last} {last}", scale=draw.sizes[last] ** -0.5) for _ in range(2)
            )
            draw.specs[first], draw.specs[second] = (
                random_spec(draw, [last, last]),
                random_spec(draw, [last, last]),
            )
            chain.add(
                kind,
                lambda x, args, i=first, j=second: (x @ args[i - 1]).sigmoid() * (x @ args[j - 1]),
            )
        elif kind == "gram":
            chain.add(kind, lambda x, _: x.mT @ x / x.shape[-2], [*chain.dims[:-2], last, last])
        elif kind == "transpose":
            chain.add(kind, lambda x, _: x.mT, [*chain.dims[:-2], last, chain.dims[-2]])
        else:
            chain.add(
                kind, {"tanh": lambda x, _: x.tanh(), "residual": lambda x, _: x + x.tanh()}[kind]
            )
    return chain.made()


def reshard_chain(draw: Draw):
    draw.size(a=(8, 16, 64), b=(16, 32), c=(8, 16))
    draw.layout("a b c")
    chain = Chain(draw, "a b c")
    for _ in range(draw.random.randint(2, 4)):
        spec = random_spec(draw, chain.dims)
        chain.add(
            f"[{spec}]", lambda x, _, spec=spec: mark_sharding(x, draw.mesh, spec), marked=False
        )
        if draw.flip(0.7):
            chain.add("", lambda x, _: x.sin(), marked=False)
        if draw.flip(0.3):
            chain.add(
                "t", lambda x, _: x.permute(2, 0, 1), [chain.dims[2], *chain.dims[:2]], marked=False
            )
    return chain.made()
