"""Runs one rank's program operation by operation, for tools that look at its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from ..runtime.joint_program import JointProgram


class RankInterpreter(fx.Interpreter):
    """Interpreter for a rank's forward or backward."""

    def call(self, inputs: Sequence[object]) -> Any:
        """Run on inputs; a list is emptied, as a backward does."""
        values = [*inputs]
        if isinstance(inputs, list):
            inputs.clear()
        return self.run(*values, enable_io_processing=False)


def interpret(
    program: JointProgram, owner: nn.Module, make: Callable[[fx.GraphModule], RankInterpreter]
) -> None:
    """Replace both halves of a program by an interpreter. owner: has the constants."""
    # Modules around the owner, where an Interpreter looks constants up.
    forward = fx.GraphModule(owner, program.forward.__self__.graph)
    backward = fx.GraphModule(owner, program.backward_graph)
    program.forward = lambda *inputs: make(forward).call(inputs)
    program.backward = lambda boxed: make(backward).call(boxed)
