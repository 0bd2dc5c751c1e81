"""Bytes alive in a program of one device: views, what they keep alive, and copies of operands."""

import pytest
import torch
from torch import fx, nn

from torchgspmd import Mesh, plan
from torchgspmd.compat.private_apis import TorchDispatchMode
from torchgspmd.fx_passes.lower.lower_einsum import lower_einsum
from torchgspmd.rules.custom_ops.nd import einsum, einsum_bytes

ROW = 4 * 8 * 6  # bytes of a [8, 6]


def peak(f, *shapes):
    return plan(f, *map(torch.ones, shapes), mesh=Mesh(data=1)).memory.peak


def test_views_allocate_nothing():
    """The input, its double, and its exponential beside it: a view has the memory of the double."""
    assert peak(lambda x: (x * 2).exp(), (8, 6)) == 3 * ROW
    assert peak(lambda x: (x * 2).transpose(0, 1)[None].exp(), (8, 6)) == 3 * ROW


def test_a_view_keeps_all_of_its_memory_alive():
    """Of the double one row is used at the end."""
    a_row = ROW // 8
    assert peak(lambda x: (x * 2)[0] + x.exp()[0], (8, 6)) == 3 * ROW + a_row
    assert peak(lambda x: (x * 2).sum(0) + x.exp()[0], (8, 6)) == 2 * ROW + 2 * a_row


def test_parts_of_one_tensor_share_it():
    def f(x):
        a, b = (x * 2).unbind()  # [6] each
        return a.exp() + b.exp()

    assert peak(f, (2, 6)) == 4 * 12 + 4 * 12 + 2 * 4 * 6


def test_a_reshape_of_rows_that_are_apart_is_a_copy():
    assert peak(lambda x: (x * 2).transpose(0, 1).reshape(48).exp(), (8, 6)) == 3 * ROW
    assert peak(lambda x: x.transpose(0, 1).reshape(48).exp(), (8, 6)) == 3 * ROW
    assert peak(lambda x: x.reshape(48).exp(), (8, 6)) == 2 * ROW


def lowered(equation, x, y):
    """The program that an einsum becomes on a CPU."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "xy"]
    for node, value in zip(operands, (x, y)):
        node.meta |= {"shape": tuple(value.shape), "dtype": value.dtype}
    graph.output(graph.call_function(einsum._opoverload, (equation, *operands)))
    return fx.GraphModule(nn.Module(), lower_einsum(graph))


class Allocated(TorchDispatchMode):
    """Sums the bytes of new memory, whichever results are in it."""

    def __init__(self, *inputs):
        super().__init__()
        self.seen, self.bytes = [x.untyped_storage() for x in inputs], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        memory = result.untyped_storage()
        if all(memory._cdata != each._cdata for each in self.seen):
            self.seen.append(memory)
            self.bytes += memory.nbytes()
        return result


@pytest.mark.parametrize(
    "equation, x, y, copies, product",
    [
        ("bsm,hm->bsh", (2, 3, 4), (5, 4), 0, 0),
        ("bsh,bsm->hm", (2, 3, 5), (2, 3, 4), 0, 0),  # transposed views
        ("bnsd,ndm->bsm", (2, 3, 4, 5), (3, 5, 6), 2 * 3 * 4 * 5, 0),  # n and s change places
        ("bnid,bnjd->bnij", (2, 3, 4, 5), (2, 3, 6, 5), 0, 0),
        ("bsm,mhd->bhsd", (2, 3, 4), (4, 5, 6), 0, 2 * 3 * 5 * 6),  # of the product, too
        ("bind,ijnd->bnij", (2, 3, 4, 5), (3, 6, 4, 5), 2 * 60 + 3 * 6 * 20, 2 * 4 * 3 * 6),
    ],
)
def test_an_einsum_copies_operands_that_are_no_matrices(equation, x, y, copies, product):
    """What is counted, against the memory that the lowered program allocates."""
    x, y = torch.ones(x), torch.ones(y)
    with Allocated(x, y) as allocated:
        result = lowered(equation, x, y)(x, y)
    assert allocated.bytes - result.nbytes == 4 * (copies + product)
    assert einsum_bytes(equation, x.to("meta"), y.to("meta")) == 4 * max(copies, product)
