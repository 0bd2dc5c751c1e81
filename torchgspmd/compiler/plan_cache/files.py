"""The plan folder, and a plan's key: all that it depends on and that its guards do not compare.

The folder is TORCHGSPMD_CACHE, by default ~/.cache/torchgspmd; none if that is empty. The folder
and its files belong to the user, and nobody else may write them; otherwise one log line says so,
and no plan is read or written. Links are not followed.

A file's first line is a keyed checksum over the rest (HMAC-SHA256), the second one is the plan's
key. The secret is a file that only the user reads, beside the folder: `torchgspmd.secret`; in it,
if the user may not write beside it. So a file that was changed, or comes from elsewhere, is not
taken, though its checksum may have been computed again. A file is written under another name and
renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import platform
import secrets
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...capture.state.bytecode_names import is_installed
from ...capture.state.dependencies import CALL, START, TABLES, facts_of
from ...comm.kinds import KINDS
from ...layout.mesh import Mesh
from .guard_text import content, module_names
from .json_text import read_regular_file
from .values import Stale, Unshareable

_FORMAT = 3
_OWN = __name__.partition(".")[0]
# Variables that change no plan, or differ between hosts, as those of an elastic job's copies do.
_NO_OPTIONS = tuple(
    f"TORCHGSPMD_{name}" for name in ("CACHE", "DUMP", "CHECK", "COPIES", "BUG_REPORT", "HOST")
)


@dataclass(frozen=True)
class Identity:
    """A plan's key.

    call: the call, the same on all ranks. code: a checksum for each loaded user module, and a
    version for each installed package.
    """

    call: str
    code: dict[str, str]

    @property
    def text(self) -> str:
        """Return the whole key as text."""
        return json.dumps([self.call, self.code], sort_keys=True)

    def check_code(self, code: dict[str, str]) -> None:
        """Raise Stale if a module loaded here differs there, or is not loaded."""
        # These alone: the other process may have loaded more modules.
        for name, version in self.code.items():
            if code.get(name) != version:
                raise Stale(f"module {name} is another")


def identity_of(model: nn.Module, mesh: Mesh, text: str, options: dict[str, object]) -> Identity:
    """Return the key for the plan of a model's call.

    text: the call, and the model's modes. options: those for parallelize.

    Raises:
        Unshareable: A hook or an option has no text.
    """
    names = module_names(model)
    rows = [
        _FORMAT,
        [torch.__version__, platform.python_version(), platform.machine(), _own_code()],
        [*map(str, _settings()), *sorted(KINDS)],
        [str(mesh), text],
        content(options, names),
        [*_description(model, names)],
    ]
    return Identity(json.dumps(rows), _loaded_code())


def _settings() -> Iterator[object]:
    """Yield the torch settings that decide its traces."""
    yield torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():  # torch 2.9 advises another way to set it
        warnings.simplefilter("ignore")
        yield torch.get_float32_matmul_precision()
    yield torch.backends.cudnn.enabled
    yield torch.backends.mkldnn.enabled
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        yield getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
    if torch.cuda.is_available():
        # torch chooses kernels by the GPU, too.
        yield torch.cuda.get_device_properties(0)
    for name, value in sorted(os.environ.items()):
        if name.startswith("TORCHGSPMD_") and name not in _NO_OPTIONS:
            yield f"{name}={value}"


def _description(model: nn.Module, names: dict[int, str]) -> Iterator[Any]:
    """Yield a model's facts, by the rows of dependencies.py."""
    names = {**names, id(model): "the model"}
    for name, value in facts_of(model, TABLES, CALL, START):
        yield [name, value if isinstance(value, str) else content(value, names)]


@cache
def _own_code() -> str:
    """Return a checksum over this package's files."""
    files = sorted(Path(str(sys.modules[_OWN].__file__)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _loaded_code() -> dict[str, str]:
    """Return a checksum for each user module, and a version for each installed package.

    Raises:
        Unshareable: Code was typed in, so that nobody can compare it.
    """
    code: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top in sys.stdlib_module_names or top in ("torch", _OWN):
            if name != "__main__":
                continue
        if name == "__main__" and file is None:
            raise Unshareable("its code was typed in")
        # A version and the size of one file, not all content: an installed package has many files.
        if file is None or is_installed(name):
            if name == top and file is not None:
                size = os.path.getsize(file) if os.path.exists(file) else 0
                code[name] = f"{vars(module).get('__version__', '')} {size}"
        elif os.path.isfile(file):
            code[name] = _checksum(file, os.stat(file).st_mtime_ns)
    return code


@cache
def _checksum(file: str, time: int) -> str:
    """Return a file's checksum at a time of change."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


_MOST = 256  # files; the oldest go first
_SUFFIX = ".secret"  # of its file
_LENGTH = 32  # of the secret, in bytes
_LOG = logging.getLogger("torchgspmd")


class _Refused(OSError):
    """A folder or file that others may write, or that is not the one this process wrote."""


def folder() -> Path | None:
    """Return the plan folder, or None."""
    name = os.environ.get("TORCHGSPMD_CACHE")
    if name is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base, "torchgspmd")
    return Path(name).expanduser() if name else None


def read(key: str) -> str | None:
    """Return the text for a key, or None."""
    if (parent := folder()) is None:
        return None
    file = _file(parent, key)
    try:
        _check_owner(parent, os.lstat(parent), stat.S_ISDIR)
        checksum, _, text = _read_own(file).partition(b"\n")
        # compare_digest takes the same time for any bytes: a checksum cannot be guessed step by
        # step.
        if not hmac.compare_digest(_keyed_checksum(parent, text), checksum):
            raise _Refused(f"{file} is not read: it was changed, or another user wrote it")
        # The file's name is only a part of the key's hash, so the key itself is compared.
        has, _, plan = text.decode().partition("\n")
        if has != json.dumps(key):
            raise _Refused(f"{file} is not read: it has another key")
        return plan
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log(f"{file} is not read", error)
        return None


def write(key: str, plan: str) -> None:
    """Write the text for a key, whole or not at all."""
    if (parent := folder()) is None:
        return
    text = f"{json.dumps(key)}\n{plan}".encode()
    try:
        # Private from the start: others who may write here could plant a plan.
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(parent, os.lstat(parent), stat.S_ISDIR)
        _replace(_file(parent, key), _keyed_checksum(parent, text) + b"\n" + text)
        # Remove the oldest files beyond the limit.
        files = sorted(parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[_MOST:]:
            file.unlink(missing_ok=True)
    except OSError as error:
        _log(f"no plan is written to {parent}", error)


def _check_owner(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise _Refused unless a folder or file is the user's, and nobody else may write it."""
    if not is_kind(status.st_mode):
        raise _Refused(f"{path} is not read: it is a link or of another kind")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise _Refused(
            f"{path} is not read: another user has it, or may write it; "
            "fix: chmod go-w, or another folder by TORCHGSPMD_CACHE"
        )


def _read_own(file: Path) -> bytes:
    """Return the content of a file that the user owns, and that is no link."""
    if stat.S_ISLNK(os.lstat(file).st_mode):
        raise _Refused(f"{file} is not read: it is a link")
    # The status of the opened file: since lstat the name may mean another one.
    content, status = read_regular_file(file)
    _check_owner(file, status, stat.S_ISREG)
    return content


def _keyed_checksum(parent: Path, text: bytes) -> bytes:
    """Return the keyed checksum for a text."""
    return hmac.new(_secret(parent), text, hashlib.sha256).hexdigest().encode()


def _secret(parent: Path) -> bytes:
    """Return a folder's secret, which the first call makes."""
    beside, inside = parent.with_name(parent.name + _SUFFIX), parent / _SUFFIX
    file = next(filter(os.path.lexists, (beside, inside)), None)
    if file is None:
        file, content = beside, secrets.token_bytes(_LENGTH)
        try:
            # Two processes may start at once: the first secret stays, and both read it.
            _replace(beside, content, only_new=True)
        except PermissionError:
            file = inside
            _replace(inside, content, only_new=True)
    secret = _read_own(file)
    if len(secret) != _LENGTH:
        raise _Refused(f"{file} is not read: it has {len(secret)} bytes")
    return secret


def _replace(file: Path, content: bytes, only_new: bool = False) -> None:
    """Write a file that only the user may read. only_new: leave one that is there."""
    # In the same folder, as a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        if only_new:
            # A link fails if the file exists, which a rename would replace.
            with suppress(FileExistsError):
                os.link(temporary, file)
        else:
            os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _log(what: str, error: Exception) -> None:
    """Say why there is no cache: a warning if someone else may be at work."""
    if isinstance(error, _Refused):
        _LOG.warning("%s", error)
    else:
        _LOG.info("%s: %s", what, error)


def _file(parent: Path, key: str) -> Path:
    return parent / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
