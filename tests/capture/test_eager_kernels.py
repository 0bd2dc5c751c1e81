"""Programs with tensors without elements, and what eager PyTorch refuses, from op_db's samples."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardingError
from torchgspmd.fx_passes.pass_runner import InternalError

MESH = Mesh(a=2)
DTYPES = (torch.float64, torch.float32, torch.complex64, torch.int64, torch.bool)
# PyTorch's CPU kernel contradicts its own meta kernel, or the results have no content.
ODD = {"addmv", "new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided"}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".strip(".")


OPS = {name_of(op): op for op in op_db if op.name not in ODD}


def as_program(op: Any, sample: Any) -> tuple[Any, list[Tensor]]:
    """A function of a sample's tensors, and the tensors."""
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Any:
        filled = dict(zip(places, tensors))
        x, args, kwargs = pytree.tree_unflatten(
            [filled.get(i, leaf) for i, leaf in enumerate(leaves)], tree
        )
        return op.op(x, *args, **kwargs)

    return run, [leaves[i] for i in places]


def with_gradient(run: Any) -> Any:
    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [
            t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors
        ]
        outs = [o for o in pytree.tree_leaves(run(*inputs)) if isinstance(o, Tensor)]
        outs = [o for o in outs if o.requires_grad]
        loss = sum(o.abs().sum() for o in outs)
        wrt = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True)
        return (*(o.detach() for o in outs), *grads)

    return both


@pytest.mark.parametrize("name", OPS)
def test_a_size_of_zero(name: str) -> None:
    """A size of a sample becomes 0: the numbers are eager's, or both refuse the program."""
    op, draw = OPS[name], random.Random(name)
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    samples = list(op.sample_inputs("cpu", dtype)) if dtype else []
    if not samples:
        pytest.skip("op_db has no sample for the CPU")
    run, tensors = as_program(op, draw.choice(samples))
    size = draw.choice(sorted({n for t in tensors for n in t.shape if n}) or [0])
    tensors = [
        t.new_empty([0 if n == size else n for n in t.shape]) if size in t.shape else t
        for t in tensors
    ]
    if any(t.layout != torch.strided for t in tensors) or not tensors:
        pytest.skip("layouts are for dense tensors")
    if dtype in op.supported_backward_dtypes("cpu") and draw.random() < 0.5:
        run = with_gradient(run)
    torch.manual_seed(0)
    try:
        expected = run(*(t.clone() for t in tensors))
    except Exception:
        expected = None
    sharded = [draw.randrange(t.dim()) if t.dim() else 0 for t in tensors]
    specs = tuple(
        " ".join("a" if d == e else "_" for d in range(t.dim())) for t, e in zip(tensors, sharded)
    )
    try:
        plan = gspmd.plan(run, *tensors, mesh=MESH, in_specs=specs)
        torch.manual_seed(0)
        results = plan.simulate(*tensors)
    except ShardingError:
        return  # docs/limits.md: values that only a run knows, sparse results
    except Exception as error:
        assert expected is None and type(error).__name__ != "InternalError", error
        return
    for mine, one in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected)):
        if isinstance(one, Tensor):
            torch.testing.assert_close(mine, one, equal_nan=True, rtol=1e-4, atol=1e-5)


def mixed(function: Any, *tensors: Tensor) -> Any:
    return pytest.param(function, tensors, id=function.__name__)


X, Y = torch.rand(4, 3), torch.rand(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "function, tensors",
    [
        mixed(torch.polar, X, Y),
        mixed(torch.complex, Y, X),
        mixed(torch.lerp, X, Y, X),
        mixed(torch.addcmul, X, X, Y),
        mixed(torch.where, X > 0.5, X, Y),
        mixed(torch.hypot, X, Y),
        mixed(torch.atan2, X, Y),
        mixed(torch.nextafter, X, Y),
        mixed(torch.heaviside, X, Y),
        mixed(torch.nn.functional.prelu, X, Y[0]),
        mixed(torch.nn.functional.mse_loss, X, Y),
        mixed(torch.nn.functional.huber_loss, X, Y),
        mixed(torch.nn.functional.binary_cross_entropy, X, Y),
        mixed(torch.matmul, X, Y.T),
        mixed(torch.cdist, X, Y),
        mixed(torch.linalg.solve, X[:3], Y[:3]),
        mixed(torch.dot, X[0], Y[0]),
    ],
)
@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, None), (None, torch.complex128)])
def test_dtypes_that_eager_refuses_are_refused(function: Any, tensors: Any, dtypes: Any) -> None:
    """Floating operands of two dtypes: eager's numbers and dtype, or an error before the run."""
    casts = {torch.float32: dtypes[0], torch.float64: dtypes[1]}
    tensors = [t.to(casts.get(t.dtype) or t.dtype) for t in tensors]
    try:
        expected = function(*tensors)
    except Exception:
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            gspmd.plan(function, *tensors, mesh=MESH)
        return
    specs = tuple(" ".join("a_"[d > 0] for d in range(t.dim())) for t in tensors)
    plan = gspmd.plan(function, *tensors, mesh=MESH, in_specs=specs)
    torch.testing.assert_close(plan.simulate(*tensors), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x: torch.cov(x), [(2, 3, 4)]),
        (lambda x, w: torch.cov(x, aweights=w), [(2, 3), (2,)]),
        (lambda x, w: torch.cov(x, fweights=w), [(2, 3), (3,)]),
        (lambda x: torch.corrcoef(x), [(2, 3, 4)]),
        (lambda x, y: torch.nn.functional.gaussian_nll_loss(x, y, y, reduction="x"), [(3,), (3,)]),
    ],
)
def test_rewrites_refuse_as_their_functions(function: Any, shapes: Any) -> None:
    tensors = [torch.rand(shape) for shape in shapes]
    with pytest.raises((RuntimeError, ValueError)) as eager:
        function(*tensors)
    with pytest.raises(eager.type, match=str(eager.value)[:20].partition("(")[0]):
        gspmd.plan(function, *tensors, mesh=MESH)


# The kernel looks at values, or at the generator: a trace has none.
BY_VALUES = {"uniform", "cov", "multinomial"}
WRONG = {name: op for name, op in OPS.items() if op.error_inputs_func and op.name not in BY_VALUES}


@pytest.mark.parametrize("name", WRONG)
def test_calls_that_eager_refuses_are_refused(name: str) -> None:
    """op_db's wrong calls: shapes, dtypes and memory of operands, and of out=."""
    op = WRONG[name]
    for error in [*op.error_inputs("cpu")][:12]:
        sample = error.sample_input
        args = sample.input, *sample.args
        try:
            op.op(*args, **sample.kwargs)
        except Exception:
            with pytest.raises(Exception) as raised:
                plan = gspmd.plan(op.op, *args, mesh=MESH, **sample.kwargs)
                plan.simulate(*args, **sample.kwargs)
            assert not isinstance(raised.value, InternalError), raised.value


def written(kind: str, draw: random.Random) -> Any:
    """A function that writes into memory of its own: in place or by out=."""
    op = draw.choice([torch.add, torch.mul, torch.maximum, torch.sub])
    rows = draw.randrange(1, 3)
    dtype = draw.choice([torch.int64, torch.bool])

    def f(x: Tensor) -> Tensor:
        y = x * 1
        if kind == "overlap":
            return op(y[:-rows], x[rows:], out=y[rows:])
        if kind == "in place":
            y[rows:].add_(y[:-rows])
            return y
        if kind == "repeated":
            return op(x, x, out=x[:, :1].clone().expand(*x.shape))
        if kind == "dtype":
            return op(x, x, out=torch.empty(*x.shape, dtype=dtype))
        if kind == "reduced dtype":
            return torch.amax(x, 1, out=torch.empty(x.shape[0], dtype=torch.float32))
        if kind == "apart":
            return op(y[:rows], x[:rows], out=y[-rows:])
        if kind == "itself":
            return op(y, x, out=y)
        if kind == "wider dtype":
            return op(x.float(), x.float(), out=torch.empty(*x.shape, dtype=torch.float64))
        assert kind == "empty"
        return op(x, x, out=torch.empty(0, dtype=x.dtype))

    return f


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind",
    ["overlap", "in place", "repeated", "dtype", "reduced dtype"]
    + ["apart", "itself", "wider dtype", "empty"],
)
def test_what_a_call_writes(kind: str, seed: int) -> None:
    """Memory in common and other dtypes are refused as in eager, or the numbers are eager's."""
    f = written(kind, random.Random(f"{kind} {seed}"))
    x = torch.randn(6, 4, dtype=torch.float64)
    try:
        expected = f(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:30])):
            gspmd.plan(f, x, mesh=MESH, in_specs="a _").simulate(x)
    else:
        assert kind in ("apart", "itself", "wider dtype", "empty")
        plan = gspmd.plan(f, x, mesh=MESH, in_specs="a _")
        torch.testing.assert_close(plan.simulate(x), expected)


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "squeeze_", "resize_", "out"])
def test_an_argument_that_gets_another_shape(change: str) -> None:
    def f(x: Tensor) -> Tensor:
        if change == "out":
            return torch.add(torch.ones(3, 2), 1.0, out=x)
        return getattr(x, change)(*{"unsqueeze_": (0,), "resize_": (2, 2)}.get(change, ())).sum()

    with pytest.raises(ShardingError, match="the program changes the shape of tensor 0"):
        gspmd.plan(f, torch.ones(1, 4), mesh=MESH)


def test_arguments_that_share_memory() -> None:
    """Views of one tensor with common elements are refused, columns beside each other are not."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y).sum()

    base = torch.arange(12.0)
    plan = gspmd.plan(f, torch.ones(3), torch.ones(3), mesh=MESH)
    with pytest.raises(ShardingError, match="one tensor is passed as 'x' and 'y'"):
        plan.simulate(base[:3], base[2:5])
    columns = base.clone().view(3, 4)
    assert plan.simulate(columns[:, 0], columns[:, 1]) == 12 + 15
    assert columns[:, 0].tolist() == [1, 9, 17]
