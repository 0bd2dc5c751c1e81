"""Trains the Conformer of model.py to write down ten spoken sentences, on one process or on a mesh
of them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh time=4          every recording in four parts
python train.py --plan --mesh data=16,time=8 --frames 30001 --layers 24 --width 1024 --batch 16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd.tools.evaluation import error_rate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from data import ALPHABET, BANDS, Speech, spell, text_of
from model import LAYOUTS, Config, Conformer

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "time", HERE)
    add = parser.add_argument
    add(
        "--speech",
        choices=("recorded", "tones"),
        default="recorded",
        help="recorded (downloaded once) or tones (no download)",
    )
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=96)
    add("--window", type=int, default=16, help="of 0.04 s, to each side, that are attended to")
    add("--frames", type=int, default=711, help="of 0.01 s, of a recording of --plan")
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "letters.png",
        help="where the letters go that were heard in a sentence",
    )
    parser.set_defaults(batch=10, steps=300, lr=2e-3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(BANDS, len(ALPHABET), args.layers, args.heads, args.width, window=args.window)
    if args.plan:
        return plan(args, config)
    run = Run.start(args)
    speech = run.load(lambda: Speech.load(args.speech, args.cache))

    torch.manual_seed(args.seed)
    model = Conformer(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(speech.frames)} "
        f"sentences of at most {speech.features.shape[1]} frames; {run}"
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
        lambda step: speech.batch(step, args.seed, args.batch),
        first,
        "frames",
        lambda features: features.shape[0] * features.shape[1],
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    recordings = speech.features, speech.frames, speech.letters, speech.lengths
    scores = run.evaluate(
        model,
        run.batches(args.batch, *recordings),
        {
            "word error rate": error_rate(lambda *rows: map(words, pairs(*rows)), whole=(0,)),
            "letter error rate": error_rate(pairs, whole=(0,)),
        },
        lambda model, features, frames, *said: (
            model(features, frames).argmax(-1),  # [t/4, b]
            frames,
            *said,
        ),
    )
    with torch.no_grad():
        features = speech.features.to(run.device, run.dtype)
        odds = model(features, speech.frames.to(run.device)).float().cpu()  # [t/4, b, v]
    heard = list(pairs(odds.argmax(-1), speech.frames, speech.letters, speech.lengths))
    for text, said in (heard[0], heard[-1]):
        run.console.print(f"said   {said}\nheard  {text}", markup=False)
    run.write(losses, first, "nats per letter", scores)
    if RANK == 0:
        i = int(speech.frames.argmax())
        frames, text = -(-int(speech.frames[i]) // 4), text_of(speech.letters[i], speech.lengths[i])
        draw(odds[:frames, i].exp(), text, args.picture)
        run.console.print(f"letters of the longest sentence: {args.picture}")


def pairs(
    best: Tensor, frames: Tensor, letters: Tensor, lengths: Tensor
) -> Iterator[tuple[str, str]]:
    """What was heard in the best letters of frames, [t/4, b], and what was said, [b, u]."""
    for i, (count, text, length) in enumerate(zip(frames.tolist(), letters, lengths)):
        yield spell(best[: -(-count // 4), i]), text_of(text, length)


def words(pair: tuple[str, str]) -> tuple[list[str], list[str]]:
    return pair[0].split(), pair[1].split()


def plan(args: argparse.Namespace, config: Config) -> None:
    with torch.device("meta"):
        model, features = Conformer(config), torch.empty(args.batch, args.frames, BANDS)
        counts = torch.empty(args.batch, dtype=torch.long)
        letters = torch.empty(args.batch, max(1, args.frames // 10), dtype=torch.long)
    mesh = args.mesh or gspmd.Mesh(time=1)
    title = (
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.batch} recordings of "
        f"{args.frames / 100:.0f} s; {args.layout}"
    )
    print_plan(title, LAYOUTS[args.layout].on(mesh), model, features, counts, letters, counts)


def draw(odds: Tensor, text: str, path: Path) -> None:
    """odds: [t/4, v] of one sentence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(1, 1, (9, 4.5))
    axes.imshow(odds.T, aspect="auto", interpolation="nearest", cmap="magma")
    axes.set(xlabel="0.04 s", yticks=range(len(ALPHABET)), yticklabels=list(ALPHABET))
    axes.set_title(text, fontsize=7)
    axes.tick_params(axis="y", labelsize=6)
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    leave()
