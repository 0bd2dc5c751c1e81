"""Code for a graph that takes its inputs in one list, which it empties: each can be freed after its
last use.

A caller's argument tuple would keep every saved activation alive to the end of the backward. The
convention, and the name, are those of PyTorch's AOTAutograd.
"""

from __future__ import annotations

from typing import Any

from torch.fx.graph import CodeGen


class BoxedCodeGen(CodeGen):
    """`def forward(self, boxed)`"""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [
            name.split(":")[0].strip() for name in free_vars if name.split(":")[0].strip() != "self"
        ]
        unpack = f"({', '.join(names)},) = boxed" if names else "pass"
        return (
            f"def forward(self, boxed){maybe_return_annotation}:\n    {unpack}\n    boxed.clear()\n"
        )

    def process_inputs(self, *inputs: Any) -> Any:
        return inputs[0]
