"""English text as characters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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

    def last(self, count: int, context: int) -> tuple[Tensor, Tensor]:
        """The last windows of the text: tokens [b, s] and the ones that follow them [b, s]."""
        count = min(count, (len(self.tokens) - 1) // context)
        tail = self.tokens[-count * context - 1 :]
        return tail[:-1].view(count, context), tail[1:].view(count, context)
