"""Trains the GPT of model.py on English text, on one process or on a mesh of them.

python train.py                                             one process, plain PyTorch
torchrun --nproc-per-node 4 train.py --mesh data=2,model=2 --layout tp
python train.py --backend xla --mesh data=4,model=2         one process, all devices that XLA has
python train.py --plan --mesh data=64,model=8 --batch 512   what each of 512 devices sends and holds
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd.tools.evaluation import perplexity

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.checkpoint import load, save, whole_weights
from common.report import print_plan
from common.run import RANK, Run, leave, options, train
from common.text import load_text
from data import Characters
from model import GPT, LAYOUTS, SCHEDULES, Config


def arguments() -> argparse.Namespace:
    parser = options(__doc__, list(LAYOUTS), "tp", Path(__file__).resolve().parent)
    add = parser.add_argument
    add(
        "--text",
        default="shakespeare",
        help="shakespeare (downloaded once), pydoc (no download) or a file",
    )
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="length of a sequence")
    add("--accumulate", type=int, default=1, help="parts of the batch on a mesh, one by one")
    add("--microbatches", type=int, default=4, help="of a pipeline: a mesh with an axis 'stage'")
    add("--repeats", type=int, default=1, help="how often each passes a stage of the pipeline")
    add("--schedule", choices=SCHEDULES, default="auto", help="of a pipeline")
    add("--stack", action="store_true", help="the blocks are a loop of the program")
    add("--sample", type=int, default=400, help="characters of text to generate at the end")
    add("--letters", type=int, default=84, help="of --plan: size of the alphabet")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.plan:
        return plan(args)
    run = Run.start(args)
    text = run.load(lambda: Characters(load_text(args.text, args.cache)))

    torch.manual_seed(args.seed)
    config = Config(len(text.alphabet), args.context, args.layers, args.heads, args.width)
    model = GPT(config).to(run.device, run.dtype)
    run.console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text.tokens):,} "
        f"characters of {args.text}, "
        f"{len(text.alphabet)} different; {run}"
    )
    model.divide(run.mesh, args.microbatches, args.repeats, args.schedule, args.stack)
    if run.mesh and "stage" in run.mesh.names and RANK == 0:
        draw_schedule(run, model, args.plot.parent / "schedule.svg")
    if run.mesh:
        layout = LAYOUTS[args.layout].on(run.mesh)
        model = gspmd.parallelize(  # the one line
            model, layout, backend=args.backend, microbatches=args.accumulate, **run.precision
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    first = load(model, optimizer, args.resume) if args.resume else 0

    losses = train(
        run,
        model,
        optimizer,
        lambda step: text.batch(step, args.seed, args.batch, args.context),
        first,
        "tokens",
        Tensor.numel,
    )

    if args.save:
        save(model, optimizer, first + args.steps, args.save)
        run.console.print(f"checkpoint: {args.save}")
    scores = run.evaluate(
        model,
        run.batches(args.batch, *text.last(3 * args.batch - 1, args.context)),
        {"perplexity of the end of the text": perplexity(classes=None)},
        lambda model, tokens, targets: (model(tokens, targets), targets),
    )
    weights = whole_weights(model)
    if args.sample and RANK == 0:
        run.console.rule("sample")
        run.console.print(sample(config, weights, text, args.sample, args.seed), markup=False)
        run.console.rule()
    run.write(losses, first, "nats per character", scores)


def plan(args: argparse.Namespace) -> None:
    mesh = args.mesh or gspmd.Mesh(data=1)
    with torch.device("meta"):
        model = GPT(Config(args.letters, args.context, args.layers, args.heads, args.width))
        tokens = torch.empty(args.batch, args.context, dtype=torch.long)
        model.divide(mesh, args.microbatches, args.repeats, args.schedule, args.stack)
    title = f"{sum(p.numel() for p in model.parameters()):,} parameters; {args.layout}"
    layout = LAYOUTS[args.layout].on(mesh)
    print_plan(title, layout, model, tokens, tokens, microbatches=args.accumulate)


def draw_schedule(run: Run, model: GPT, path: Path) -> None:
    """What each stage of the pipeline does, from left to right."""
    blocks: Any = model.blocks  # a pipeline
    schedule = blocks.schedule()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(schedule.svg())
    run.console.print(f"schedule: {path}, {schedule.share:.1%} of the time is idle")


def sample(
    config: Config, weights: dict[str, Tensor], text: Characters, count: int, seed: int
) -> str:
    """Text by the same model on one device."""
    model = GPT(config)
    model.load_state_dict(weights)
    start = text.encode("\n")[None]  # [1, 1]
    return text.decode(model.generate(start, count, torch.Generator().manual_seed(seed))[0])


if __name__ == "__main__":
    main()
    leave()
