"""The prover: every rule says of its operation what is true.

It runs (tests/prover.py) for each sample of each operation with a rule.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from prover import expected, one_operation, prove, shardable
from samples import SAMPLES
from torch import Tensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd
from torchgspmd import Mesh, ShardSpec
from torchgspmd.compat.operators import AbsentOperator, aten, prims
from torchgspmd.fx_passes import partition_graph, propagate_layouts
from torchgspmd.fx_passes.ir import Rules, call_of, results_of
from torchgspmd.fx_passes.propagate.factors import assemble
from torchgspmd.rules import rule_of
from torchgspmd.rules.custom_ops import loops
from torchgspmd.rules.registry import RULES
from torchgspmd.rules.rewrites import REWRITES, rewrite_of

CASES = [
    pytest.param(op, i, id=f"{op}-{i}")
    for op, samples in SAMPLES.items()
    for i in range(len(samples))
]
STATISTICS = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._safe_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
}


OWN = {  # rules by name: test_transformers.py; tests/composition has rules of its own
    op for op in RULES if not isinstance(op, str) and op.namespace != "composition"
}


def test_every_rule_has_a_sample():
    # a number, which only values of unknown size have: features/unknown_sizes/test_unknown_sizes.py
    unknown = aten.sym_size.int
    # the end of a loop, which is laid out as its entry: {capture,distributed}/test_loops.py
    assert OWN - set(SAMPLES) == {unknown, loops.NEXT}


@pytest.mark.parametrize("op, number", CASES)
def test_every_factor_can_be_sharded(op, number):
    """Each over 2 and 3 devices, two at once, and over two axes."""
    args, kwargs = SAMPLES[op][number]()
    prove(op, *args, **kwargs)


@pytest.mark.parametrize("op, number", CASES)
def test_pending_sums_pass_through_what_is_linear(op, number):
    """op(x + y) = op(x) + op(y), where x and y are terms of the operands of a `linear` group."""
    args, kwargs = SAMPLES[op][number]()
    graph, node, tensors = one_operation(op, args, kwargs)
    for group in rule_of(call_of(node)).linear:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sums, terms = list(leaves), list(leaves)
        for operand in group:
            x = leaves[places[operand]]
            if x.dtype == torch.bool:
                return  # no rule leaves terms of booleans that do not exclude each other
            terms[places[operand]] = torch.randn(x.shape).mul(3).to(x.dtype)
            sums[places[operand]] = x + terms[places[operand]]
        a, b, both = (
            expected(op, *pytree.tree_unflatten(flat, tree)) for flat in (leaves, terms, sums)
        )
        coarse = min(
            (t.dtype for t in (*tensors, *both) if t.is_floating_point()),
            key=lambda d: -torch.finfo(d).eps,
            default=torch.int64,
        )
        assert_same(
            [(x + y).to(coarse) for x, y in zip(a, b)],
            [t.to(coarse) for t in both],
            f"{op}, operands {sorted(group)}",
        )


@pytest.mark.parametrize("op, number", CASES)
def test_partition_shards_the_factor_that_inputs_and_outputs_are_laid_out_by(op, number):
    mesh = Mesh(m=2)
    if not any(t.numel() for t in expected(op, *SAMPLES[op][number]())):
        pytest.skip("nothing to shard: the layout of an empty tensor costs nothing either way")
    for factor in shardable(op, *SAMPLES[op][number]()):
        graph, node, tensors = one_operation(op, *SAMPLES[op][number]())
        rule = rule_of(call_of(node))
        assignment = {factor: ("m",)}
        ins, outs = (
            [assemble(dims, assignment, rule.sizes, mesh) for dims in side]
            for side in (rule.operands, rule.results)
        )
        if None in ins or None in outs or not any(any(axes) for axes in outs):
            continue  # a factor that is summed over: whether to shard it is a question of cost
        given = {
            n: ShardSpec(axes)
            for n, axes in zip((n for n in graph.nodes if n.op == "placeholder"), ins)
        }
        wanted = {i: ShardSpec(axes) for i, axes in enumerate(outs)}
        seeds = [
            *((n, s, "") for n, s in given.items()),
            *((v, s, "") for v, s in zip(results_of(node), wanted.values())),
        ]
        propagate_layouts(graph, mesh, seeds)
        sharded = partition_graph(graph, mesh, given, wanted, Rules())
        found = next(n for n in sharded.nodes if "rule" in n.meta)
        assert found.meta["assignment"] == assignment, f"{op}: {rule}"


# -------------------------------------------------------------------------------------- taken apart


def _r(*shape) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(str(shape))))


_T = torch.tensor([0, 2, 4, 1])
_F8, _ONE = torch.float8_e4m3fn, torch.tensor(1.5)
_PIXELS = torch.tensor([4, 0, -100, 1, 2, 3, 0, 0, 1, 1, -100, 4]).reshape(3, 2, 2)


SPLIT = {op for level, op in REWRITES if level == "split"}
SPLIT.add(aten.native_layer_norm_backward.default)  # by PyTorch's decomposition


@pytest.mark.parametrize("op, number", [case for case in CASES if case.values[0] in SPLIT])
def test_operations_that_split_run_with_shards_of_what_they_need_whole(op, number):
    args, kwargs = SAMPLES[op][number]()
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def f(*given):
        rest = iter(given)
        a, k = pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
        return [t for t in pytree.tree_leaves(op(*a, **k)) if isinstance(t, Tensor)]

    rule = rule_of(call_of(one_operation(op, args, kwargs)[1]))
    for factor in rule.replicated if rule.split else ():
        for mesh in (Mesh(m=2), Mesh(m=3)):
            specs = [assemble(dims, {factor: ("m",)}, rule.sizes, mesh) for dims in rule.operands]
            plan = gspmd.plan(
                f, *tensors, mesh=mesh, in_specs=tuple(str(ShardSpec(s)) for s in specs)
            )
            assert_same(
                plan.simulate(*tensors, _poison=True),
                expected(op, args, kwargs),
                f"{op} {factor} {mesh!r}",
            )
            if op in STATISTICS:
                assert not any(c.kind == "all_gather" for c in plan.collectives), (
                    f"{op} is gathered along {factor}"
                )


_C = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
_FLOAT8 = torch.rand(4, 5).to(torch.float8_e4m3fn)
_ROWS = torch.tensor([2, 0])
DECOMPOSED = {
    aten.index.Tensor: [(_FLOAT8, [_ROWS])],
    aten.embedding.default: [(_FLOAT8, _ROWS)],
    aten.index_select.default: [(_FLOAT8, 1, _ROWS)],
    aten.select.int: [(_FLOAT8, 0, 1)],
    **dict.fromkeys(
        (aten.index_put.default, aten._unsafe_index_put.default),
        [
            (_r(4, 5), [_r(4) > 0], _r(5)),
            (_r(4, 5, 2), [None, _r(5) > 0], _r(4, 1, 2)),
            (_r(4, 5), [_r(4, 5) > 0], _r(1), True),
        ],
    ),
    aten.select_scatter.default: [(_r(4, 5), _r(4), 1, 2), (_r(4, 5), _r(5), -2, -1)],
    aten.cat.default: [([_r(4, 5), torch.empty(0), _r(4, 2)], 1)],
    aten.squeeze.default: [(_r(4, 1, 5),)],
    aten.squeeze.dim: [(_r(4, 1, 5), 1), (_r(4, 5), 1)],
    aten.squeeze.dims: [(_r(1, 4, 1, 5), [0, 2])],
    aten.convolution.default: [
        (_r(2, 3, 5, 5), _r(4, 3, 3, 3), _r(4), *_C),
        (_r(2, 3, 5, 5), _r(4, 3, 3, 3), None, *_C),
    ],
    aten.convolution_backward.default: [
        (_r(2, 4, 5, 5), _r(2, 3, 5, 5), _r(4, 3, 3, 3), [4], *_C, [True, True, True]),
        (_r(2, 4, 5, 5), _r(2, 3, 5, 5), _r(4, 3, 3, 3), None, *_C, [False, True, False]),
    ],
    aten.cholesky.default: [
        (_r(2, 3, 3) @ _r(2, 3, 3).mT + torch.eye(3),),
        (_r(3, 3) @ _r(3, 3).mT + torch.eye(3), True),
    ],
    aten.cholesky_inverse.default: [
        (_r(2, 3, 3).tril() + 3 * torch.eye(3),),
        (_r(3, 3).triu() + 3 * torch.eye(3), True),
    ],
    aten._conj.default: [(_r(3, 4).to(torch.complex64) * 1j,)],
    aten._neg_view.default: [(_r(3, 4),)],
    aten.as_strided.default: [
        (_r(4, 6), (4, 6), (6, 1)),
        (_r(4, 6), (6, 4), (1, 6)),
        (_r(4, 6), (2, 3), (12, 2), 1),
        (_r(4, 6), (3, 5), (6, 1), 7),
        (_r(2, 4, 6), (2, 7, 6, 2), (24, 3, 1, 0)),
        (_r(3, 8, 2), (3, 3, 4, 2), (16, 4, 2, 1)),
        (_r(4, 6), (4, 3), (5, 3)),
        (_r(6, 4).t(), (4, 6), (1, 4)),
        (_r(6, 4).t(), (3, 2, 5), (1, 1, 4)),
        (_r(4, 6), (), (), 5),
        (_r(4, 6), (1, 3), (1, 7)),
    ],
    aten.as_strided_copy.default: [(_r(4, 6), (2, 3), (12, 2), 1)],
    aten.as_strided_scatter.default: [
        (_r(4, 6), _r(2, 3), (2, 3), (12, 2), 1),
        (_r(6, 4).t(), _r(3, 2), (3, 2), (1, 4)),
    ],
    prims.as_strided_scatter.default: [(_r(4, 6), _r(2, 3), (2, 3), (12, 2), 1)],
    aten.unfold.default: [
        (_r(4, 7), 1, 3, 2),
        (_r(4, 7), 0, 2, 2),
        (_r(4, 7), -1, 3, 1),
        (_r(4, 7), 1, 2, 3),
    ],
    aten.unfold_copy.default: [(_r(4, 7), 1, 3, 2)],
    aten.unfold_backward.default: [
        (_r(4, 3, 3), [4, 7], 1, 3, 2),
        (_r(2, 7, 2), [4, 7], 0, 2, 2),
        (_r(4, 2, 2), [4, 7], 1, 2, 3),
    ],
    aten.diagonal.default: [(_r(4, 5),), (_r(4, 5), 1), (_r(3, 4, 5), -2, 2, 0), (_r(4, 5), 9)],
    aten.diagonal_copy.default: [(_r(3, 4, 5), -2, 2, 0)],
    aten.diagonal_backward.default: [(_r(4), [4, 5], 0, 0, 1), (_r(4, 3), [3, 4, 5], -2, 2, 0)],
    aten.diagonal_scatter.default: [(_r(4, 5), _r(4)), (_r(3, 4, 5), _r(4, 3), -2, 2, 0)],
    aten.trace.default: [(_r(4, 5),), (torch.arange(9, dtype=torch.int32).reshape(3, 3),)],
    aten.take.default: [(_r(4, 5), torch.tensor([[3, 19], [-1, 0]]))],
    aten.put.default: [
        (_r(4, 5), torch.tensor([[3, 19], [-1, 0]]), _r(2, 2)),
        (_r(4, 5), _T, _r(4), True),
    ],
    aten.masked_scatter.default: [(_r(4, 5), _r(4, 5) > 0, _r(20)), (_r(4, 5), _r(5) > 0, _r(20))],
    aten.masked_scatter_backward.default: [
        (_r(4, 5), _r(4, 5) > 0, [20]),
        (_r(4, 5), _r(4, 5) > 0, [5, 6]),
        (_r(4, 5), _r(5) > 0, [20]),
    ],
    aten._unsafe_masked_index.default: [
        (_r(4, 5), _r(3) > 0, [None, torch.tensor([4, -3, 7])], 2.0)
    ],
    aten._unsafe_masked_index_put_accumulate.default: [
        (_r(4, 5), _r(3) > 0, [None, torch.tensor([4, -3, 7])], _r(4, 3))
    ],
    aten._weight_norm_interface_backward.default: [
        (_r(4, 3, 2), _r(4, 3, 2), _r(4, 1, 1), _r(4, 3, 2).norm(dim=(1, 2), keepdim=True), 0),
        (_r(4, 3, 2), _r(4, 3, 2), _r(1, 1, 2), _r(4, 3, 2).norm(dim=(0, 1), keepdim=True), 2),
    ],
    aten.std_mean.correction: [(_r(4, 5), [1], {"correction": 1, "keepdim": True}), (_r(4, 5), {})],
    aten.aminmax.default: [(_r(4, 5), {}), (_r(4, 5), {"dim": 1, "keepdim": True})],
    aten._trilinear.default: [
        (_r(3, 4), _r(5, 4, 6), _r(3, 6), [1, 3], [0], [1, 2], [2, 3]),
        (_r(3, 4), _r(5, 4), _r(3, 5), [1], [0], [2], [0]),
    ],
    aten.addbmm.default: [
        (_r(3, 5), _r(2, 3, 4), _r(2, 4, 5), {"beta": 0.5, "alpha": 2}),
        (_r(3, 5), _r(2, 3, 4), _r(2, 4, 5), {"beta": 0}),
    ],
    aten.nll_loss2d_forward.default: [
        (_r(3, 5, 2, 2), _PIXELS, w, how, -100) for w in (None, _r(5).abs()) for how in (0, 1, 2)
    ],
    aten.nll_loss2d_backward.default: [
        (_r(()) if how else _r(3, 2, 2), _r(3, 5, 2, 2), _PIXELS, w, how, -100, torch.tensor(3.0))
        for w in (None, _r(5).abs())
        for how in (0, 1, 2)
    ],
    aten.mm.default: [(_r(3, 4), _r(4, 5))],
    aten._scaled_mm.default: [
        (_r(3, 4).to(_F8), _r(4, 5).to(_F8), _ONE, _ONE, {"out_dtype": torch.float32}),
        (_r(3, 4).to(_F8), _r(4, 5).to(_F8), _ONE, _ONE, _r(5), {"out_dtype": torch.float32}),
    ],
    aten._scaled_mm_v2.default: [
        # One number for each operand; in blocks the CPU has no kernel to compare with.
        (
            *(_r(3, 4).to(_F8), _r(4, 5).to(_F8), [_ONE], [0], [0], [_ONE], [0], [0]),
            *(_r(5), torch.float32),
        ),
    ],
    aten.bmm.default: [(_r(2, 3, 4), _r(2, 4, 5))],
    aten.mv.default: [(_r(3, 4), _r(4))],
    aten.dot.default: [(_r(4), _r(4))],
    aten.vdot.default: [(_r(4), _r(4))],
    aten.addmm.default: [
        (_r(5), _r(3, 4), _r(4, 5)),
        (_r(5), _r(3, 4), _r(4, 5), dict(beta=0.5, alpha=2)),
        (_r(5) * float("nan"), _r(3, 4), _r(4, 5), dict(beta=0)),
    ],
    aten.baddbmm.default: [(_r(2, 3, 5), _r(2, 3, 4), _r(2, 4, 5), dict(beta=0.5, alpha=2))],
    aten.addcmul.default: [
        (_r(3, 4), _r(4), _r(3, 1)),
        (_r(3, 4), _r(3, 4), _r(3, 4), dict(value=0.3)),
    ],
    aten.addcdiv.default: [
        (_r(3, 4), _r(4), _r(3, 1) + 5),
        (_r(3, 4), _r(3, 4), _r(3, 4) + 5, dict(value=0.3)),
    ],
    aten.mean.dim: [
        (_r(3, 4), [1]),
        (_r(3, 4), [], True),
        (_r(3, 4), None),
        (_r(3, 4), [0], dict(dtype=torch.float64)),
    ],
    aten.mean.default: [(_r(3, 4),)],
    aten.any.dim: [(_r(3, 4) > 1, 1), (_r(3, 4) > 1, 0, True)],
    aten.any.dims: [(_r(3, 4) > 1, [0, 1])],
    aten.any.default: [(_r(3, 4) > 9,)],
    aten.all.dim: [(_r(3, 4) > 0, 1), (_r(3, 4), 0, True)],
    aten.all.dims: [(_r(3, 4) > -9, [0, 1])],
    aten.all.default: [(_r(3, 4) > -9,)],
    aten.var_mean.correction: [
        (_r(3, 4), [1]),
        (_r(3, 4), None),
        (_r(3, 4), [0], dict(correction=0, keepdim=True)),
    ],
    aten.var.correction: [(_r(3, 4), [1]), (_r(3, 4), [0, 1], dict(correction=2))],
    aten.std.correction: [(_r(3, 4), [1]), (_r(3, 4), [0], dict(correction=0, keepdim=True))],
    aten.logsumexp.default: [
        (_r(3, 4), [1]),
        (_r(3, 4), [0, 1], True),
        (_r(3, 4) - float("inf"), [1]),
    ],
    aten.arange.default: [(5,), (5.5,), (5, dict(dtype=torch.float64))],
    aten.arange.start: [(2, 5), (0.5, 4)],
    aten.zeros_like.default: [(_r(3, 4),), (_r(3), dict(dtype=torch.int64))],
    aten.ones_like.default: [(_r(3, 4),)],
    aten.full_like.default: [(_r(3, 4), 2.5), (torch.ones(3, dtype=torch.int64), 2)],
    aten.new_zeros.default: [(_r(3), [2, 4])],
    aten.new_ones.default: [(_r(3), [2, 4], dict(dtype=torch.bool))],
    aten.new_full.default: [(_r(3), [2, 4], 1.5)],
    aten.fill.Scalar: [(_r(3), 2)],
    aten.fill.Tensor: [(_r(3), torch.tensor(2))],
    aten.copy.default: [(_r(3, 4), _r(4)), (_r(3), torch.tensor([1, 2, 3]))],
    aten.native_dropout.default: [(_r(3, 4), 0.5, False), (_r(3, 4), 0.0, True)],
    aten.nll_loss_forward.default: [
        (_r(4, 5), _T, None, 1, -100),
        (_r(4, 5), _T, _r(5).abs(), 1, -100),
        (_r(4, 5), _T, _r(5).abs(), 0, 2),
        (_r(4, 5), _T, None, 2, 2),
        (_r(5), torch.tensor(3), None, 1, -100),
        (_r(4, 5), _T, None, 1, 2),
    ],
    aten.nll_loss_backward.default: [
        (_r(()), _r(4, 5), _T, None, 1, -100, torch.tensor(4.0)),
        (_r(4), _r(4, 5), _T, _r(5).abs(), 0, 2, torch.tensor(0.0)),
        (_r(()), _r(4, 5), _T, _r(5).abs(), 2, -100, torch.tensor(3.0)),
        (_r(()), _r(5), torch.tensor(3), None, 1, -100, torch.tensor(1.0)),
    ],
}
UNDEFINED = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}  # content is unspecified
_LONG = torch.full((40_000,), 0.3)
DRAWN = {  # what one device draws by PyTorch's generator has the same distribution
    aten.rand.default: ([40_000],),
    aten.rand.generator: ([40_000], dict(generator=None)),
    aten.randn.default: ([40_000],),
    aten.randn.generator: ([40_000], dict(generator=None)),
    aten.rand_like.default: (_LONG,),
    aten.randn_like.default: (_LONG,),
    aten.randint.default: (9, [40_000]),
    aten.randint.low: (-3, 1 << 20, [40_000]),
    aten.randint.generator: (9, [40_000], dict(generator=None)),
    aten.randint.low_generator: (-3, 1 << 20, [40_000], dict(generator=None)),
    aten.randint_like.default: (_LONG, 9),
    aten.randint_like.low_dtype: (_LONG, -3, 9),
    aten.bernoulli.p: (_LONG, 0.3),
    aten.bernoulli.default: (_LONG,),
    aten.bernoulli.Tensor: (_LONG, _LONG),
    aten.uniform.default: (_LONG, -2.0, 3.0),
    aten.normal_functional.default: (_LONG, -2.0, 3.0),
    aten.normal.Tensor_Tensor: (_LONG, _LONG),
    aten.normal.Tensor_float: (_LONG, 2.0),
    aten.normal.float_Tensor: (1.0, _LONG),
    aten.exponential.default: (_LONG, 2.0),
    aten.log_normal.default: (_LONG, 0.5, 0.7),
    aten.cauchy.default: (_LONG, 0.5, 2.0),
    aten.geometric.default: (_LONG, 0.3),
    aten.randperm.default: (40_000,),
    aten.randperm.generator: (40_000, dict(generator=None)),
    aten.multinomial.default: (torch.arange(9.0), 40_000, True),
    aten.native_dropout.default: (_LONG, 0.3, True),
    aten.rrelu_with_noise_functional.default: (-_LONG, _LONG, 0.1, 0.3, True),
}


def present(ops) -> list:
    """Those that this torch has."""
    return [op for op in ops if not isinstance(op, AbsentOperator)]


def call(op, given: tuple) -> list:
    *args, kwargs = given if isinstance(given[-1], dict) else (*given, {})
    torch.manual_seed(1)
    return pytree.tree_leaves(op(*args, **kwargs))


OURS = {
    op for level, op in REWRITES if level == "decompose" and not isinstance(op, str)
}  # by name: test_transformers.py


def test_every_decomposition_has_a_sample():
    assert sorted(map(str, OURS - set(DECOMPOSED) - UNDEFINED - set(DRAWN))) == []


@pytest.mark.parametrize("op", present(DECOMPOSED), ids=str)
def test_decompositions_compute_the_same(op):
    for given in DECOMPOSED[op]:
        assert_same(call(rewrite_of("decompose", op), given), call(op, given), str(op))


@pytest.mark.parametrize("op", present(DRAWN), ids=str)
def test_decompositions_draw_from_the_same_distribution(op):
    """Kolmogorov's and Smirnov's statistic of two samples: below 1.95 sqrt(2 / n) with probability
    0.999.
    """
    for got, want in zip(call(rewrite_of("decompose", op), DRAWN[op]), call(op, DRAWN[op])):
        assert got.shape == want.shape and got.dtype == want.dtype
        places = torch.cat([got, want]).double().sort()[0]
        below = [
            torch.searchsorted(t.double().sort()[0], places, right=True) / len(t)
            for t in (got, want)
        ]
        assert float((below[0] - below[1]).abs().max()) < 1.95 * (2 / len(got)) ** 0.5
        assert (
            len(got.unique()) < 100
            or abs(float(torch.corrcoef(torch.stack([got[1:], got[:-1]]).double())[0, 1])) < 0.03
        )


def test_multinomial_without_replacement():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(20_000, 4)
    torch.manual_seed(1)
    got = rewrite_of("decompose", aten.multinomial.default)(weights, 2)
    assert int((got == 0).sum()) == 0 and not bool((got[:, 0] == got[:, 1]).any())
    share = torch.bincount(got[:, 0], minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.125, 0.25, 0.625]), atol=0.015, rtol=0)
