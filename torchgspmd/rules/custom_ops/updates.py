"""One step of Adam (arXiv 1412.6980) or AdamW (arXiv 1711.05101), as one operation.

    adam(p, g, m, v, step, lr, ...)         (p, m, v) after the step
    adam_([p, ...], [g, ...], ...)          the same for many parameters, in place

torch._fused_adam_ and torch._fused_adamw_ become the first in a capture; a program calls the second
where the old values are needed no more. PyTorch's kernel reads and writes each number once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.operators import custom_op
from ...compat.private_apis import _fused_adam_, _fused_adamw_

Tensors = Sequence[Tensor]
KERNELS = ("cpu", "cuda")  # devices that have one


class AdamStep(NamedTuple):
    """The numbers of a step, which is number `step`, from 1; it and lr are 0-d tensors.

    In a formula lr may be a symbol. decoupled: AdamW's weight decay.
    """

    step: Tensor
    lr: Any
    beta1: Any
    beta2: Any
    weight_decay: Any
    eps: Any
    decoupled: bool
    maximize: bool


@custom_op(
    "adam",
    schema="(Tensor p, Tensor g, Tensor m, Tensor v, Tensor step, Tensor lr, Scalar beta1, "
    "Scalar beta2, Scalar weight_decay, Scalar eps, bool decoupled, bool maximize) "
    "-> (Tensor, Tensor, Tensor)",
)
def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *step: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean and mean square after a step. step: as AdamStep."""
    new = p.clone(), m.clone(), v.clone()
    adam_([new[0]], [g], [new[1]], [new[2]], *step)
    return new


@adam.register_fake
def _(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)


def rate(lr: Any, step: Tensor) -> Tensor:
    """Return a learning rate as adam takes it; it may be a symbol in a program."""
    return lr if isinstance(lr, Tensor) else torch.ones_like(step, dtype=torch.float64) * lr


def adam_(ps: Tensors, gs: Tensors, ms: Tensors, vs: Tensors, *how: Any) -> None:
    """Step parameters with one dtype and device, in place. how: as AdamStep."""
    step = AdamStep(*how)
    lists: list[tuple[Tensor, ...]] = []
    copies: list[tuple[Tensor, Tensor]] = []  # a tensor, and its dense copy that is stepped
    for row in zip(ps, gs, ms, vs):
        first = row[0]
        # CUDA's kernel reads the learning rate in float32, which is too coarse for float64.
        if (
            first.device.type in KERNELS
            and not (first.is_cuda and first.dtype == torch.float64)
            and first.numel() > 0
            and all(t.dtype == first.dtype for t in row)
        ):
            # The kernel goes through memory as it lies. It has float32 constants, so the formula
            # would give other numbers in float64.
            dense = tuple(t.contiguous() for t in row)
            copies += [(row[i], dense[i]) for i in (0, 2, 3) if dense[i] is not row[i]]
            lists.append(dense)
        elif row[0].numel():
            p, g, m, v = row
            new, m_new, v_new, _ = adam_formula(p, g, m, v, None, *how)
            for old, value in ((p, new), (m, m_new), (v, v_new)):
                old.copy_(value)
    if lists:
        kernel = _fused_adamw_ if step.decoupled else _fused_adam_
        kernel(
            *map(list, zip(*lists)),
            [],  # without amsgrad's maxima
            [step.step] * len(lists),
            lr=step.lr.float() if step.lr.is_cuda else step.lr,  # the CPU's kernel reads a number
            beta1=step.beta1,
            beta2=step.beta2,
            weight_decay=step.weight_decay,
            eps=step.eps,
            amsgrad=False,
            maximize=step.maximize,
        )
    for old, value in copies:
        old.copy_(value)


vars(adam_)["writes"] = (0, 2, 3)  # see fx_nodes.written_operands


def adam_formula(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, largest: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return parameter, mean, mean square and its maximum after a step, by plain operations.

    largest: amsgrad's maximum, or None. how: as AdamStep.
    """
    count, lr, beta1, beta2, weight_decay, eps, decoupled, maximize = AdamStep(*how)
    g, count = -g if maximize else g, count.double()  # as torch.optim computes the corrections
    if decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay:
        g = g + p * weight_decay
    m = m.lerp(g, 1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    largest = None if largest is None else torch.maximum(largest, v)
    root = (v if largest is None else largest).sqrt() / (1 - beta2**count).sqrt() + eps
    return p - m / root * (lr / (1 - beta1**count)), m, v, largest
