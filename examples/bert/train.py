"""Trains the BERT of model.py to tell hidden words, on one process or on a mesh of them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh data=2,model=2 --layout zero
python train.py --plan --mesh data=64,model=8 --layers 24 --heads 16 --width 1024 --batch 4096
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torchgspmd as gspmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save, whole_weights
from common.lamb import Lamb
from common.report import figure, print_plan
from common.run import RANK, Run, leave, options, train
from common.text import load_text
from data import MASK, OTHER, Words
from model import LAYOUTS, Bert, Config

HERE = Path(__file__).resolve().parent


class Blank(NamedTuple):
    """A hidden word, the words around it, and the likeliest ones with their odds."""

    around: str
    hidden: str
    odds: dict[str, float]


OPTIMIZERS = {
    "adamw": lambda weights, lr: torch.optim.AdamW(weights, lr, weight_decay=0.01),
    "lamb": Lamb,
    "adafactor": torch.optim.Adafactor,
}


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "zero", HERE)
    add = parser.add_argument
    add(
        "--text",
        default="shakespeare",
        help="shakespeare (downloaded once), pydoc (no download) or a file",
    )
    add("--vocabulary", type=int, default=1000, help="the words that are told apart")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=96)
    add("--context", type=int, default=32, help="length of a sequence")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    add("--blanks", type=int, default=12, help="hidden words to show at the end")
    add(
        "--picture",
        type=Path,
        default=HERE / "out" / "words.png",
        help="where the picture of these words goes",
    )
    parser.set_defaults(batch=32, steps=5000, lr=2e-3, warmup=50)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(args.vocabulary, args.context, args.layers, args.heads, args.width)
    if args.plan:
        return plan(args, config)
    run = Run.start(args)
    text = run.load(lambda: Words(load_text(args.text, args.cache), args.vocabulary))

    torch.manual_seed(args.seed)
    model = Bert(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.tokens):,} words of "
        f"{args.text}; {run}"
    )
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    step = model
    if run.mesh:
        layout = LAYOUTS[args.layout].on(run.mesh)
        step = gspmd.train_step(model, optimizer, clip=args.clip)  # its update is in the program
        step = gspmd.parallelize(step, layout, backend=args.backend, **run.precision)
    first = load(model, optimizer, args.resume) if args.resume else 0

    losses = train(
        run,
        step,
        optimizer,
        lambda step: text.batch(step, args.seed, args.batch, args.context),
        first,
        "words",
        Tensor.numel,
        whole=step is not model,
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    weights = whole_weights(model)
    if args.blanks and RANK == 0:
        draw(tell(config, weights, text, args), args.picture)
        run.console.print(f"hidden words: {args.picture}")
    run.write(losses, first, "nats per hidden word")


def plan(args: argparse.Namespace, config: Config) -> None:
    with torch.device("meta"):
        model, tokens = Bert(config), torch.empty(args.batch, args.context, dtype=torch.long)
        places = torch.empty(args.batch, max(1, round(0.15 * args.context)), dtype=torch.long)
        optimizer = OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
        step = gspmd.train_step(model, optimizer, clip=args.clip)
    title = f"{sum(p.numel() for p in model.parameters()):,} parameters; {args.layout}"
    layout = LAYOUTS[args.layout].on(args.mesh or gspmd.Mesh(data=1))
    print_plan(title, layout, step, tokens, places, places, grad=False)


@torch.no_grad()
def tell(
    config: Config, weights: dict[str, Tensor], text: Words, args: argparse.Namespace
) -> list[Blank]:
    """Print hidden words with what stands around them, and the three likeliest ones; and how often
    the likeliest was right in 64 sequences that training has not drawn so. One device. Return them.
    """
    model = Bert(config)
    model.load_state_dict(weights)
    tokens, places, targets = text.batch(0, args.seed + 1, 64, args.context)
    odds, best = model(tokens, places).softmax(-1).topk(3)  # [b, p, 3]
    blanks = []
    hidden = tokens.gather(1, places) == MASK
    right = (best[..., 0] == targets)[hidden].float().mean().item()
    for b, p in hidden.nonzero()[:: max(1, int(hidden.sum()) // args.blanks)].tolist():
        at = int(places[b, p])
        around = text.decode(tokens[b, max(0, at - 5) : at + 6])
        blank = Blank(
            " ".join(around),
            text.vocabulary[int(targets[b, p])],
            dict(zip(text.decode(best[b, p]), odds[b, p].tolist())),
        )
        print(f"{blank.around}\n    {blank.hidden}: {', '.join(blank.odds)}")
        blanks.append(blank)
    known = text.tokens[text.tokens != OTHER]
    share = (known == known.mode().values).float().mean()
    print(f"{right:.1%} of hidden words told; {share:.1%} by always the most frequent one")
    return blanks


def draw(blanks: list[Blank], path: Path) -> None:
    """The odds of the likeliest words for each blank; the hidden one in another colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, axes = figure(1, 1, (9, 1 + 0.6 * len(blanks)))
    for i, blank in enumerate(blanks):
        for k, (word, share) in enumerate(blank.odds.items()):
            y = i + 0.25 * (k - 1)
            colour = "tab:green" if word == blank.hidden else "tab:gray"
            axes.barh(y, share, 0.2, color=colour)
            axes.text(share + 0.01, y, word, va="center", fontsize=7, parse_math=False)
    labels = [f"{blank.around}\n{blank.hidden}" for blank in blanks]
    axes.set(xlim=(0, 1), xlabel="odds (green: the hidden word)", yticks=range(len(blanks)))
    axes.set_yticklabels(labels, fontsize=7, parse_math=False)
    axes.invert_yaxis()
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
    leave()
