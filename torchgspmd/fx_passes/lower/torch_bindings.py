"""Call ATen operations through torch's Python functions, which parse arguments twice as fast.

before   %y = aten.addmm.default(%b, %x, %w)         4.7 us a call on two vectors (torch 2.13, CPU)
after    %y = torch.addmm(%b, %x, %w)                3.1 us
needs    to be the last pass, since the others expect ATen operations
ensures  the same ATen operation is called with the same arguments (a test watches the dispatcher)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from ...compat.operators import aten
from ...compat.private_apis import _log_softmax, _softmax, is_missing


class BoxedCodeGen(CodeGen):
    """Code for a graph that takes its inputs in one list and empties it: `forward(self, boxed)`.

    Each input can then be freed after its last use. A caller's argument tuple would keep every
    saved activation alive until the backward ends. The convention and the name are AOTAutograd's.
    """

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


BINDINGS: dict[Any, Any] = {
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.abs.default: torch.abs,
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addmm.default: torch.addmm,
    aten.addmm_.default: torch.Tensor.addmm_,
    aten.amax.default: torch.amax,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.contiguous.default: torch.Tensor.contiguous,
    aten.cos.default: torch.cos,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.embedding.default: torch.embedding,
    aten.eq.Tensor: torch.eq,
    aten.exp.default: torch.exp,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.linear.default: torch.nn.functional.linear,
    aten.log.default: torch.log,
    aten.matmul.default: torch.matmul,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.ne.Scalar: torch.ne,
    aten.neg.default: torch.neg,
    aten.neg_.default: torch.Tensor.neg_,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.scatter_add_.default: torch.Tensor.scatter_add_,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sin.default: torch.sin,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sqrt.default: torch.sqrt,
    aten.squeeze.dims: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.sub_.Tensor: torch.Tensor.sub_,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.where.self: torch.where,
}
# Some functions are private, and not every version of torch has them.
_PRESENT = {op: function for op, function in BINDINGS.items() if not is_missing(function)}


def torch_bindings(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _PRESENT.get(node.target, node.target)
    return graph
