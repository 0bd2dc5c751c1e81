"""A checkpoint's files: checksums beside each rank's files, faults, and who writes.

A rank puts its files' sizes and checksums into a sum file before rank 0 is told that it has
written. Then rank 0 puts all into gspmd.json. A reader looks at its share.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.futures import Future

from ..errors import ShardingError

SUMS, OWNER, METADATA = ".sums", ".owner", ".metadata"
_FRESH = 60.0  # seconds since another host's process has written last, if it still writes
_PART = 1 << 22  # bytes that are read at once

Sums = Mapping[str, tuple[int, int]]  # bytes and checksum, by file


class CheckedWriter(FileSystemWriter):
    """Writes one rank's files, and leaves their sizes and checksums beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's files, then the file with their sums."""
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        sums = {name: sum_of(self.folder / name) for name in sorted(names)}
        (self.folder / f"{plan.storage_data.prefix}{SUMS}").write_text(json.dumps(sums))
        return written


def sum_of(file: Path) -> tuple[int, int]:
    """Return a file's size and the checksum over its bytes."""
    size, checksum = 0, 0
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return size, checksum


def collect_sums(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the sums that all ranks have left, and remove their files."""
    sums = {METADATA: sum_of(folder / METADATA)}
    for file in sorted(folder.glob(f"*{SUMS}")):
        sums |= {name: (size, checksum) for name, (size, checksum) in _read(file).items()}
        file.unlink()
    return sums


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def are_sums(value: object) -> bool:
    """Return whether a JSON value has sizes and checksums by file names."""
    return isinstance(value, dict) and all(
        isinstance(each, list)
        and len(each) == 2
        and all(type(n) is int for n in each)
        # A name with a folder in it could lead out of the checkpoint.
        and Path(name).name == name
        for name, each in value.items()
    )


def fault_of(folder: Path, sums: Sums, names: Iterable[str]) -> str:
    """Return the first damaged file's fault; "" if all are whole."""
    for name in names:
        file, (size, checksum) = folder / name, sums[name]
        try:
            found = sum_of(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        if found[0] != size:
            return f"{file} has {found[0]:,} bytes, and {size:,} were written"
        if found[1] != checksum:
            return f"{file} has other bytes than were written"
    return ""


def make_own(writing: Path, token: str) -> None:
    """Make the folder that is written into, without a dead process's files.

    Raises:
        ShardingError: Another process that lives writes into it.
    """
    owner = writing / OWNER
    if owner.exists():
        host, pid, other = (owner.read_text().split() + ["", "0", ""])[:3]
        # The same token is a former attempt of this process.
        if other != token and _lives(host, int(pid), writing):
            raise _shared(writing, f"process {pid} on host {host} writes it")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    owner.write_text(f"{socket.gethostname()} {os.getpid()} {token}")


def release(writing: Path, token: str) -> None:
    """Take the writer's mark out of a folder that becomes a checkpoint.

    Raises:
        ShardingError: Another process has written into it.
    """
    owner = writing / OWNER
    found = owner.read_text().split() if owner.exists() else []
    if len(found) != 3 or found[2] != token:
        by = f"process {found[1]} on host {found[0]}" if len(found) == 3 else "another process"
        raise _shared(writing, f"{by} has written it meanwhile")
    owner.unlink()


def _shared(writing: Path, why: str) -> ShardingError:
    return ShardingError.here(
        f"two jobs write the checkpoint {writing}",
        why=why,
        fix="give each job a folder of its own; end the other one if it is a former start of this",
    )


def _lives(host: str, pid: int, writing: Path) -> bool:
    """Return whether a folder's writer may still write; on another host, whether it has lately."""
    if host != socket.gethostname():
        # A process on another host cannot be asked.
        times = [each.stat().st_mtime for each in writing.iterdir()]
        return time.time() - max(times, default=0.0) < _FRESH
    # An earlier save of this process, which has failed.
    if pid == os.getpid():
        return False
    try:
        # Signal 0 only asks whether the process is there.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
