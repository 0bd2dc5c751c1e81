"""Print the passes on standard error, as TORCHGSPMD_DUMP says.

1: the final graph. 2: what every pass changed, too. 3: why each value has its layout, too.
"""

from __future__ import annotations

import difflib
import os
import sys

from torch import fx

from .fx_passes.printer import graph_text, program_text
from .mesh import Mesh
from .plan import Plan


class Dump:
    """Printer that takes the graph after every pass, and the plan at the end."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.level, self.before = mesh, int(os.environ.get("TORCHGSPMD_DUMP") or 0), ""

    def __call__(self, name: str, graph: fx.Graph) -> None:
        if self.level < 2:
            return
        text = graph_text(graph, self.mesh)
        changes = difflib.unified_diff(
            self.before.splitlines(), text.splitlines(), "before", name, lineterm="", n=0
        )
        self._print(text if not self.before else "\n".join(changes), f"after {name}")
        self.before = text

    def final(self, plan: Plan) -> None:
        """Print the plan."""
        if self.level:
            self._print(str(plan), "the plan")
        if self.level > 1:
            self._print(
                program_text(plan.program.graph),
                "what each device runs, where communication begins and is waited for",
            )
        if self.level > 2:
            lines = [line for value in plan.layouts.spec for line in plan.layouts.explain(value)]
            self._print("\n".join(lines), "who sharded what, and why")

    @staticmethod
    def _print(text: str, title: str) -> None:
        print(f"---- torchgspmd: {title}\n{text}", file=sys.stderr)
