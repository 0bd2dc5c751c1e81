"""The types of the pipeline's rows: a pass, and passes that may run without one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from .program import Program
from .stages import Stage


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program.

    run: takes the program, and returns the rewritten graph; None if it changed nothing. From
    `split_joint` on it is called for the forward, and for the backward.
    needs, ensures: the stages before and after it.
    optional: names for `skip_passes`; a pass whose names are all skipped is left out.
    when: whether the pass is for this program.
    again: passes before it, or itself, that run next if it changed the program.
    in_loops: whether it runs on the bodies of loops, too.
    changes: whether it will change the program; a way without it then goes on from where it runs.
    """

    name: str
    run: Callable[[Program], fx.Graph | None]
    needs: Stage
    ensures: Stage
    optional: tuple[str, ...] = ()
    when: Callable[[Program], bool] = lambda p: True
    again: tuple[str, ...] = ()
    in_loops: bool = False
    changes: Callable[[Program], bool] = lambda p: False


@dataclass(frozen=True)
class Alternatives:
    """Passes that may run without one of them.

    order: the name of the pass that is left out, or None, for one way after the other. A pass that
    changed nothing in the first way is not left out. enough: whether to try no further way. cost:
    the cheapest way is taken, else the last one.
    """

    order: Callable[[Program], tuple[str | None, ...]]
    enough: Callable[[Program], bool]
    cost: Callable[[Program], float] | None
    passes: tuple[Pass, ...]

    @property
    def needs(self) -> Stage:
        return self.passes[0].needs


Step = Pass | Alternatives
