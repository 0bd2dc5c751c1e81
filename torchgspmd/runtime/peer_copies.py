"""A run's copies in its hosts' memory: every shard on its own host and on the next one.

    /dev/shm/torchgspmd-<user>-<run>/<start>/step-40/    the files of a checkpoint, of this host's
                                                         ranks and of their neighbors'

A rank's neighbor is the rank as many positions before it as a host has ranks. If one host is lost,
all files are still somewhere; hosts send one another those that they lack. A folder becomes a copy
by one rename, so a process that dies meanwhile leaves the copy before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from .checkpoint import (
    FILE,
    WRITING,
    Optimizers,
    checkpoints_in,
    content_of,
    load,
    parsed,
    write_said,
)
from .checkpoint_files import (
    METADATA,
    CheckedWriter,
    collect_sums,
    failure_of,
    fault_of,
    gathered,
    meet,
    meet_all,
    run,
)

KEPT = 2  # copies that a host holds: one is whole while the next one is written


class PeerCopies:
    """One run's copies on this host. Every rank makes one, in the same order.

    root: a folder in memory that a host's ranks share, and no others.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.rank, self.ranks = root, dist.get_rank(), dist.get_world_size()
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        self.leads = self.rank % self.local_ranks == 0  # among this host's ranks
        meet_all("the copies of the run in memory")
        # Files are bytes on the host, also where the model is on GPUs.
        self.group: Any = dist.new_group(backend="gloo")
        root.mkdir(parents=True, exist_ok=True)

    def save(self, model: nn.Module, optimizer: Optimizers, step: int, states: Any) -> None:
        """Copy the run to memory, and this rank's files to the next host."""
        meet_all("a copy of the run to memory")
        content, said = content_of(model, optimizer, step, states or {})
        path = self.root / f"step-{step}"
        writing = path.with_name(path.name + WRITING)
        meet(failure_of(lambda: self._clear(writing)))
        writer = CheckedWriter(writing)
        failure = failure_of(
            lambda: run(dcp.save, content, storage_writer=writer, process_group=self.group)
        )
        meet(failure)
        meet(failure_of(lambda: self._exchange(writing)))
        meet(failure_of(lambda: self._complete(writing, path, said)))

    def _clear(self, writing: Path) -> None:
        # The ranks of a host share the folder.
        if self.leads:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

    def _exchange(self, writing: Path) -> None:
        """Send this rank's files to its neighbor's host, the metadata to all hosts."""
        if self.ranks == self.local_ranks:
            return
        # torch.distributed.checkpoint names a rank's files __<rank>_<number>.distcp.
        own = {file.name: file.read_bytes() for file in writing.glob(f"__{self.rank}_*")}
        metadata: list[Any] = [(writing / METADATA).read_bytes() if self.rank == 0 else None]
        dist.broadcast_object_list(metadata, src=0, group=self.group)
        received = self._from_neighbor(own)
        if self.leads:
            received[METADATA] = metadata[0]
        for name, data in received.items():
            (writing / name).write_bytes(data)

    def _from_neighbor(self, own: dict[str, bytes]) -> dict[str, bytes]:
        """Return the files from the rank that is one host before this one."""
        to = (self.rank + self.local_ranks) % self.ranks
        source = (self.rank - self.local_ranks) % self.ranks
        sizes: list[Any] = gathered({name: len(data) for name, data in own.items()})
        files = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes[source].items()}
        # All at once: sends that wait for each other round a ring would never end.
        works = [
            dist.isend(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, group=self.group)
            for data in own.values()
            if data
        ]
        works += [
            dist.irecv(buffer, source, group=self.group)
            for buffer in files.values()
            if buffer.numel()
        ]
        for work in works:
            if work is not None:
                work.wait()
        return {name: buffer.numpy().tobytes() for name, buffer in files.items()}

    def _complete(self, writing: Path, path: Path, said: dict[str, Any]) -> None:
        """Turn the folder into a copy; each host's first rank does it."""
        mine = collect_sums(writing) if self.leads else {}
        sums = {name: each for part in gathered(mine) for name, each in part.items()}
        if not self.leads:
            return
        write_said(writing, {**said, "files": sums})
        shutil.rmtree(path, ignore_errors=True)
        writing.rename(path)
        for old in checkpoints_in(self.root)[:-KEPT]:
            shutil.rmtree(old)

    def newest(self) -> int:
        """Return the newest step whose files are all on some host; -1 if there is none."""
        mine: dict[int, list[str]] = {}
        wanted: dict[int, list[str]] = {}
        for path in checkpoints_in(self.root) if self.leads else ():
            said = parsed(path / FILE)
            if said is not None:
                whole = [n for n in said["files"] if not fault_of(path, said["files"], [n])]
                mine[said["step"]], wanted[said["step"]] = whole, [*said["files"]]
        self.held: list[dict[int, list[str]]] = [*map(_by_step, gathered(mine))]
        files = {step: names for each in gathered(wanted) for step, names in _by_step(each).items()}
        complete = [
            step
            for step, names in files.items()
            if {*names} <= {name for each in self.held for name in each.get(step, ())}
        ]
        return max(complete, default=-1)

    def load(self, step: int, model: nn.Module, optimizer: Optimizers, states: Any) -> None:
        """Load a step's copy; hosts first send one another the files that they lack."""
        path = self.root / f"step-{step}"
        names = sorted({name for each in self.held for name in each.get(step, ())})
        for name in [*names, FILE]:
            holders = [
                r
                for r, each in enumerate(self.held)
                if name in (*each.get(step, ()), *[FILE] * (step in each))
            ]
            lacks = self.leads and self.rank not in holders
            # Mostly no host lacks a file: then nothing is sent.
            if not any(gathered(lacks)):
                continue
            data: list[Any] = [None]
            if self.rank == holders[0]:
                data = [(path / name).read_bytes()]
            dist.broadcast_object_list(data, src=holders[0], group=self.group)
            if lacks:
                path.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data[0])
        # No rank reads before its host has all files.
        meet_all("the load of copies in memory")
        load(path, model, optimizer, states=states)


def _by_step(found: dict[str, list[str]]) -> dict[int, list[str]]:
    """Return files by step: JSON has texts as keys."""
    return {int(step): names for step, names in found.items()}
