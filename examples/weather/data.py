"""Temperatures of a globe, month by month: an ensemble of forecasts, or waves that need no
download.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common.download import download
from torch import Tensor

# On PyPI; its wheel carries 13 seasonal forecasts of the Met Office's GloSea4 (Open Government
# Licence), of six months each.
PACKAGE, VERSION = "iris-sample-data", "2.5.2"
WHEEL = "iris_sample_data-2.5.2-py3-none-any.whl"
MEMBERS = "iris_sample_data/sample_data/GloSea4/ensemble_"
TESTED = 3  # members that training does not see
HISTORY = 2  # months that a forecast is made of


@dataclass(frozen=True)
class Maps:
    """Of all members and months, [members, months, y, x], with mean 0 and deviation 1."""

    maps: Tensor
    mean: float
    deviation: float  # kelvins

    @classmethod
    def load(cls, name: str, cache: Path) -> Maps:
        """name: `glosea` (downloaded once into `cache`: 145 x 192 points) or `waves` (25 x 37)."""
        maps = torch.from_numpy(_glosea(cache) if name == "glosea" else _waves())
        mean, deviation = float(maps.mean()), float(maps.std())
        return cls((maps - mean) / deviation, mean, deviation)

    def batch(self, step: int, seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Months before [b, HISTORY, y, x], which month is asked for [b], and it [b, y, x]: a
        function of seed and step, so the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        members = torch.randint(len(self.maps) - TESTED, (size,), generator=random)
        months = torch.randint(HISTORY, self.maps.shape[1], (size,), generator=random)
        return self._at(members, months)

    def test(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of the members that training does not see."""
        months = torch.arange(HISTORY, self.maps.shape[1]).repeat(TESTED)
        members = torch.arange(TESTED).repeat_interleave(self.maps.shape[1] - HISTORY)
        return self._at(len(self.maps) - 1 - members, months)

    def _at(self, members: Tensor, months: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = months[:, None] - HISTORY + torch.arange(HISTORY)  # [b, HISTORY]
        return self.maps[members[:, None], before], months, self.maps[members, months]


def _glosea(cache: Path) -> np.ndarray:
    path = cache / "glosea.npy"
    if not path.exists():
        wheel = download(PACKAGE, VERSION, WHEEL, cache, instead="--data waves needs no download")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(n for n in archive.namelist() if n.startswith(MEMBERS))
            maps = np.stack([_fields(archive.read(name)) for name in names])
        partial = cache / "partial.npy"
        np.save(partial, maps)
        partial.rename(path)
    return np.load(path)


def _fields(data: bytes) -> np.ndarray:
    """The fields of a file in the Met Office's PP format, [fields, y, x]: before each a record of
    45 whole numbers and 19 others, and around each record its length, all big-endian.
    """
    fields, at = [], 0
    while at < len(data):
        header = np.frombuffer(data, ">i4", 45, at + 4)
        rows, columns, packing = header[17], header[18], header[20]
        if packing:
            raise SystemExit(f"fields of the ensemble are packed ({packing})")
        fields.append(np.frombuffer(data, ">f4", rows * columns, at + 268).reshape(rows, columns))
        at += 272 + 4 * rows * columns
    return np.stack(fields).astype(np.float32)


def _waves() -> np.ndarray:
    """Warmth that moves around the globe, faster in the south."""
    member, month, y, x = np.ogrid[:6, :6, -1:1:25j, : 2 * np.pi : 37j]
    wave = np.sin(3 * x + (1 - y) * month + member) * np.cos(2 * y)
    return (280 + 20 * np.cos(1.5 * y) + 5 * wave).astype(np.float32)
