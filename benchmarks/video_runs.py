"""Estimated steps of Wan 2.1 14B, a diffusion transformer for video, beside the published ones.

    python benchmarks/video_runs.py

Prints a row for each run: measured and estimated seconds of a step, and their ratio. Nothing runs:
the model is planned on the meta device, its layers as a loop, and estimated for the preset of its
hardware. No number of a preset is chosen by these rows.

Source: NVIDIA-NeMo/DFM, docs/performance-summary.md. It has tokens a second for GB200, and
TFLOP/s for all: the operations of a token, which are the same, give the seconds of the others.
The model: Wan 2.1's configuration of 14B; 512 text tokens; 37,440 latent tokens of a video.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd import Hardware

LAYERS, WIDTH, HEADS, HIDDEN = 40, 5120, 40, 13824
TOKENS, TEXT = 37_440, 512
TOKEN_OPERATIONS = 787.59e12 / 4747.17  # the table's two columns for GB200


@dataclass(frozen=True)
class Run:
    """A published run. recomputed: layers whose forward runs again in the backward."""

    hardware: str
    mesh: str
    batch: int
    tflops: float
    recomputed: int = 0

    @property
    def seconds(self) -> float:
        devices = gspmd.Mesh.parse(self.mesh).size
        return self.batch * TOKENS * TOKEN_OPERATIONS / devices / (self.tflops * 1e12)


RUNS = (
    Run("gb200", "data=8,seq=4", 64, 787.59),
    Run("gb300", "data=16,seq=2", 64, 1030.67),
    Run("h100", "data=16,seq=4,model=2", 128, 325.77, recomputed=8),
)


class Attention(nn.Module):
    """Attention of a stream to a source; queries and keys are normalized over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:  # [b, s, d], [b, t, d]
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(source))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, self.v(source)))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer: attention to the video, attention to the text, a wide part; time modulates both."""

    def __init__(self, mesh: gspmd.Mesh) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=n == 1) for n in range(3))
        self.video, self.text = Attention(), Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.modulation = nn.Parameter(torch.empty(6, WIDTH))
        if "model" in mesh.names:
            columns = ("video.q", "video.k", "video.v", "text.q", "text.k", "text.v", "up")
            marks = {f"{name}.weight": "model _" for name in columns}
            rows = ("video.o", "text.o", "down")
            gspmd.annotate(self, mesh, marks | {f"{name}.weight": "_ model" for name in rows})

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, *wide = (time + self.modulation).unsqueeze(2).unbind(1)  # [b, 1, d]
        y = self.norms[0](x) * (1 + scale) + shift
        x = x + self.video(y, y) * gate
        x = x + self.text(self.norms[1](x), text)
        shift, scale, gate = wide
        y = self.norms[2](x) * (1 + scale) + shift
        return x + self.down(F.gelu(self.up(y), approximate="tanh")) * gate


class Video(nn.Module):
    """From latent patches to the error of their predicted velocity."""

    def __init__(self, run: Run, mesh: gspmd.Mesh) -> None:
        super().__init__()
        layers = [Layer(mesh) for _ in range(LAYERS)]
        again = run.recomputed
        parts = ((layers[again:], False), (layers[:again], True))
        self.parts = nn.ModuleList(gspmd.stack(p, recompute=r) for p, r in parts if p)
        self.patches, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, latents: Tensor, text: Tensor, time: Tensor) -> Tensor:
        x = self.patches(latents)
        for part in self.parts:
            x = part(x, text, time)
        return F.mse_loss(self.head(x).float(), latents.float())


def planned(run: Run) -> gspmd.Plan:
    mesh = gspmd.Mesh.parse(run.mesh)
    with torch.device("meta"):
        model = Video(run, mesh)
        latents = torch.empty(run.batch, TOKENS, 64, dtype=torch.bfloat16)
        text = torch.empty(run.batch, TEXT, WIDTH, dtype=torch.bfloat16)
        time = torch.empty(run.batch, 6, WIDTH, dtype=torch.bfloat16)
    return gspmd.plan(
        model,
        latents,
        text,
        time,
        mesh=mesh,
        in_specs=("data seq _", "data _ _", "data _ _"),
        grad=True,
        param_dtype=torch.bfloat16,
        hardware=Hardware.of(run.hardware),
    )


def main() -> None:
    print("| hardware | layout | measured, s | estimated, s | ratio |\n|---|---|--:|--:|--:|")
    for run in RUNS:
        seconds = planned(run).estimate(Hardware.of(run.hardware)).seconds
        ratio = seconds / run.seconds
        print(f"| {run.hardware} | {run.mesh} | {run.seconds:.2f} | {seconds:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
