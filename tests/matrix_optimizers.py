"""Optimizers that compute with whole matrices, as users write them, in the dtype of the weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class MatrixOptimizer(Optimizer):
    """An optimizer whose step is that of each matrix alone."""

    def __init__(self, params, lr=0.02, clip=None):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p.grad, self.state[p]))


class NewtonSchulz(MatrixOptimizer):
    """Muon's iteration without its bfloat16."""

    def direction(self, g: Tensor, state: dict) -> Tensor:
        m = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.05)
        x = m.T if m.shape[0] > m.shape[1] else m
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.T if m.shape[0] > m.shape[1] else x


class Cubic(MatrixOptimizer):
    """An iteration of third degree: no product has two matrices that are undivided by columns."""

    narrow = torch.float64

    def direction(self, g: Tensor, state: dict) -> Tensor:
        m = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.05)
        x = m.T if m.shape[0] > m.shape[1] else m
        x = (x / (x.norm() + 1e-7)).to(self.narrow)
        for _ in range(5):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        return (x.T if m.shape[0] > m.shape[1] else x).to(g.dtype)


class Shampoo(MatrixOptimizer):
    """Inverse fourth roots by eigh (arXiv 1802.09568)."""

    def direction(self, g: Tensor, state: dict) -> Tensor:
        for side, gram in (("left", g @ g.T), ("right", g.T @ g)):
            total = state.setdefault(side, torch.zeros_like(gram)).lerp_(gram, 0.1)
            values, vectors = torch.linalg.eigh(total)
            root = (vectors * (values.clamp_min(0) + 1e-2).pow(-0.25)) @ vectors.T
            g = root @ g if side == "left" else g @ root
        return g


class Soap(MatrixOptimizer):
    """Adam in the eigenbasis, which a QR of one power iteration follows (arXiv 2409.11321)."""

    def direction(self, g: Tensor, state: dict) -> Tensor:
        bases = []
        for side, gram in (("left", g @ g.T), ("right", g.T @ g)):
            total = state.setdefault(side, torch.eye(len(gram), dtype=g.dtype)).lerp_(gram, 0.1)
            basis = state.setdefault(side + "_basis", torch.eye(len(gram), dtype=g.dtype))
            bases.append(basis.copy_(torch.linalg.qr(total @ basis)[0]))
        left, right = bases
        turned = left.T @ g @ right
        mean = state.setdefault("mean", torch.zeros_like(g)).lerp_(g, 0.1)
        square = state.setdefault("square", torch.zeros_like(g)).lerp_(turned.square(), 0.1)
        return left @ ((left.T @ mean @ right) / (square.sqrt() + 1e-3)) @ right.T


class Parts(MatrixOptimizer):
    """Muon on parts of each weight, as on queries, keys and values in one: `parts` of its rows."""

    parts, way, narrow = 3, "chunk", torch.bfloat16

    def direction(self, g: Tensor, state: dict) -> Tensor:
        m = state.setdefault("momentum", torch.zeros_like(g)).lerp_(g, 0.05)
        if self.way == "view":
            return self.orthogonal(m.view(self.parts, -1, m.shape[1])).reshape(m.shape)
        return torch.cat([self.orthogonal(part) for part in m.chunk(self.parts)])

    def orthogonal(self, m: Tensor) -> Tensor:
        x = m.to(self.narrow)
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(3):
            gram = x @ x.mT
            x = 1.5 * x + (-0.6 * gram + 0.1 * gram @ gram) @ x
        return x.to(m.dtype)
