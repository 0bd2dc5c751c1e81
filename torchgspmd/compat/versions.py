"""The version of torch at hand, beside those that the package was checked on."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from .private_apis import CHECKED, PARALLELIZE, PLAN, release, require


def is_newer() -> bool:
    """Whether this torch is newer than the newest checked one."""
    return release(torch.__version__) > max(map(release, CHECKED))


def is_checked() -> bool:
    return release(torch.__version__) in map(release, CHECKED)


@cache
def check_torch(*needed_for: str) -> None:
    """On first use: ShardingError if this torch lacks what is needed; one line if it is newer than
    what was checked, from one rank.
    """
    require(*needed_for)
    _say_newer()


@cache
def _say_newer() -> None:
    if is_newer() and os.environ.get("RANK", "0") == "0":
        version = ".".join(map(str, release(torch.__version__)))
        logging.getLogger("torchgspmd").warning(
            "torch %s is newer than what torchgspmd was checked on", version
        )


def check_plan() -> None:
    """Before a program is planned."""
    check_torch(PLAN)


def check_parallelize() -> None:
    """Before a module is wrapped."""
    check_torch(PLAN, PARALLELIZE)
