"""Linear algebra on batches of matrices, and Fourier transforms.

The dimensions of a matrix or a transform must be whole, those of a batch may be sharded. An
all_to_all moves a layout from one to the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.operators import aten
from ...compat.private_apis import OpOverload
from ..notation import Call, Rule, make_rule
from ..registry import decomposition, rule_for
from .view import keep_rule


def batched_rule(call: Call, trailing: list[int]) -> Rule:
    """Return a rule in which the last `trailing` dimensions of each tensor are whole.

    Those before are the batch, and broadcast. Padding holds 0, because a factorization of NaN may
    raise. Padding of pivots holds 1, because they count from 1.
    """
    tensors = [*call.tensors, *call.results]
    batch = torch.broadcast_shapes(
        *(t.shape[: max(t.dim() - n, 0)] for t, n in zip(tensors, trailing, strict=True))
    )
    sizes = {f"b{i}": size for i, size in enumerate(batch)}
    dims = []
    for k, (tensor, n) in enumerate(zip(tensors, trailing)):
        n = min(n, tensor.dim())  # a result that was not asked for is empty
        lead = tensor.dim() - n
        names = [
            (f"b{len(batch) - lead + i}",)
            if tensor.shape[i] == batch[len(batch) - lead + i]
            else ()
            for i in range(lead)
        ]
        own = [(f"w{k}_{i}",) for i in range(n)]
        sizes.update({name[0]: size for name, size in zip(own, tensor.shape[lead:])})
        dims.append(names + own)
    count = len(call.tensors)
    return make_rule(
        dims[:count],
        dims[count:],
        sizes,
        whole=" ".join(name for name in sizes if name[0] == "w"),
        padding={i: 1.0 if t.dtype == torch.int32 else 0.0 for i, t in enumerate(call.tensors)},
    )


def register_batched(op: OpOverload, operands: str, results: str) -> None:
    """Register an operation by the whole trailing dimensions of its tensors (2: a matrix)."""
    trailing = [int(n) for n in (operands + " " + results).split()]
    rule_for(op)(lambda call: batched_rule(call, trailing))


register_batched(aten._linalg_det.default, "2", "0 2 1")
register_batched(aten._linalg_eigh.default, "2", "1 2")
register_batched(aten._linalg_slogdet.default, "2", "0 0 2 1")
register_batched(aten.cholesky_solve.default, "2 2", "2")
register_batched(aten.geqrf.default, "2", "2 1")
register_batched(aten.linalg_cholesky_ex.default, "2", "2 0")
register_batched(aten.linalg_eig.default, "2", "1 2")
register_batched(aten.linalg_householder_product.default, "2 1", "2")
register_batched(aten.linalg_inv_ex.default, "2", "2 0")
register_batched(aten.linalg_ldl_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_ldl_solve.default, "2 1 2", "2")
register_batched(aten.linalg_lu.default, "2", "2 2 2")
register_batched(aten.linalg_lu_factor_ex.default, "2", "2 1 0")
register_batched(aten.linalg_lu_solve.default, "2 1 2", "2")
register_batched(aten.linalg_matrix_exp.default, "2", "2")
register_batched(aten.linalg_qr.default, "2", "2 2")
register_batched(aten.linalg_solve_triangular.default, "2 2", "2")
register_batched(aten.lu_unpack.default, "2 1", "2 2 2")
register_batched(aten.ormqr.default, "2 1 2", "2")
register_batched(aten.triangular_solve.default, "2 2", "2 2")


@decomposition(aten.cholesky.default)
def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Factorize without the check of values, which padding would fail."""
    return aten.linalg_cholesky_ex.default(x, upper=upper)[0]


@decomposition(aten.cholesky_inverse.default)
def _cholesky_inverse(x: Tensor, upper: bool = False) -> Tensor:
    return aten.cholesky_solve.default(
        torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape), x, upper
    )


@rule_for(aten._linalg_solve_ex.default)
def _solve(call: Call) -> Rule:
    a, b = call.tensors
    columns = 1 if b.dim() == 1 or b.shape == a.shape[:-1] else 2
    return batched_rule(call, [2, columns, columns, 2, 1, 0])


@rule_for(aten._linalg_svd.default)
def _svd(call: Call) -> Rule:
    return batched_rule(
        call, [2, 2, 1, 2] if call.argument(2, "compute_uv", True) else [2, 1, 1, 1]
    )


@rule_for(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def _fourier(call: Call) -> Rule:
    return keep_rule(call, list(call.args[1]), linear=[[0]])
