"""Linear algebra on matrix batches.

A matrix's own dimensions must be whole, batch dimensions may be sharded. An all_to_all moves a
layout from one to the other. Right-hand sides of a system are solved each by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..notation import Call, FactorRule, LocalForm, factors
from ..registry import ordered, rule_for
from ..rewrites import rewrite
from .pointwise import broadcast_dims


def batched_rule(call: Call, trailing: list[int], sides: int | None = None) -> FactorRule:
    """Return a rule in which each tensor's last `trailing` dimensions are whole.

    Those before are the batch, and broadcast. Padding holds 0, because factorizing NaN may raise.
    Padding of pivots holds 1, because they count from 1. sides: the operand with the right-hand
    sides of a system.
    """
    tensors, count = [*call.tensors, *call.results], len(call.tensors)
    leads = [max(t.dim() - n, 0) for t, n in zip(tensors, trailing, strict=True)]
    batch = torch.broadcast_shapes(*(t.shape[:lead] for t, lead in zip(tensors, leads)))
    names = factors("b", len(batch))
    dims = [
        broadcast_dims(t.shape[:lead], batch, names) + factors(f"w{k}_", t.dim() - lead)
        for k, (t, lead) in enumerate(zip(tensors, leads))
    ]
    if sides is not None:
        column = -1 if call.kwargs.get("left", True) else -2
        dims[sides][column] = dims[count][column] = "side"
    fill = {i: 1.0 if t.dtype == torch.int32 else 0.0 for i, t in enumerate(call.tensors)}
    return call.rule(
        dims[:count],
        dims[count:],
        dict(zip(names, batch)),
        replicated=[name for row in dims for name in row if name[:1] == "w"],
        linear=[] if sides is None else [[sides]],
        local=LocalForm(fill=fill),
    )


def register_batched(op: OpOverload, operands: str, results: str, sides: int | None = None) -> None:
    """Register an operation by its tensors' whole trailing dimensions (2: a matrix)."""
    trailing = [int(n) for n in (operands + " " + results).split()]
    rule_for(op)(lambda call: batched_rule(call, trailing, sides))


# The whole trailing dimensions of each operand, and of each result.
register_batched(aten._linalg_det.default, "2", "0 2 1")
register_batched(aten._linalg_eigh.default, "2", "1 2")
register_batched(aten._linalg_slogdet.default, "2", "0 0 2 1")
register_batched(aten.cholesky_solve.default, "2 2", "2", sides=0)
register_batched(aten.geqrf.default, "2", "2 1")
register_batched(aten.linalg_cholesky_ex.default, "2", "2 0")
register_batched(aten.linalg_eig.default, "2", "1 2")
register_batched(aten.linalg_householder_product.default, "2 1", "2")
register_batched(aten.linalg_inv_ex.default, "2", "2 0")
register_batched(aten.linalg_ldl_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_ldl_solve.default, "2 1 2", "2", sides=2)
register_batched(aten.linalg_lu.default, "2", "2 2 2")
register_batched(aten.linalg_lu_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_lu_solve.default, "2 1 2", "2", sides=2)
register_batched(aten.linalg_matrix_exp.default, "2", "2")
register_batched(aten.linalg_qr.default, "2", "2 2")
register_batched(aten.linalg_solve_triangular.default, "2 2", "2", sides=1)
register_batched(aten.lu_unpack.default, "2 1", "2 2 2")
register_batched(aten.ormqr.default, "2 1 2", "2")
register_batched(aten.triangular_solve.default, "2 2", "2 2")


# They factor a contiguous real matrix by its transpose, and so do the formulas of their gradients.
for _op in (aten._linalg_det.default, aten._linalg_slogdet.default):
    ordered(_op, "A")


@rewrite("decompose", aten.cholesky.default)
def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Factorize without checking values: padding would fail."""
    return aten.linalg_cholesky_ex.default(x, upper=upper)[0]


@rewrite("decompose", aten.cholesky_inverse.default)
def _cholesky_inverse(x: Tensor, upper: bool = False) -> Tensor:
    return aten.cholesky_solve.default(
        torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape), x, upper
    )


@rule_for(aten._linalg_solve_ex.default)
def _solve(call: Call) -> FactorRule:
    a, b = call.tensors
    # PyTorch reads b as a batch of vectors if it has a's shape without the columns.
    columns = 1 if b.dim() == 1 or b.shape == a.shape[:-1] else 2
    return batched_rule(call, [2, columns, columns, 2, 1, 0])


@rule_for(aten._linalg_svd.default)
def _svd(call: Call) -> FactorRule:
    with_vectors = call.argument(2, "compute_uv", True)
    # Without vectors PyTorch returns two empty tensors in their place.
    return batched_rule(call, [2, 2, 1, 2] if with_vectors else [2, 1, 1, 1])
