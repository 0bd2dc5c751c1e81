"""English text as words, some of which are hidden."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor

MASK, OTHER = 0, 1  # numbers of the words that stand for a hidden and for a rare one


class Words:
    """A text as numbers of its words and punctuation marks, and back."""

    def __init__(self, text: str, vocabulary: int):
        words = re.findall(r"[a-z]+(?:'[a-z]+)*|[^\sa-z]", text.lower())
        common = [word for word, _ in Counter(words).most_common(vocabulary - 2)]
        self.vocabulary = ["[mask]", "[other]", *common]
        numbers = {word: i for i, word in enumerate(self.vocabulary)}
        self.tokens = torch.tensor([numbers.get(word, OTHER) for word in words])  # [words of it]

    def decode(self, tokens: Tensor) -> list[str]:
        return [self.vocabulary[t] for t in tokens.tolist()]

    def batch(
        self, step: int, seed: int, size: int, context: int, share: float = 0.15
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [b, s] of which a share is to be told, where these are [b, p], and what [b, p].

        Of these 8 in 10 are hidden, 1 in 10 is another word, 1 in 10 stands as it was. All is a
        function of seed and step, so the same on every rank.
        """
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - context, (size,), generator=random)  # [b]
        tokens = self.tokens[starts[:, None] + torch.arange(context)]  # [b, s]
        order = torch.rand(size, context, generator=random)  # [b, s], rare words last
        order = torch.where(tokens == OTHER, 1, order).argsort(1)
        places = order[:, : max(1, round(share * context))].sort(1).values  # [b, p]
        targets = tokens.gather(1, places)  # [b, p]
        chance = torch.rand(places.shape, generator=random)  # [b, p]
        others = torch.randint(2, len(self.vocabulary), places.shape, generator=random)
        shown = torch.where(chance < 0.1, others, torch.where(chance < 0.2, targets, MASK))
        return tokens.scatter(1, places, shown), places, targets
