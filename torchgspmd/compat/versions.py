"""Compare the installed torch version with those that the package was checked on."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from .private_apis import CHECKED, PARALLELIZE, PLAN, release, require


def is_newer() -> bool:
    """True if this torch is newer than the newest checked one."""
    return release(torch.__version__) > max(map(release, CHECKED))


def is_checked() -> bool:
    """True if the tests pass on this torch release."""
    return release(torch.__version__) in map(release, CHECKED)


@cache
def check_torch(*needed_for: str) -> None:
    """Raise a ShardingError if this torch lacks a needed API. Results are cached.

    Rank 0 logs one line if this torch is newer than the checked ones.
    """
    require(*needed_for)
    _warn_if_newer()


@cache
def _warn_if_newer() -> None:
    if is_newer() and os.environ.get("RANK", "0") == "0":
        # Without the build's suffix, such as +cu126, which says nothing about APIs.
        version = ".".join(map(str, release(torch.__version__)))
        logging.getLogger("torchgspmd").warning(
            "torch %s is newer than what torchgspmd was checked on", version
        )


def check_plan() -> None:
    """Check torch before a program is planned."""
    check_torch(PLAN)


def check_parallelize() -> None:
    """Check torch before a module is wrapped."""
    check_torch(PLAN, PARALLELIZE)
