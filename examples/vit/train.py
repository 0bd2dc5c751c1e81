"""Trains the vision transformer of model.py on handwritten digits, on one process or on a mesh of
them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh data=2,model=2 --layout spatial
python train.py --backend xla --mesh data=4,model=2         one process, all devices that XLA has
python train.py --plan --mesh data=64,model=8 --batch 4096  what each of 512 devices sends and holds
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import torchgspmd as gspmd
from torchgspmd.tools.evaluation import accuracy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from data import Digits, load_digits
from model import LAYOUTS, Config, ViT

FOLDER = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "dp_tp", FOLDER)
    add = parser.add_argument
    add(
        "--data",
        choices=("mnist", "digits"),
        default="mnist",
        help="mnist (downloaded once) or digits (of scikit-learn, no download)",
    )
    add(
        "--epochs",
        type=float,
        help="instead of --steps: how often to see as many images as there are",
    )
    add(
        "--patch",
        type=int,
        default=4,
        help="rows and columns of a patch (default: %(default)s; of 28 rows)",
    )
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=64)
    add(
        "--picture",
        type=Path,
        default=FOLDER / "out" / "digits.png",
        help="where some digits go with what they were taken for",
    )
    parser.set_defaults(batch=50, steps=3000, lr=2e-3, warmup=100)
    return parser.parse_args()


def plan(args: argparse.Namespace) -> None:
    config = Config(28, args.patch, layers=args.layers, heads=args.heads, width=args.width)
    with torch.device("meta"):
        model, images = ViT(config), torch.empty(args.batch, config.channels, 28, 28)
        labels = torch.empty(args.batch, dtype=torch.long)
    title = f"{sum(p.numel() for p in model.parameters()):,} parameters; {args.layout}"
    layout = LAYOUTS[args.layout].on(args.mesh or gspmd.Mesh(data=1))
    print_plan(title, layout, model, images, labels)


def main() -> None:
    args = arguments()
    if args.plan:
        return plan(args)
    run = Run.start(args)
    data = run.load(lambda: load_digits(args.data, args.cache))
    if args.epochs:
        args.steps = round(args.epochs * len(data.labels) / args.batch)

    torch.manual_seed(args.seed)
    config = Config(
        data.images.shape[-1], args.patch, layers=args.layers, heads=args.heads, width=args.width
    )
    model = ViT(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data.labels):,} images "
        f"of {args.data}, "
        f"{len(model.position)} tokens each; {run}"
    )
    if run.mesh:
        layout = LAYOUTS[args.layout].on(run.mesh)
        model = gspmd.parallelize(  # the one line
            model, layout, backend=args.backend, **run.precision
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05, foreach=True
    )
    first = load(model, optimizer, args.resume) if args.resume else 0

    losses = train(
        run,
        model,
        optimizer,
        lambda step: data.batch(step, args.seed, args.batch),
        first,
        "images",
        lr=lambda step: 0.5 + 0.5 * math.cos(math.pi * (step - first) / args.steps),
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    scores = run.evaluate(
        model,
        run.batches(500, data.test_images, data.test_labels),
        {"top-1": accuracy(), "top-5": accuracy(5)},
        lambda model, images, labels: (model(images), labels),
    )
    predicted = predict(run, model, data.test_images[:1000])
    if RANK == 0:
        draw(data, predicted, args.picture)
        run.console.print(f"some of them: {args.picture}")
    run.write(losses, first, "nats per image", scores)


@torch.no_grad()
def predict(
    run: Run, model: nn.Module, images: Tensor, size: int = 500
) -> Tensor:  # [count, 1, h, w] -> [count]
    """On the mesh as well, `size` images at a time."""
    model.eval()
    logits = []
    for part in images.to(run.dtype).split(size):
        with run.autocast():
            logits.append(model(part.to(run.device)))  # [b, k]
    return torch.cat(logits).argmax(-1).cpu()


def draw(data: Digits, predicted: Tensor, path: Path, rows: int = 4, columns: int = 8) -> None:
    """Test digits, and below each what it was taken for: the first ones, then mistakes, with what
    it is.
    """
    wrong = (
        (predicted != data.test_labels[: len(predicted)])
        .nonzero()
        .flatten()
        .tolist()[: rows * columns // 2]
    )
    first = [i for i in range(len(predicted)) if i not in wrong][: rows * columns - len(wrong)]
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(rows, columns, (columns, 1.25 * rows))
    for axis, i in zip(axes.flat, first + wrong):
        axis.imshow(data.test_images[i, 0], cmap="gray_r")
        axis.set(xticks=[], yticks=[])
        mistake = f" (is {data.test_labels[i]})" if i in wrong else ""
        axis.set_xlabel(
            f"{predicted[i]}{mistake}", color="firebrick" if mistake else "black", fontsize=9
        )
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    leave()
