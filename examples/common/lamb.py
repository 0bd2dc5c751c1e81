"""LAMB (You et al., arXiv 1904.00962), for one device: the training of BERT with large batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Adam's step, scaled for each parameter by its norm over that of the step.

    Norms stay tensors, so that a step can be part of a program.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        step = state["step"].add_(1).double()
        mean = state["exp_avg"].lerp_(g, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        corrected = (square / (1 - beta2**step).to(p.dtype)).sqrt_().add_(group["eps"])
        change = mean / (1 - beta1**step).to(p.dtype) / corrected + p * group["weight_decay"]
        norms = p.norm(), change.norm()
        ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        p.sub_(change * ratio.to(p.dtype) * group["lr"])
