"""Cases of attention: masks x heads x lengths x meshes x dropout x dtypes, and their numbers.

`python tests/attention_cases.py` compares all 864 of them with eager PyTorch, on simulated devices.
`torchrun --nproc-per-node 4 tests/attention_cases.py` does so with 216 in float64 on processes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchgspmd import Mesh, parallelize, plan
from torchgspmd.compiler.plan import Plan
from torchgspmd.rules.custom_ops.random import draw_seed, uniform

MESHES = {
    "seq": (Mesh(seq=4), "_ _ seq _"),
    "few_heads": (Mesh(seq=8), "_ _ seq _"),
    "model_seq": (Mesh(model=2, seq=4), "_ model seq _"),
    "three": (Mesh(data=2, seq=2, model=2), "data model seq _"),
}
KINDS = ("causal", "none", "padding", "window", "bias", "document")
EVEN, UNEVEN = ((4, 4), (8, 2), (4, 1)), ((3, 3), (12, 3), (5, 1))  # heads of queries, of keys
TWO = ((2, 2), (8, 2), (2, 1))
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Case(NamedTuple):
    """heads: 0 as many of keys, 1 groups of four, 2 one of keys."""

    kind: str
    mesh: str
    heads: int = 0
    even: bool = True
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64


def mask_of(kind: str, batch: int, heads: int, s: int, t: int) -> Tensor | None:
    """Each is as a model has it: of keys, of queries and keys, or of heads too."""
    query, key = torch.arange(s).unsqueeze(1), torch.arange(t)
    if kind == "padding":  # the second sequence is empty
        return (key < torch.tensor([t - 2, 0]).repeat(batch // 2).view(-1, 1, 1, 1))[:batch]
    if kind == "window":
        return (key <= query) & (key > query - 4)
    if kind == "bias":
        return torch.randn(1, heads, s, t, dtype=torch.float64)
    if kind == "document":
        return ((query // 5 == key // 5) & (key <= query)).expand(batch, 1, s, t)
    return None


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=gqa)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Compute what `fused` does, whose dropout is that of all scores at once."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).bool().triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).nan_to_num()  # a query without keys
    if dropout:
        shape = list(weights.shape)
        options = ([0] * 4, shape, torch.float32, torch.device("cpu"), False)
        drawn = uniform(draw_seed(), 0, shape, *options)
        weights = weights * (drawn < 1 - dropout) / (1 - dropout)
    return weights @ v


def with_gradients(attend: Callable[..., Tensor], case: Case) -> Callable[..., Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None) -> tuple:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, mask, case.kind == "causal", case.dropout)
        return out, *torch.autograd.grad(out, leaves, grad)

    return step


def check(case: Case, **options: Any) -> Plan:
    """Compare simulated devices with eager PyTorch in float64: the result and all gradients."""
    mesh, spec = MESHES[case.mesh]
    heads = TWO if case.mesh == "few_heads" else EVEN if case.even else UNEVEN
    of_queries, of_keys = heads[case.heads]
    length = 16 if case.even else 19
    if of_keys == 1:
        spec = spec.replace("model", "_")
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, length, 8).to(case.dtype) for h in (of_queries, of_keys) * 2]
    inputs = [inputs[0], inputs[1], inputs[3], inputs[2]]
    mask = mask_of(case.kind, 2, of_queries, length, length)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(case.dtype)
    planned = plan(
        with_gradients(fused, case),
        *inputs,
        mask,
        mesh=mesh,
        in_specs=(spec,) * 4 + (None,),
        out_specs=(spec,) * 4,
        **options,
    )
    wide = [x if x is None or x.dtype == torch.bool else x.double() for x in (*inputs, mask)]
    torch.manual_seed(3)
    got = planned.simulate(*inputs, mask, _poison=True)
    torch.manual_seed(3)
    want = with_gradients(by_hand, case)(*wide)
    tolerance = TOLERANCES[case.dtype]
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * scale)
    return planned


OF_PROCESSES = {
    "seq": (Mesh(seq=4), "_ _ seq _"),
    "data_seq": (Mesh(data=2, seq=2), "data _ seq _"),
    "model_seq": (Mesh(model=2, seq=2), "_ model seq _"),
}


class Attend(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.scale = case, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return fused(q * self.scale, k, v, mask, self.case.kind == "causal", self.case.dropout)


def check_on_processes(case: Case) -> None:
    """Compare processes with eager PyTorch in float64: the result and all gradients."""
    mesh, spec = OF_PROCESSES[case.mesh]
    of_queries, of_keys = (EVEN if case.even else UNEVEN)[case.heads]
    length = 16 if case.even else 19
    if of_keys == 1:
        spec = spec.replace("model", "_")
    torch.manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (of_queries, of_keys, of_keys, of_queries)]
    *inputs, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    mask = mask_of(case.kind, 2, of_queries, length, length)
    sharded = parallelize(Attend(case), mesh, in_specs=(spec,) * 3 + (None,))
    found, wanted = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    torch.manual_seed(3)
    out = sharded(*found, mask)
    out.backward(grad)
    torch.manual_seed(3)
    want = by_hand(*wanted, mask, case.kind == "causal", case.dropout)
    want.backward(grad)
    for a, b in zip([out, *(x.grad for x in found)], [want, *(x.grad for x in wanted)]):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * scale)


def all_cases(
    meshes: Iterable[str] = MESHES, dtypes: Iterable[torch.dtype] = TOLERANCES
) -> list[Case]:
    columns = KINDS, meshes, range(3), (True, False), (0.0, 0.1), dtypes
    return [Case(*values) for values in itertools.product(*columns)]


def main() -> None:
    cases, compare = all_cases(), check
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        cases, compare = all_cases(OF_PROCESSES, [torch.float64]), check_on_processes
    wrong = 0
    for each in cases:
        try:
            compare(each)
        except AssertionError as error:
            wrong += 1
            print(each, str(error).replace("\n", " ")[:200], flush=True)
    print(f"{len(cases)} cases, {wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
