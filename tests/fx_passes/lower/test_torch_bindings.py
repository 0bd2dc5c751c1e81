"""The functions of Python's torch module call the ATen operations in whose place they stand."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchgspmd.compat.operators import aten
from torchgspmd.fx_passes.lower.torch_bindings import BINDINGS, torch_bindings

X, M, V, INDEX = torch.rand(2, 3, 4), torch.rand(4, 4), torch.rand(4), torch.tensor([1, 0])
ARGUMENTS = {
    aten._log_softmax.default: (X, -1, False),
    aten._softmax.default: (X, -1, False),
    aten.amax.default: (X, [0, 1], True),
    aten.add.Tensor: (X, V),
    aten.sub.Tensor: (X, V),
    aten.mul.Tensor: (X, V),
    aten.div.Tensor: (X, V),
    aten.eq.Tensor: (X, V),
    aten.add_.Tensor: (X, V),
    aten.sub_.Tensor: (X, V),
    aten.mul_.Tensor: (X, V),
    aten.div_.Tensor: (X, V),
    aten.addmm.default: (V, M, M),
    aten.addmm_.default: (M, M, M),
    aten.linear.default: (X, M, V),
    aten.matmul.default: (X, M),
    aten.bmm.default: (X, X.mT),
    aten.mm.default: (M, M),
    aten.cat.default: ([X, X], 1),
    aten.embedding.default: (M, INDEX, -1, False, False),
    aten.expand.default: (V, [3, 4]),
    aten.gelu.default: (X,),
    aten.native_layer_norm.default: (X, [4], V, V, 1e-5),
    aten.ne.Scalar: (X, 3),
    aten.permute.default: (X, [1, 0, 2]),
    aten.reshape.default: (X, [6, 4]),
    aten.select.int: (X, 0, 1),
    aten.split_with_sizes.default: (X, [1, 3], 2),
    aten.squeeze.dims: (X, [0, 1]),
    aten.sum.dim_IntList: (X, [0], True),
    aten.transpose.int: (X, -2, -1),
    aten.unsqueeze.default: (X, 0),
    aten.where.self: (X > 0.5, X, V),
    aten.scatter_add_.default: (M, 1, INDEX[:, None], X[0]),
}


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_the_same_operation_is_called(op):
    arguments = ARGUMENTS.get(op, (X,))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(op, arguments if op in ARGUMENTS else (X,)))
    with Watch() as direct, torch.no_grad():
        want = op(*copy.deepcopy(arguments))
    with Watch() as bound, torch.no_grad():
        got = (
            torch_bindings(graph)
            .find_nodes(op="call_function", target=BINDINGS[op])[0]
            .target(*copy.deepcopy(arguments))
        )
    assert bound.seen == direct.seen
    torch.testing.assert_close(got, want, rtol=0, atol=0)
