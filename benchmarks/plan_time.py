"""How long planning takes, by pass, against the bare capture.

    python benchmarks/plan_time.py [--layers 96] [--width 12288] [--mesh data=64,model=8]
    python benchmarks/plan_time.py --picture docs/plan_time.png

By default the joint forward and backward of GPT-3 175B on the meta device: nothing is allocated.
Also: two layers of examples/gpt in every layout on 8, 64, 512 and 4096 devices with the same work
for each device; planning takes equally long, and it is told whether the programs have one text
(sizes apart). dp, tp and sp have. fsdp has while no dimension has fewer rows than devices; a table
of words that both axes shard (2d) takes another way on other meshes, since one way for all would
send more on some.

--picture: CPU seconds of planning two dense layers on 8 to 16,384 devices along one to four axes.
The batch grows with `pod` and `data`, the sequence with `seq` and `model`.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "gpt"))
from large_plans import Dense, Layers
from model import GPT as Example
from model import LAYOUTS, Config


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mesh: gspmd.Mesh):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.q, self.k, self.v, self.up):
            gspmd.mark_sharding(layer.weight, mesh, "model data")
            gspmd.mark_sharding(layer.bias, mesh, "model")
        for layer in (self.o, self.down):
            gspmd.mark_sharding(layer.weight, mesh, "data model")

    def forward(self, x: Tensor) -> Tensor:  # [b, s, m]
        b, s, m = x.shape
        h = self.ln1(x)
        q, k, v = (
            f(h).view(b, s, self.heads, m // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, m))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, mesh: gspmd.Mesh, words: int = 50257, length: int = 2048
    ):
        super().__init__()
        self.mesh = mesh
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 128, mesh) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        gspmd.mark_sharding(self.embedding.weight, mesh, "model data")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = gspmd.mark_sharding(
            self.embedding(tokens) + self.position.weight, self.mesh, "data _ _"
        )
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            (self.ln(x) @ self.embedding.weight.T).flatten(0, 1), targets.flatten()
        )


def planned(layers: int, width: int, mesh: gspmd.Mesh, batch: int) -> tuple[gspmd.Plan, float]:
    with torch.device("meta"):
        model, tokens = GPT(layers, width, mesh), torch.zeros(batch, 2048, dtype=torch.long)
    start = time.perf_counter()
    plan = gspmd.plan(model, tokens, tokens, mesh=mesh, grad=True)
    return plan, time.perf_counter() - start


AXES = (("data",), ("data", "model"), ("data", "seq", "model"), ("pod", "data", "seq", "model"))
DEVICES = (8, 64, 512, 4096, 16384)


class DenseLayer(Dense):
    """A layer as in large_plans, 2048 wide."""

    width, heads, head, hidden = 2048, 32, 64, 8192


def mesh_of(devices: int, names: tuple[str, ...]) -> gspmd.Mesh:
    """Return a mesh of so many devices, whose axes are as alike as powers of two can be."""
    bits, sizes = devices.bit_length() - 1, []
    for left in range(len(names), 0, -1):
        sizes.append(2 ** -(-bits // left))
        bits -= -(-bits // left)
    return gspmd.Mesh(**dict(zip(names, sizes)))


def planned_on(mesh: gspmd.Mesh) -> tuple[float, gspmd.Plan]:
    """Return the CPU seconds of planning two dense layers, and the plan."""

    def count(*names: str) -> int:
        return mesh.count(name for name in names if name in mesh.names)

    def on_mesh(spec: str) -> str:
        return " ".join(name if name in mesh.names else "_" for name in spec.split())

    with torch.device("meta"):
        model = Layers([DenseLayer(), DenseLayer()], stacked=False)
        length = 64 * count("seq", "model")
        x = torch.empty(2 * count("pod", "data"), length, DenseLayer.width, dtype=torch.bfloat16)
    marks = {f"layers.*.{name}": on_mesh(spec) for name, spec in Dense.marks.items()}
    gspmd.annotate(model, mesh, marks)
    batch = "pod+data" if "pod" in mesh.names else "data"
    specs = f"{batch} {'seq' if 'seq' in mesh.names else '_'} _"
    start = time.process_time()
    plan = gspmd.plan(model, x, mesh=mesh, in_specs=specs, grad=True)
    return time.process_time() - start, plan


def draw(path: str) -> None:
    """Draw the seconds by devices, a line for each number of axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    planned_on(gspmd.Mesh(data=2))  # imports and caches
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for names in AXES:
        seconds = []
        for devices in DEVICES:
            mesh = mesh_of(devices, names)
            seconds.append(planned_on(mesh)[0])
            print(f"{devices:6} {str(mesh):35} {seconds[-1]:7.1f} s", flush=True)
        axes.plot(DEVICES, seconds, marker="o", label=" x ".join(names))
    axes.set(xscale="log", xlabel="devices", ylabel="CPU seconds", ylim=(0, None))
    axes.set_xticks(DEVICES, [f"{n:,}" for n in DEVICES])
    axes.minorticks_off()
    axes.set_title("Planning two dense layers, forward and backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--mesh", default="data=64,model=8")
    parser.add_argument("--picture", help="a file to draw; nothing else is planned")
    options = parser.parse_args()
    if options.picture:
        return draw(options.picture)
    planned(1, 256, gspmd.Mesh(data=2, model=2), 4)  # imports and caches

    mesh = gspmd.Mesh.parse(options.mesh)
    plan, seconds = planned(options.layers, options.width, mesh, mesh.count(("data",)))
    for name, spent in plan.seconds.items():
        print(f"{name:17} {spent:7.2f} s")
    print(
        f"{'in all':17} {seconds:7.2f} s   {seconds / plan.seconds['capture']:.2f} of the "
        "capture   "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB   "
        f"{len(plan.sharded.nodes)} nodes"
    )
    print(plan.summary())

    print("\nlayout, devices, seconds, same text as on 8 (2 layers, 4 sequences a data shard)")
    for layout in ("dp", "fsdp", "tp", "sp", "2d"):
        texts = []
        for devices in (8, 64, 512, 4096):
            mesh = (
                gspmd.Mesh(data=devices)
                if layout in ("dp", "fsdp")
                else gspmd.Mesh(data=devices // 2, model=2)
            )
            with torch.device("meta"):
                model = Example(Config(53248, 2048, 2, 96, 12288))
                gspmd.annotate(model, LAYOUTS[layout].on(mesh))
                tokens = torch.zeros(4 * mesh.count(("data",)), 2048, dtype=torch.long)
            start = time.perf_counter()
            plan = gspmd.plan(model, tokens, tokens, mesh=mesh, grad=True)
            texts.append(re.sub(r"\d+", "#", plan.program.code))
            print(
                f"{layout:5} {devices:5} {time.perf_counter() - start:7.2f} "
                f"{texts[-1] == texts[0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
