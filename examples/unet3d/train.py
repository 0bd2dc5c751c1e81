"""Trains the U-Net of model.py to find gray and white matter in a head, on one process or on a mesh
of them.

python train.py                                                 one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh space=2,rows=2      every volume in four shards
python train.py --plan --mm 1 --levels 4 --mesh space=4,rows=2  bytes sent and held by 8 devices
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd.tools.evaluation import mean_iou

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from data import SHAPE, TISSUES, Head
from model import LAYOUTS, Config, UNet, overlap

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "spatial2d", HERE)
    add = parser.add_argument
    add(
        "--volume",
        choices=("mni", "synthetic"),
        default="mni",
        help="mni (downloaded once) or synthetic (no download)",
    )
    add(
        "--mm",
        type=int,
        default=3,
        help="edge of a voxel; the template has 1 mm (default: %(default)s)",
    )
    add("--levels", type=int, default=3, help="of resolution")
    add("--width", type=int, default=8, help="channels of the first level")
    add(
        "--up",
        choices=("transposed", "trilinear"),
        default="transposed",
        help="convolution, or interpolation",
    )
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "slice.png",
        help="where the picture of a slice goes",
    )
    parser.set_defaults(batch=1, steps=100, lr=5e-3, warmup=5)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(len(TISSUES), args.levels, args.width, args.up)
    if args.plan:
        return plan(args, config)
    run = Run.start(args)
    head = run.load(lambda: Head.load(args.volume, args.mm, args.cache))

    torch.manual_seed(args.seed)
    model = UNet(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {_shape(head.image.shape)} "
        f"voxels; {run}"
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
        lambda step: head.batch(step, args.seed, args.batch),
        first,
        "voxels",
        Tensor.numel,
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    image, labels = head.image[None, None], head.labels[None]
    scores = run.evaluate(
        model,
        run.batches(1, image, labels),
        {"mean IoU": mean_iou(len(TISSUES))},
        lambda model, image, labels: (model(image), labels),
    )
    with torch.no_grad():
        logits = model(head.image[None, None].to(run.device, run.dtype)).cpu()  # [1, t, x, y, z]
    found = logits.argmax(1)  # [1, x, y, z]
    dice = overlap(
        torch.nn.functional.one_hot(found, len(TISSUES)).movedim(-1, 1).float(), head.labels[None]
    )
    run.console.print(
        "dice: " + ", ".join(f"{name} {score:.3f}" for name, score in zip(TISSUES, dice.tolist()))
    )
    run.write(losses, first, "cross entropy + 1 - dice", scores)
    if RANK == 0:
        draw(head, found[0], args.picture)
        run.console.print(f"a slice: {args.picture}")


def plan(args: argparse.Namespace, config: Config) -> None:
    mesh, shape = args.mesh or gspmd.Mesh(space=1), [n // args.mm for n in SHAPE]
    with torch.device("meta"):
        model, image = UNet(config), torch.empty(args.batch, 1, *shape)
        labels = torch.empty(args.batch, *shape, dtype=torch.long)
    title = f"{_shape([args.batch, *shape])} voxels; {args.layout}"
    print_plan(title, LAYOUTS[args.layout].on(mesh), model, image, labels)


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def draw(head: Head, found: Tensor, path: Path) -> None:
    """The slice in the middle, seen from above: image, labels, prediction."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(1, 3, (10, 4.4))
    middle = head.image.shape[2] // 2
    for panel, volume, title in zip(
        axes, (head.image, head.labels, found), ("image", "label", "prediction")
    ):
        panel.imshow(
            volume[:, :, middle].T,
            origin="lower",
            cmap="gray" if title == "image" else "viridis",
            interpolation="nearest",
        )
        panel.set(title=title, xticks=[], yticks=[])
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    leave()
