"""Random choices of a program: sizes, layouts by letters of dimensions, arguments, marks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchgspmd import Mesh, mark_sharding

MARKED = 0.3  # how often a value is marked
Axes = tuple[str, ...]


@dataclass
class Program:
    """function(*inputs) on one device is what simulated devices have to compute."""

    name: str
    mesh: Mesh
    function: Callable
    inputs: tuple[Tensor, ...]
    in_specs: tuple[str, ...]
    out_specs: str | None | tuple[str | None, ...]


@dataclass
class Draw:
    """Random choices, and the arguments of the program that is being made."""

    random: random.Random
    mesh: Mesh
    uneven: bool
    generator: torch.Generator
    sizes: dict[str, int] = field(default_factory=dict)
    activations: dict[str, Axes] = field(default_factory=dict)
    weights: dict[str, Axes] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    marked: dict[str, bool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # of the program's name
    results: tuple[str, ...] = ()  # layouts of the results, where there are several

    def pick(self, *options):
        found = self.random.choice(options)
        self.words.extend([found] if isinstance(found, str) else [])
        return found

    def flip(self, chance: float = 0.5, word: str = "") -> bool:
        found = self.random.random() < chance
        self.words.extend([word] if found and word else [])
        return found

    def size(self, **choices: Sequence[int]) -> None:
        """Sizes of letters; odd ones if the program is uneven."""
        for name, options in choices.items():
            self.sizes[name] = self.random.choice(options) - (
                self.uneven and self.flip(0.4) and min(options) > 3
            )

    def spec(self, dims: str, layout: Mapping[str, Axes]) -> str:
        """Words of a spec; an axis goes to the first dimension that has it, and to none that is
        smaller than it.
        """
        words, used = [], set()
        for name in dims.split():
            axes = tuple(a for a in layout.get(name, ()) if a not in used)
            if (
                not axes
                or self.sizes[name] < self.mesh.count(axes)
                or not self.uneven
                and self.sizes[name] % self.mesh.count(axes)
            ):
                axes = ()
            used |= set(axes)
            words.append("+".join(axes) or "_")
        return " ".join(words)

    def argument(
        self, dims: str, layout: Mapping[str, Axes], scale: float = 0.3, high: int = 0
    ) -> int:
        """A tensor argument; its place among them."""
        shape = [self.sizes[name] for name in dims.split()]
        self.inputs.append(
            torch.randint(high, shape, generator=self.generator)
            if high
            else torch.randn(shape, generator=self.generator) * scale
        )
        self.specs.append(self.spec(dims, layout))
        return len(self.inputs) - 1

    def value(self, dims: str, **how) -> int:
        return self.argument(dims, self.activations, **how)

    def weight(self, dims: str, **how) -> int:
        return self.argument(dims, self.weights, **how)

    def mark(self, t: Tensor, dims: str) -> Tensor:
        """Some values are marked: the same ones in every call of the program."""
        if self.marked.setdefault(dims, self.random.random() < MARKED):
            return mark_sharding(t, self.mesh, self.spec(dims, self.activations))
        return t

    def layout(self, activations: str, weights: str = "", *named: Mapping[str, str]) -> None:
        """Chooses who has which axes. named: layouts that people use, as "letters for the first
        axis, ..., for the last".
        """
        names = self.mesh.names
        if named and self.flip(0.75):
            name, (acts, params) = self.random.choice(list(self.random.choice(named).items()))
            self.words.append(name)
            self.activations, self.weights = spread(acts, names), spread(params, names)
            return
        self.words.append("random")
        for letters, target in ((activations, self.activations), (weights, self.weights)):
            for axis in names:
                if letters and self.flip(0.8):
                    letter = self.random.choice(letters.split())
                    target[letter] = target.get(letter, ()) + (axis,)


def spread(text: str, names: Sequence[str]) -> dict[str, Axes]:
    """ "b|s|n f" on axes x, y, z: x for b, y for s, z for n and f. Fewer axes: the last ones go.
    More: the first group has them.
    """
    groups = [g.split() for g in text.split("|")]
    groups = (
        groups[: len(names)]
        if len(groups) > len(names)
        else [groups[0]] * (len(names) - len(groups)) + groups
    )
    found: dict[str, Axes] = {}
    for axis, letters in zip(names, groups):
        for letter in letters:
            found[letter] = found.get(letter, ()) + (axis,)
    return found


def trained(function: Callable, count: int) -> Callable:
    """The result and the gradients of the first floating arguments, for a cotangent."""

    def run(dy: Tensor, *args: Tensor):
        leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
        y = function(*leaves)
        return y, *torch.autograd.grad(y, [a for a in leaves[:count] if a.is_floating_point()], dy)

    return run


def random_spec(draw: Draw, dims: Sequence[str]) -> str:
    """Each axis to a random dimension that it divides, or to none."""
    found: list[Axes] = [()] * len(dims)
    for axis in draw.mesh.names:
        d = draw.random.randrange(len(dims) + 1) if dims else 0
        if d < len(dims) and draw.sizes[dims[d]] % draw.mesh.count(found[d] + (axis,)) == 0:
            found[d] += (axis,)
    return " ".join("+".join(axes) or "_" for axes in found)
