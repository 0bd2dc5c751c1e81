"""Bytes that plans predict against those handed to process groups, for all examples and layouts.

    torchrun --nproc-per-node 4 benchmarks/counted_bytes.py [--only gpt moe]
    torchrun --nproc-per-node 3 benchmarks/counted_bytes.py --only generate

Every example of examples/common/all.py runs two small steps in each of its layouts on four devices.
examples/generate, which needs transformers, runs its programs of a prompt and of a token, twice and
with random weights, on each of its meshes that has as many devices as there are processes. The
second time all calls of collectives are intercepted on every rank, and their bytes are added up:
what a rank sends to others, by the sizes of the tensors and splits that it hands over. Of an
all_reduce these are 2 (n-1)/n of the tensor. Where ranks differ, the plan has the bytes of the one
that sends most, of a permute those of the one that sends or receives most. Exits with 1 if a plan
has other bytes than were counted.

The comparison of the ranks (comm/rank_check.py) is no part of a plan, and counted by itself. Where
it carries a small sum, that counts as the all_reduce that it replaces. The optimizer runs behind
the plan, except in examples/bert, whose step is one program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import math
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import torchgspmd as gspmd
from torchgspmd.comm.collective import CollectiveBuilder
from torchgspmd.comm.kinds import (
    WIRE_OPS,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from torchgspmd.comm.process_groups import ProcessGroups, groups_of
from torchgspmd.comm.rank_check import RankCheck
from torchgspmd.compat.private_apis import TorchDispatchMode

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from common import run as common_run  # noqa: E402
from common.all import ALL  # noqa: E402

MESHES_OF_GENERATE = ("model=4", "model=2,seq=2", "model=3", "model=2", "model=3,seq=2")

Splits = tuple[
    tuple[int, ...], tuple[int, ...], str
]  # of an all_to_all: from and to, and its group


@dataclass(frozen=True)
class Message:
    """A collective that a rank took part in. sent: bytes to other ranks. busy: those by which a
    plan counts it.
    """

    name: str
    sent: float
    busy: float


@dataclass
class Traffic(TorchDispatchMode):
    """Intercepts the collectives of a block on this rank."""

    groups: ProcessGroups
    permutes: set[Splits]
    messages: list[Message] = field(default_factory=list)
    compared: float = 0.0  # bytes of comparisons of the ranks

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WIRE_OPS:
            self.messages.append(Message(func._opname, *self.bytes(func, *args)))
        elif func.namespace == "c10d":
            self.compared += sum(x.nbytes for x in args if isinstance(x, Tensor)) / 2
        return func(*args, **(kwargs or {}))

    def bytes(self, op: Any, x: Tensor, *arguments: Any) -> tuple[float, float]:
        """Return what this rank sends to others in a collective, and what a plan counts of it."""
        ranks, me = (f(arguments[-1]) for f in (self.groups.size, self.groups.position))
        if any(op is wire.op for wire in all_to_all.wire):
            row = x[:1].nbytes
            assert sum(arguments[1]) == len(x), f"{arguments[1]} of {list(x.shape)}"
            received, sent = (float((sum(rows) - rows[me]) * row) for rows in arguments[:2])
            is_permute = (*map(tuple, arguments[:2]), arguments[2]) in self.permutes
            return sent, max(sent, received) if is_permute else sent
        for kind in (all_gather, reduce_scatter, all_reduce):
            if any(op is wire.op for wire in kind.wire):
                sent = kind.sent(x.nbytes * (ranks if kind is all_gather else 1), ranks)
                return sent, sent
        raise AssertionError(f"{op} is no message that a plan knows of")

    @contextlib.contextmanager
    def carried(self) -> Iterator[None]:
        """Count the sums that comparisons of the ranks carry."""
        begin = RankCheck.begin

        def counting(check: RankCheck, term: Tensor | None = None) -> RankCheck:
            if term is not None:
                sent = all_reduce.sent(term.nbytes, self.groups.mesh.size)
                self.messages.append(Message("carried", sent, sent))
            return begin(check, term)

        with mock.patch.object(RankCheck, "begin", counting):
            yield


@contextlib.contextmanager
def permutes_lowered() -> Iterator[set[Splits]]:
    """Note which all_to_alls are permutes, where programs are lowered in the block."""
    exchange, found = CollectiveBuilder.exchange, set[Splits]()

    def noting(build: Any, x: Any, receives: list[int], sends: list[int], name: str) -> Any:
        if build.node.args[0] == permute.name:
            found.add((tuple(receives), tuple(sends), name))
        return exchange(build, x, receives, sends, name)

    with mock.patch.object(CollectiveBuilder, "exchange", noting):
        yield found


def counted(groups: ProcessGroups, run: Callable[[], Any]) -> tuple[Traffic, float]:
    """Call a function twice, and count the second call. Returns the traffic of this rank, and the
    bytes of the busiest rank of each message, added up.
    """
    with permutes_lowered() as permutes:
        run()
    traffic = Traffic(groups, permutes)
    with traffic.carried(), traffic:
        run()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, traffic.messages)
    names = [[message.name for message in messages] for messages in ranks]
    assert all(row == names[0] for row in names), f"ranks send other messages: {names}"
    return traffic, math.fsum(max(m.busy for m in column) for column in zip(*ranks))


# ------------------------------------------------------------------------------------ the examples


class Counted(Exception):
    """Ends the training of an example."""

    def __init__(self, plan: gspmd.Plan, traffic: Traffic, sent: float) -> None:
        self.plan, self.traffic, self.sent = plan, traffic, sent

    @property
    def is_planned(self) -> bool:
        """Return True if the plan has the bytes that were counted."""
        return abs(self.plan.sent_bytes - self.sent) < 1e-6

    def row(self, name: str) -> str:
        """Return a line of the table."""
        return (
            f"{name:44}{len(self.traffic.messages):9}{self.plan.sent_bytes:14,.0f}"
            f"{self.sent:14,.0f}  {'equal' if self.is_planned else 'DIFFERENT'}"
        )


def count_step(
    run: Any,
    model: Any,
    optimizer: Any,
    batch: Callable[[int], tuple[Tensor, ...]],
    *_: Any,
    **o: Any,
) -> NoReturn:
    """Count the second step of a training, in place of common.run.train."""

    def step() -> None:
        optimizer.zero_grad()
        out = model(*arguments)
        if not o.get("whole"):
            (out[0] if isinstance(out, tuple) else out).backward()

    arguments = [t.to(run.device, run.dtype if t.is_floating_point() else None) for t in batch(0)]
    traffic, sent = counted(groups_of(run.mesh, "cpu"), step)
    raise Counted(model.plan, traffic, sent)


def run_example(name: str, layout: str, mesh: str, *options: str) -> Counted:
    """Run an example up to its second step."""
    folder, modules, path = EXAMPLES / name, dict(sys.modules), list(sys.path)
    script = folder / "train.py"
    with (
        tempfile.TemporaryDirectory() as out,
        mock.patch.object(common_run, "train", count_step),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        sys.argv = [str(script), *ALL[name].options.split(), "--plot", f"{out}/loss.png"]
        sys.argv += ["--layout", layout, "--mesh", mesh, *options]
        sys.path.insert(0, str(folder))
        try:
            runpy.run_path(str(script))["main"]()
        except Counted as result:
            return result
        finally:  # another example has other modules of these names
            sys.path[:] = path
            for module in {"model", "data"} - set(modules):
                sys.modules.pop(module, None)
    raise AssertionError(f"{name} does not train")


def run_generate(mesh: gspmd.Mesh) -> Iterator[tuple[str, Counted]]:
    """Yield what the programs of a prompt and of a token of examples/generate send."""
    spec = importlib.util.spec_from_file_location("generate", EXAMPLES / "generate" / "model.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(example := importlib.util.module_from_spec(spec))
    torch.manual_seed(0)
    model, (token, position, mask, cache) = example.example(mesh, batch=3, length=24, layers=2)
    model = gspmd.parallelize(model, mesh)
    prompt, places = token.expand(3, 8), torch.arange(8).expand(3, 8)
    for name, arguments in (("prompt", (prompt, places)), ("token", (token, position + 8))):
        run = functools.partial(model, *arguments, mask, cache)
        traffic, sent = counted(groups_of(mesh, "cpu"), run)
        yield name, Counted(model.plan, traffic, sent)


def rows(names: list[str], processes: int) -> Iterator[tuple[str, Counted]]:
    """Yield the name of each program on so many processes, and what it sends."""
    for name in names:
        if name != "generate":
            for choice in (*ALL[name].runs, *ALL[name].more) if processes == 4 else ():
                yield f"{name} {choice}", run_example(name, *choice.split())
            continue
        for mesh in map(gspmd.Mesh.parse, MESHES_OF_GENERATE):
            for program, row in run_generate(mesh) if mesh.size == processes else ():
                yield f"{name} {program} {mesh}", row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ALL, *["generate"] * bool(importlib.util.find_spec("transformers"))]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first, others, count = dist.get_rank() == 0, 0, 0
    if first:
        print(f"{'example, layout, mesh':44}{'messages':>9}{'planned':>14}{'counted':>14}")
        if "generate" not in names:
            print("generate: not counted, as transformers is not installed")
    for name, row in rows(args.only, dist.get_world_size()):
        count += 1
        others += not row.is_planned
        if first:
            print(row.row(name), flush=True)
    if first:
        print(f"{count} runs, {others} of them different")
    dist.barrier()
    sys.stdout.flush()
    os._exit(others > 0 or not count)  # gloo's threads may abort a process that exits slowly


if __name__ == "__main__":
    main()
