"""The command line: plans, proposals, reports, measurements.

    torchgspmd plan model.py layout=tp --mesh data=8,model=8 --html plan.html
    torchgspmd check model.py plan.txt --mesh data=8,model=8 --update
    torchgspmd explicit model.py --mesh data=8,model=8 --write
    torchgspmd suggest model.py --devices 64 --hardware h100 --param-dtype bfloat16
    torchgspmd report saved.plan --hardware h100
    torchgspmd diff before.plan after.plan
    torchgspmd calibrate --processes 4
    torchgspmd doctor

Exit codes: 0; 1 for an error, which is said in a few lines; 2 for a wrong command line; 130 for
Ctrl-C. --traceback shows where an error was raised.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm.hardware import PRESETS
from ..compiler.golden import read as read_golden
from ..compiler.plan import Plan
from ..errors import ShardingError
from ..layout.mesh import Mesh
from . import plan_command
from .calibrate import calibrate
from .decoders import NamedDecoder
from .doctor import doctor
from .launch import launch
from .report.kernels import RECIPES
from .suggest import suggest


@dataclass(frozen=True)
class Command:
    """A word behind `torchgspmd`. run: returns the text to print."""

    name: str
    help: str
    example: str
    run: Callable[[argparse.Namespace], str]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="h100", choices=sorted(PRESETS), help="for the times")


def _add_check(parser: argparse.ArgumentParser) -> None:
    plan_command.add_example(parser)
    parser.add_argument("plan", type=Path, help="a golden text, from --update or Plan.check")
    parser.add_argument("--mesh", help="the devices; by default the mesh in the golden text")
    parser.add_argument("--update", action="store_true", help="write the golden text anew")
    parser.add_argument("--forward", action="store_true", help="without the backward")
    plan_command.add_options(parser, "plan")


def _check(args: argparse.Namespace) -> str:
    words = [*args.options, str(args.plan)]
    # Options may stand on either side of the text.
    texts = [word for word in words if not re.match(r"[^\W\d]\w*=", word)] or words
    text = words.pop(words.index(texts[-1]))
    mesh, grad = args.mesh or read_golden(text).mesh, not args.forward
    options = plan_command.given_options(args, "plan")
    result = plan_command.plan_file(args.file, mesh, words, grad=grad, **options)
    lines = result.check(text, args.update)
    return f"{text} is written\n{lines}".rstrip() if args.update else f"as in {text}"


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a file of Plan.save or `torchgspmd plan --save`")
    _add_hardware(parser)
    parser.add_argument("--print", action="store_true", help="print the partitioned graph too")
    parser.add_argument("--explain", metavar="NAME", help="tell why a value has its layout")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")


def _report(args: argparse.Namespace) -> str:
    plan = Plan.load(args.plan)
    if args.html:
        plan.html(args.html, args.hardware, args.plan.stem)
    texts = [str(plan)] if args.print else []
    texts += [plan.explain(args.explain, costs=True)] if args.explain else []
    return "\n\n".join([*texts, str(plan.report(args.hardware))])


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="a file of a plan")
    parser.add_argument("after", type=Path, help="another one, of the same model")
    _add_hardware(parser)


def _add_suggest(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, nargs="?", help="as for `plan`; its marks do not count")
    add("options", nargs="*", metavar="NAME=VALUE", help="options of example")
    add("--model", help="a published decoder in place of a file, such as llama3-70b")
    add("--batch", type=int, default=256, help="sequences in a step of --model")
    add("--sequence", type=int, default=8192, help="tokens of one, a power of two")
    add("--precision", choices=[*RECIPES], help="products' format, by a framework's fused kernels")
    parser.add_argument("--devices", type=int, required=True, help="how many")
    _add_hardware(parser)
    parser.add_argument("--memory", help='of a device that may be used, such as "80GB"')
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the search")
    plan_command.add_options(parser, "suggest")


def _suggest(args: argparse.Namespace) -> str:
    given = plan_command.given_options(args, "suggest")
    if bool(args.model) == bool(args.file):
        raise ShardingError.here("which model?", fix="write a file, or --model llama3-70b")
    if args.model:
        with torch.device("meta"):
            model = NamedDecoder(args.model, args.devices, args.sequence)
            tokens = torch.empty(args.batch, args.sequence, dtype=torch.long)
        arguments = (tokens, tokens)
    else:
        # Any mesh does, since the model's own marks do not count.
        model, arguments = plan_command.example_of(args.file, Mesh(data=1), args.options)
    found = suggest(
        model,
        arguments,
        devices=args.devices,
        hardware=args.hardware,
        memory=args.memory,
        seconds=args.seconds,
        precision=args.precision,
        **given,
    )
    return "\n\n".join(map(str, found))


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=4, help="that this host starts")
    parser.add_argument("--mesh", help="axes over which collectives are measured")


def _calibrate(args: argparse.Namespace) -> str:
    mesh = Mesh.parse(args.mesh) if args.mesh else Mesh(data=args.processes)
    # All ranks return the same hardware.
    return repr(launch(calibrate, mesh.size, mesh)[0])


COMMANDS = (
    Command(
        "plan",
        "layouts, time and memory of a model, without devices",
        "torchgspmd plan examples/gpt/model.py layout=tp --mesh data=8,model=8",
        plan_command.run,
        plan_command.add_arguments,
    ),
    Command(
        "check",
        "compare a model's plan with a golden text; 1 if a line differs",
        "torchgspmd check examples/gpt/model.py layout=tp gpt.txt --mesh data=8,model=8 --update",
        _check,
        _add_check,
    ),
    Command(
        "explicit",
        "the lines that name each exchange in the source, as gspmd.reshard",
        "torchgspmd explicit examples/gpt/model.py layout=tp --mesh data=8,model=8",
        plan_command.run_explicit,
        plan_command.add_explicit_arguments,
    ),
    Command(
        "suggest",
        "search a mesh and marks for a number of devices",
        "torchgspmd suggest examples/gpt/model.py --devices 8 --param-dtype bfloat16",
        _suggest,
        _add_suggest,
    ),
    Command(
        "report",
        "what a step of a saved plan takes, holds and sends",
        "torchgspmd report saved.plan --hardware a100",
        _report,
        _add_report,
    ),
    Command(
        "diff",
        "where two saved plans of a model differ",
        "torchgspmd diff before.plan after.plan",
        lambda args: str(Plan.load(args.before).diff(Plan.load(args.after), args.hardware)),
        _add_diff,
    ),
    Command(
        "calibrate",
        "measure processes of this host: a Hardware to paste",
        "torchgspmd calibrate --processes 4",
        _calibrate,
        _add_calibrate,
    ),
    Command(
        "doctor",
        "the version of torch, what it lacks, backends at hand",
        "torchgspmd doctor",
        lambda args: str(doctor()),
    ),
)


def run(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    try:
        print(args.command.run(args))
        # Here, so that a closed pipe is noticed before the interpreter's own flush.
        sys.stdout.flush()
    except KeyboardInterrupt:
        # 128 + SIGINT, as shells report it.
        return 130
    except BrokenPipeError:  # from `| head`
        # Python flushes stdout once more at exit, into a pipe that is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        print(_text(error), file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    # Raw, so that the examples keep their lines.
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("torchgspmd", None, summary, rest, formatter_class=shape)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        example = f"example:\n  {command.example}"
        inner = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            epilog=example,
            formatter_class=shape,
        )
        command.add_arguments(inner)
        inner.add_argument("--traceback", action="store_true", help="show where an error is from")
        inner.set_defaults(command=command)
    return parser


def _text(error: Exception) -> str:
    """Return an error in a few lines: one in the user's file with its line."""
    if isinstance(error, ShardingError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}\n  where {last.filename}:{last.lineno}"
