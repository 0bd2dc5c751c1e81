"""The operations of attention have PyTorch's numbers, also past its registry of operators."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from torchgspmd.features.attention import attention_kernels
from torchgspmd.features.attention.call import AttentionCall, of_backward, of_parts
from torchgspmd.features.attention.op import (
    attention,
    attention_backward,
    attention_backward_in_blocks,
    attention_in_blocks,
    attention_parts,
)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize(
    "dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_attention_is_pytorchs(
    dtype: torch.dtype, error: float, width: int, causal: bool, strided: bool
) -> None:
    """width: of the values. Queries and keys have 4 numbers; for other widths there is no kernel on
    CPUs.
    """
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, 3, s, n, dtype=dtype) for s, n in ((5, 4), (7, 4), (7, width), (5, width))
    )
    if strided:  # a row is not in one piece, as kernels expect
        q, k, v, grad = (t.mT.contiguous().mT for t in (q, k, v, grad))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3)
    want.backward(grad)
    out, lse = attention(q, k, v, causal, 0.3)
    found = out, *attention_backward(grad, q, k, v, out, lse, causal, 0.3)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for g, w in zip(found, (want, *(leaf.grad for leaf in leaves)), strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g, w, rtol=error, atol=error)


@pytest.mark.parametrize("width", [4, 6])
def test_attention_of_cpu_processes_goes_past_the_registry_of_operators(width: int) -> None:
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, width), "grad": (2, 3, 5, width)}
    torch.manual_seed(0)
    graph, inputs = (
        fx.Graph(),
        {name: torch.randn(shape).mT.contiguous().mT for name, shape in shapes.items()},
    )  # of strided rows
    q, k, v, grad = map(graph.placeholder, shapes)
    for node, shape in zip((q, k, v, grad), shapes.values()):
        node.meta = {"shape": shape, "dtype": torch.float32}
    both = graph.call_function(attention._opoverload, (q, k, v, True, 0.3))
    out, lse = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    back = graph.call_function(attention_backward._opoverload, (grad, q, k, v, out, lse, True, 0.3))
    graph.output((out, *(graph.call_function(operator.getitem, (back, i)) for i in range(3))))
    want = fx.GraphModule({}, graph)(*inputs.values())
    attention_kernels(SimpleNamespace(graph=graph, request=SimpleNamespace(device="cpu")))
    assert [node.target for node in graph.nodes if "in_blocks" in str(node.target)] == [
        attention_in_blocks,
        attention_backward_in_blocks,
    ]
    for g, w in zip(fx.GraphModule({}, graph)(*inputs.values()), want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("op", [attention, attention_parts, attention_backward])
def test_operands_by_name_stand_in_the_order_of_the_schema(op) -> None:
    names = [each.name for each in op._opoverload._schema.arguments]
    if op is attention_parts:
        call, count = of_parts(*names)
        assert count == "count"
    elif op is attention_backward:
        call, upstream = of_backward(*names)
        assert upstream == upstream._fields
    else:
        call = AttentionCall(*names)
    assert call == call._fields
