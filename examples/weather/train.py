"""Trains the model of model.py to forecast next month's temperatures of the globe, on one process
or on a mesh of them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh rows=2,columns=2            every map in four shards
python train.py --plan --mesh data=32,rows=4,columns=4 --size 721x1440 --width 128 --batch 64
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from data import HISTORY, TESTED, Maps
from model import LAYOUTS, Config, Weather, areas

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "grid", HERE)
    add = parser.add_argument
    add(
        "--data",
        choices=("glosea", "waves"),
        default="glosea",
        help="glosea (downloaded once) or waves (no download)",
    )
    add("--width", type=int, default=16, help="channels of the first level")
    add("--attentions", type=int, default=1, help="along rows and columns each")
    add("--size", default="145x192", help="rows and columns of the maps of --plan")
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "forecast.png",
        help="where a forecast goes",
    )
    parser.set_defaults(batch=4, steps=200, lr=2e-3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.plan:
        return plan(args)
    run = Run.start(args)
    maps = run.load(lambda: Maps.load(args.data, args.cache))

    torch.manual_seed(args.seed)
    members, months, rows, columns = maps.maps.shape
    model = Weather(configured(args, rows, months)).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {members} forecasts of "
        f"{months} months, {rows} x {columns} points; {run}"
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
        lambda step: maps.batch(step, args.seed, args.batch),
        first,
        "points",
        lambda before: before[:, 0].numel(),
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    before, month, truth = maps.test()
    with torch.no_grad():
        forecast = model(before.to(run.device, run.dtype), month.to(run.device)).float().cpu()
    errors = [
        f"{maps.deviation * error(x, truth):.2f} K by {name}"
        for name, x in (
            ("the model", forecast),
            ("the month before", before[:, -1]),
            ("going on as from the month before that", 2 * before[:, -1] - before[:, -2]),
        )
    ]
    run.console.print(f"error in {TESTED} forecasts not trained with: {', '.join(errors)}")
    run.write(losses, first, "variance")
    if RANK == 0:
        kelvins = [maps.mean + maps.deviation * x[-1] for x in (before[:, -1], truth, forecast)]
        draw(kelvins, args.picture)
        run.console.print(f"the last one: {args.picture}")


def error(forecast: Tensor, truth: Tensor) -> float:
    """Root of the mean square; a point counts as much as it has area. [b, y, x] each."""
    area = areas(truth)  # [y]
    squares = (forecast - truth).square().mean((0, 2))  # [y]
    return float((squares * area).sum() / area.sum()) ** 0.5


def configured(args: argparse.Namespace, rows: int, months: int) -> Config:
    return Config(rows, HISTORY, months, args.width, attentions=args.attentions)


def plan(args: argparse.Namespace) -> None:
    rows, columns = map(int, args.size.split("x"))
    with torch.device("meta"):
        model = Weather(configured(args, rows, 6))
        before = torch.empty(args.batch, HISTORY, rows, columns)
        month = torch.empty(args.batch, dtype=torch.long)
    mesh = args.mesh or gspmd.Mesh(rows=1)
    title = f"{args.batch} maps of {rows} x {columns} points; {args.layout}"
    print_plan(title, LAYOUTS[args.layout].on(mesh), model, before, month, before[:, 0])


def draw(maps: list[Tensor], path: Path) -> None:
    """The month before, the truth, the forecast, and by how much it is wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(2, 2, (10, 6))
    before, truth, forecast = maps
    for panel, (title, x) in zip(
        axes.flat,
        (
            ("month before", before),
            ("truth", truth),
            ("forecast", forecast),
            ("forecast - truth", forecast - truth),
        ),
    ):
        away = title.startswith("forecast -")
        image = panel.imshow(
            x,
            origin="lower",
            cmap="RdBu_r" if away else "turbo",
            vmin=-10 if away else 230,
            vmax=10 if away else 310,
        )
        panel.set(title=title, xticks=[], yticks=[])
        picture.colorbar(image, ax=panel, label="K", shrink=0.7)
    picture.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
    leave()
