"""Code for a graph that takes its inputs in one list and empties it.

Each input can then be freed after its last use. A caller's argument tuple would keep every saved
activation alive until the backward ends. The convention and the name are PyTorch AOTAutograd's.
"""

from __future__ import annotations

from torch.fx.graph import CodeGen


class BoxedCodeGen(CodeGen):
    """Code generator for `def forward(self, boxed)`."""

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, **options: object
    ) -> str:
        """Return the function head, which unpacks and clears the list."""
        names = [
            name.split(":")[0].strip() for name in free_vars if name.split(":")[0].strip() != "self"
        ]
        unpack = f"({', '.join(names)},) = boxed" if names else "pass"
        return (
            f"def forward(self, boxed){maybe_return_annotation}:\n    {unpack}\n    boxed.clear()\n"
        )

    def process_inputs(self, *inputs: object) -> object:
        """Return the input list."""
        return inputs[0]
