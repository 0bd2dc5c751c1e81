"""Pictures of a few handwritten digits, and the words that they are read as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vit.data import load_digits

NAMES = "zero one two three four five six seven eight nine".split()
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"  # a text begins and ends with the first one
COUNT = 3  # digits in a picture
LENGTH = COUNT * 6  # letters of the longest text, with blanks and the end


@dataclass(frozen=True)
class Pictures:
    images: Tensor  # [count, 1, h, w], of one digit each
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, name: str, cache: Path) -> Pictures:
        """name: `mnist` (downloaded once into `cache`) or `digits` (of scikit-learn)."""
        digits = load_digits(name, cache)
        return cls(digits.images, digits.labels, digits.test_images, digits.test_labels)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a picture: a third higher than a digit, odd."""
        h, w = self.images.shape[2:]
        return (h + h // 3) | 1, (COUNT * w) | 1

    def batch(
        self, step: int, seed: int, size: int, test: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures [b, 1, y, x], letters before [b, u] and the ones that follow [b, u]: a function
        of seed and step, so the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        images, labels = (
            (self.test_images, self.test_labels) if test else (self.images, self.labels)
        )
        chosen = torch.randint(len(labels), (size, COUNT), generator=random)  # [b, COUNT]
        (h, w), (rows, columns) = images.shape[2:], self.shape
        tops = torch.randint(rows - h + 1, (size, COUNT), generator=random).tolist()
        pictures = images.new_full((size, 1, rows, columns), float(images.min()))
        for picture, of_it, top in zip(pictures, chosen, tops):
            for i, (image, y) in enumerate(zip(images[of_it], top)):
                picture[:, y : y + h, i * w : (i + 1) * w] = image
        letters = torch.stack([encode(of_it) for of_it in labels[chosen].tolist()])  # [b, u + 1]
        return pictures, letters[:, :-1].contiguous(), letters[:, 1:].contiguous()


def encode(digits: list[int]) -> Tensor:
    """Letters of the digits' names between two ends, filled with ends, [LENGTH + 1]."""
    text = "\n" + " ".join(NAMES[d] for d in digits)
    return torch.tensor([ALPHABET.index(c) for c in text.ljust(LENGTH + 1, "\n")])


def decode(letters: Tensor) -> str:
    """The text before the end."""
    return "".join(ALPHABET[i] for i in letters.tolist()).split("\n")[0]
