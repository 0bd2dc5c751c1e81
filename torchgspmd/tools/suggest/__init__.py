"""suggest: search mesh shapes and marks, with the planner and the estimate as judge."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ...comm.hardware import Hardware
from ...compiler.options import Options, documented
from ...errors import ShardingError
from ...fx_passes.units import parse_size
from ..decoders import NamedDecoder, RunDecoder
from ..report.kernels import RECIPES, Kernels
from . import candidates
from .decoder_runs import propose, run_of
from .judge import Judge
from .proposal import Proposal as Proposal
from .search import Search

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...compiler.option_types import Precision

TELL = 5.0  # seconds between two lines on the search's progress
SEARCH, RECHECK = 0.6, 0.8  # when to plan the best again with one layer more, and when to refine


@documented("suggest")
def suggest(
    model: nn.Module | Callable[[], nn.Module],
    args: object = (),
    *,
    devices: int,
    hardware: str | Hardware = "h100",
    memory: str | float | None = None,
    seconds: float = 60.0,
    kwargs: dict[str, object] | None = None,
    precision: str | None = None,
    **options: Unpack[Precision],
) -> list[Proposal]:
    """Search a mesh and marks for a model, and return the best as scripts for torchrun.

    Nothing runs but the planner: model and arguments may be on the meta device. A line on stderr
    tells the progress every five seconds. The first tensor dimension of every argument is taken for
    the batch. Where memory asks for it, layers are recomputed, and the batch is divided into
    microbatches. Adam's states are counted. The script trains the loss that the model returns: a
    result named loss, or the first scalar. With a loss, layers are tried in stages.

    Args:
        model: Its own marks do not count. Or a function that makes it, which the script imports; it
            is called on the meta device.
        args: A call's positional arguments, for the global batch; a tuple, or the only one.
        devices: How many.
        hardware: A preset, or a Hardware.
        memory: Bytes on a device that may be used, such as "80GB"; by default all it has.
        seconds: CPU time for the search; it returns the best by then.
        kwargs: A call's keyword arguments.
        precision: "bf16", "fp8", "mxfp8" or "nvfp4": the times are those of a framework's fused
            kernels with products in this format, which the script itself does not use. By default
            each operation of PyTorch is a kernel. With it, a published decoder by its name
            (`NamedDecoder`) is searched over all degrees of parallelism: data, tensor, context,
            experts, FSDP, stages, virtual stages and microbatches. The layout of a `RunDecoder` is
            tried first.
        {options}

    Returns:
        At most five proposals, the fastest first; those that need too much memory last, and say so.
        One of them sends least among all that are little slower than the best.

    Raises:
        ShardingError: The model cannot be captured, `memory` is no size, or there is no such
            precision.

    Example:
        >>> model = torch.nn.Linear(64, 64, device="meta")
        >>> x = torch.empty(65536, 64, device="meta")
        >>> print(suggest(model, (x,), devices=2, seconds=5)[0].code)
        mesh = gspmd.Mesh(data=2, model=1)
        model = gspmd.parallelize(model, mesh, in_specs=("data _",), out_specs="same")
    """
    begin = time.process_time()
    chosen = Options.read("suggest", options)
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    builder = None
    if not isinstance(model, nn.Module):
        builder = model
        with torch.device("meta"):
            model = builder()
    speed, search = Hardware.of(hardware), cast("Search | None", None)
    limit = speed.memory if memory is None else parse_size(memory)
    if limit is None:
        raise ShardingError.here(f"memory {memory!r} is no size", fix='write "80GB" or 80e9')
    if precision is not None and precision not in RECIPES:
        raise ShardingError.here(
            f"there is no precision {precision!r}", fix=f"take one of {', '.join(RECIPES)}"
        )
    kernels = Kernels(precision) if precision else None
    deadline, recheck, end = (begin + share * seconds for share in (SEARCH, RECHECK, 1.0))

    def line() -> str:
        done = search.progress() if search else "the model is captured"
        return f"torchgspmd: suggest: {time.process_time() - begin:.0f} s, {done}"

    if kernels and isinstance(model, (NamedDecoder, RunDecoder)):
        run = run_of(model, args, devices, replace(speed, memory=limit), kernels)
        if found := propose(run, end, chosen.precision(), isinstance(model, RunDecoder)):
            return found
    with told_again_and_again(line):
        judge = Judge(model, args, kwargs or {}, speed, chosen, kernels)
        search = Search(judge, limit, deadline, recheck, end)
        search.run(list(candidates.meshes(devices, judge.stacks.values())))
        counts, source = dict(judge.counts), judge.source(builder)
        return [replace(each, counts=counts, source=source) for each in search.best()]


@contextmanager
def told_again_and_again(line: Callable[[], str]) -> Generator[None]:
    """Print a line on stderr every few seconds, from another thread, until the block ends."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(TELL):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
