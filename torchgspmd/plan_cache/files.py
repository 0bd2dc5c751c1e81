"""The folder of plans: TORCHGSPMD_CACHE, by default ~/.cache/torchgspmd; none if that is empty.

The first line of a file is the checksum of the others, the second one the key. It is written under
another name and renamed, so that it is there whole or not at all. What cannot be read is not there,
and what cannot be written is left out. A file that another user has, or may write, is not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

_MOST = 256  # files; the oldest go first
_LOG = logging.getLogger("torchgspmd")


def folder() -> Path | None:
    """Return the folder of plans, or None."""
    name = os.environ.get("TORCHGSPMD_CACHE")
    if name is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base, "torchgspmd")
    return Path(name).expanduser() if name else None


def read(key: str) -> str | None:
    """Return the text of a key, or None."""
    if (file := _file(key)) is None:
        return None
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                _LOG.info("%s is not read: other users may write it", file)
                return None
            checksum, _, text = stream.read().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != checksum:
            _LOG.info("%s is not read: it is damaged", file)
            return None
        has, _, plan = text.decode().partition("\n")
        return plan if has == json.dumps(key) else None
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            _LOG.info("%s is not read: %s", file, error)
        return None


def write(key: str, plan: str) -> None:
    """Write the text of a key, whole or not at all."""
    if (file := _file(key)) is None:
        return
    text = f"{json.dumps(key)}\n{plan}".encode()
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(".tmp", dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        os.replace(temporary, file)
        temporary = None
        _remove_oldest(file.parent)
    except OSError as error:
        _LOG.info("no plan is written to %s: %s", file.parent, error)
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _file(key: str) -> Path | None:
    parent = folder()
    return parent and parent / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _remove_oldest(parent: Path) -> None:
    """Remove the oldest files beyond a number of them."""
    files = sorted(parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_MOST:]:
        file.unlink(missing_ok=True)
