"""Trains the mixture of experts of model.py on English text, on one process or on a mesh of them.

python train.py                                                 one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh expert=4
torchrun --nproc-per-node 4 train.py --mesh data=2,expert=2 --layout dp_ep
python train.py --plan --mesh expert=8,model=2 --layout ep_tp   bytes sent and held by 16 devices
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import torchgspmd as gspmd

sys.path.append(str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from common.text import load_text
from gpt.data import Characters
from model import LAYOUTS, ROUTERS, Config, MoE, cut

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "ep", HERE)
    add = parser.add_argument
    add(
        "--text",
        default="shakespeare",
        help="shakespeare (downloaded once), pydoc (no download) or a file",
    )
    add("--layers", type=int, default=4, help="every second one has experts")
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="length of a sequence")
    add("--experts", type=int, default=8)
    add("--router", choices=list(ROUTERS), default="capacity", help="dropless: no expert is full")
    add("--choices", type=int, default=2, help="how many experts a character is sent to")
    add("--capacity", type=float, default=1.25, help="places of an expert, over its even share")
    add(
        "--room", type=float, default=0, help="of dropless: send rows, with so much room; 0: tokens"
    )
    add("--balance", type=float, default=0.01, help="weight of the loss that keeps loads equal")
    add("--z", type=float, default=0.001, help="weight of the loss of the router's logits")
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "loads.png",
        help="where the picture of the experts' loads goes",
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.plan:
        return plan(args)
    run = Run.start(args)
    text = run.load(lambda: Characters(load_text(args.text, args.cache)))

    torch.manual_seed(args.seed)
    model = MoE(configured(args, len(text.alphabet), run.mesh)).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.tokens):,} "
        f"characters of {args.text}, {len(text.alphabet)} different; {run}"
    )
    if run.mesh:
        layout = LAYOUTS[args.layout].on(run.mesh)
        model = gspmd.parallelize(  # the one line
            model, layout, backend=args.backend, **run.precision
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    first = load(model, optimizer, args.resume) if args.resume else 0

    loads, dropped = [], []

    def watch(load: Tensor, drops: Tensor) -> None:
        loads.append(load.cpu())
        dropped.append(drops.item())

    losses = train(
        run,
        model,
        optimizer,
        lambda step: text.batch(step, args.seed, args.batch, args.context),
        first,
        "tokens",
        Tensor.numel,
        watch=watch,
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    run.write(losses, first, "nats per character")
    every = torch.stack(loads)  # [steps, layers, e]
    run.console.print(
        f"dropped: {sum(dropped):,} of {every.sum().item():,} choices, "
        f"{dropped[-1]:,} in the last step; busiest expert of the last step: "
        f"{every[-1].max().item() * args.experts / every[-1, 0].sum().item():.2f} x its even share"
    )
    if RANK == 0:
        draw(every, first, args.picture)
        run.console.print(f"loads of experts: {args.picture}")


def configured(args: argparse.Namespace, vocabulary: int, mesh: gspmd.Mesh | None) -> Config:
    return Config(
        vocabulary,
        args.context,
        args.layers,
        args.heads,
        args.width,
        experts=args.experts,
        router=args.router,
        choices=args.choices,
        capacity=args.capacity,
        room=args.room,
        **cut(mesh),
        balance=args.balance,
        z=args.z,
    )


def plan(args: argparse.Namespace, vocabulary: int = 128) -> None:
    mesh = args.mesh or gspmd.Mesh(expert=1)
    with torch.device("meta"):
        model = MoE(configured(args, vocabulary, mesh))
        tokens = torch.empty(args.batch, args.context, dtype=torch.long)
    title = f"{args.batch} x {args.context} characters; {args.layout}"
    print_plan(title, LAYOUTS[args.layout].on(mesh), model, tokens, tokens)


def draw(loads: Tensor, first: int, path: Path) -> None:
    """The tokens of every expert over the steps, a panel for each layer that has experts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps, layers, experts = loads.shape
    picture, axes = figure(layers, 1, (8, 1 + 2 * layers))
    panels = axes.flat if layers > 1 else [axes]
    for layer, panel in enumerate(panels):
        image = panel.imshow(
            loads[:, layer].T,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            extent=(first + 0.5, first + steps + 0.5, -0.5, experts - 0.5),
        )
        panel.set(ylabel="expert", title=f"block {2 * layer + 2}", yticks=range(experts))
        picture.colorbar(image, ax=panel, label="tokens")
    panels[layers - 1].set(xlabel="step")
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    leave()
