"""Trains the encoder and the decoder of model.py to read digits aloud, on one process or on a mesh
of them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh data=2,model=2 --layout space_tp
python train.py --plan --mesh data=64,model=8 --size 1024x1024 --channels 128 --layers 24 \\
    --width 2048 --heads 16 --batch 1024
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import torchgspmd as gspmd

sys.path.append(str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save, whole_weights
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from data import ALPHABET, COUNT, LENGTH, Pictures, decode
from model import LAYOUTS, Config, Reader

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "space_tp", HERE)
    add = parser.add_argument
    add(
        "--data",
        choices=("mnist", "digits"),
        default="mnist",
        help="mnist (downloaded once) or digits (of scikit-learn, no download)",
    )
    add("--channels", type=int, default=16, help="of the first convolution")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=64)
    add("--size", default="37x85", help="rows and columns of a picture of --plan")
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "read.png",
        help="where some pictures go with what was read",
    )
    parser.set_defaults(batch=32, steps=1200, lr=2e-3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.plan:
        return plan(args)
    run = Run.start(args)
    data = run.load(lambda: Pictures.load(args.data, args.cache))

    torch.manual_seed(args.seed)
    config = configured(args, *data.shape)
    model = Reader(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, pictures of {COUNT} digits, "
        f"{config.rows} x {config.columns}; {run}"
    )
    if run.mesh:
        layout = LAYOUTS[args.layout].on(run.mesh)
        model = gspmd.parallelize(  # the one line
            model, layout, backend=args.backend, **run.precision
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=True)
    first = load(model, optimizer, args.resume) if args.resume else 0

    losses = train(
        run,
        model,
        optimizer,
        lambda step: data.batch(step, args.seed, args.batch),
        first,
        "pictures",
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    weights = whole_weights(model)
    run.write(losses, first, "nats per letter")
    if RANK == 0:
        pictures, _, letters = data.batch(0, args.seed, 200, test=True)
        model = Reader(config)
        model.load_state_dict(weights)
        read, said = read_aloud(model, pictures), [decode(text) for text in letters]
        right = sum(r == s for r, s in zip(read, said))
        run.console.print(
            f"{right} of {len(said)} pictures of digits it was not trained with are read without "
            f"a mistake: {right / len(said):.1%}"
        )
        draw(pictures, read, said, args.picture)
        run.console.print(f"some of them: {args.picture}")


@torch.no_grad()
def read_aloud(model: Reader, pictures: Tensor) -> list[str]:
    """The likeliest letter, one after the other, on one device. pictures: [b, 1, y, x]."""
    letters = torch.zeros(len(pictures), LENGTH, dtype=torch.long)  # [b, u]
    for i in range(1, LENGTH):
        letters[:, i] = model(pictures, letters)[:, i - 1].argmax(-1)
    return [decode(text[1:]) for text in letters]


def configured(args: argparse.Namespace, rows: int, columns: int) -> Config:
    return Config(
        rows,
        columns,
        len(ALPHABET),
        LENGTH,
        args.channels,
        layers=args.layers,
        heads=args.heads,
        width=args.width,
    )


def plan(args: argparse.Namespace) -> None:
    rows, columns = map(int, args.size.split("x"))
    with torch.device("meta"):
        model = Reader(configured(args, rows, columns))
        pictures = torch.empty(args.batch, 1, rows, columns)
        letters = torch.empty(args.batch, LENGTH, dtype=torch.long)
    mesh = args.mesh or gspmd.Mesh(data=1)
    title = (
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.batch} pictures of "
        f"{rows} x {columns}; {args.layout}"
    )
    print_plan(title, LAYOUTS[args.layout].on(mesh), model, pictures, letters, letters)


def draw(pictures: Tensor, read: list[str], said: list[str], path: Path) -> None:
    """Twelve pictures and what was read, mistakes first."""
    order = sorted(range(len(said)), key=lambda i: read[i] == said[i])[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(4, 3, (9, 6))
    for axis, i in zip(axes.flat, order):
        axis.imshow(pictures[i, 0], cmap="gray_r")
        axis.set(xticks=[], yticks=[])
        color = "black" if read[i] == said[i] else "firebrick"
        axis.set_xlabel(read[i], color=color, fontsize=9)
    picture.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
    leave()
