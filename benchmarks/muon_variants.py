"""Bytes of a step with published optimizers of matrices above AdamW's, beside those of owners.

    python benchmarks/muon_variants.py

An owner gets a matrix's momentum and returns its update, in bfloat16: 2 (n - 1) / n of its share.
Weights without marks need no way there, but each device gets all updates. The last column is a
device's products in the whole step, beside an even split of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchgspmd as gspmd
from torchgspmd.fx_passes.schedule.arithmetic import graph_flops

WIDTH = 256
QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [  # arXiv 2505.16932
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9479, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
]


def orthogonal(g: Tensor, coefficients: list[tuple[float, ...]] = QUINTIC) -> Tensor:
    """Keller Jordan's zeropower_via_newtonschulz5, of a matrix or of several."""
    x = g.bfloat16()
    x = x.mT if g.size(-2) > g.size(-1) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g.size(-2) > g.size(-1) else x


class Muon(Optimizer):
    """Muon (Keller Jordan): Nesterov momentum, then the nearest orthogonal matrix."""

    def __init__(self, params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p)
                state["step"] += 1
                m = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = self.direction(p, p.grad.lerp_(m, group["momentum"]), state)
                p.add_(update, alpha=-group["lr"])

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        return orthogonal(g) * max(1, g.size(-2) / g.size(-1)) ** 0.5


class Moonlight(Muon):
    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        p.mul_(0.998)
        return orthogonal(g).to(g.dtype) * 0.2 * max(g.shape) ** 0.5


class PolarExpress(Muon):
    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        return orthogonal(g, POLAR_EXPRESS)


class Cubic(Muon):
    """Third degree: the product of a matrix with itself is a sum over its columns."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        x = orthogonal(g, [])
        for _ in range(5):
            x = 1.5 * x - 0.5 * (x @ x.mT) @ x
        return x


class NorMuon(Muon):
    """arXiv 2510.05491: rows are scaled by their second moments."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        u = orthogonal(g).to(g.dtype)
        rows = state.setdefault("rows", torch.zeros_like(u[:, :1]))
        rows.lerp_(u.square().mean(-1, keepdim=True), 0.05)
        scaled = u * rows.clamp_min(1e-10).rsqrt()
        return scaled * (u.norm() / scaled.norm().clamp_min(1e-10))


class AdaMuon(Muon):
    """arXiv 2507.11005: second moments of the orthogonal matrix of signs."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        u = orthogonal(g.sign()).to(g.dtype)
        square = state.setdefault("square", torch.zeros_like(u)).lerp_(u.square(), 0.05)
        u = u / ((square / (1 - 0.95 ** state["step"])).sqrt() + 1e-8)
        return u * (0.2 * p.numel() ** 0.5 / (u.norm() + 1e-8))


class SplitMuon(Muon):
    """Four matrices in one weight, as queries, keys and values."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        return torch.cat([orthogonal(part).to(g.dtype) for part in g.chunk(4)])


class HeadMuon(Muon):
    """Each head's rows."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        return orthogonal(g.view(8, -1, g.size(1))).reshape(g.shape)


class Dion(Muon):
    """arXiv 2504.05295: one power iteration of rank 32, and a QR."""

    def direction(self, p: Tensor, g: Tensor, state: dict) -> Tensor:
        basis = state.setdefault("basis", torch.eye(g.size(1), 32).to(g))
        left = torch.linalg.qr(state["momentum"] @ basis)[0]
        right = state["momentum"].mT @ left
        state["momentum"].sub_(0.05 * left @ right.mT)
        basis.copy_(right / (right.norm(dim=0, keepdim=True) + 1e-8))
        return left @ basis.mT


class Net(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for w in self.weights:
            y = torch.tanh(y @ w)
        return y.square().mean()


def planned(
    make: Callable[..., Optimizer], shapes: list[tuple[int, int]], mesh: gspmd.Mesh, marks: str
) -> gspmd.Plan:
    with torch.device("meta"):
        model, x = Net(shapes), torch.empty(4096, WIDTH)
    if marks:
        gspmd.annotate(model, mesh, {"weights.*": marks})
    step = gspmd.train_step(model, make(model.parameters()))
    return gspmd.plan(step, x, mesh=mesh, in_specs="data _")


def main() -> None:
    square = [(WIDTH, WIDTH)] * 8
    cases = [
        ("8 square", square, gspmd.Mesh(data=4), "data _"),
        ("4 wide, 4 tall", [(WIDTH, 1024), (1024, WIDTH)] * 4, gspmd.Mesh(data=4), "data _"),
        ("8 square", square, gspmd.Mesh(data=2, model=2), "data model"),
        ("8 square, no marks", square, gspmd.Mesh(data=4), ""),
    ]
    kinds = (Muon, Moonlight, PolarExpress, Cubic, NorMuon, AdaMuon, SplitMuon, HeadMuon, Dion)
    for name, shapes, mesh, marks in cases:
        base, n = planned(torch.optim.AdamW, shapes, mesh, marks), mesh.size
        elements = sum(a * b for a, b in shapes)
        owners = (2 if marks else n) * (n - 1) / n * elements / n * 2
        for kind in kinds:
            plan = planned(kind, shapes, mesh, marks)
            more = plan.sent_bytes - base.sent_bytes
            even = graph_flops(plan.captured.graph, mesh) / n
            print(
                f"| {kind.__name__} | {name} | {mesh} | {more / 2**20:.2f} | "
                f"{owners / 2**20:.2f} | {more / owners:.2f} | "
                f"{graph_flops(plan.local_graph(), mesh) / even:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
