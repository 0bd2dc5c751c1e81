"""The public configurations of decoders, by name: `config("llama3-70b")`.

A configuration is a file of models/; its source stands in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import ShardingError

MODELS = Path(__file__).resolve().parent / "models"


@dataclass(frozen=True)
class Latent:
    """DeepSeek's attention (MLA). queries, keys: widths of the short vectors. places: channels of
    a head that carry positions; head: those that do not. value: those of a value.
    """

    queries: int
    keys: int
    places: int
    head: int
    value: int


@dataclass(frozen=True)
class Config:
    """A decoder. hidden: the width of a dense feed-forward. chosen: experts of a token.

    shared_hidden: the width of the expert that all tokens have. first_dense: layers without
    experts. window: keys that a query sees in every other layer; 0 for all. norms: of queries and
    keys. biases: of the experts' products. predictions: layers for tokens behind the next one
    (MTP). repeats: a token is sent once for each of its experts (Megatron-Bridge v0.2.0 and v0.3.0,
    moe_token_dispatcher_type "alltoall" without a flex backend). graphs: globs of a layer's modules
    that CUDA graphs start in its recipe for Blackwell, but for experts' products (Megatron-Bridge,
    scripts/performance/configs). aliases: other names.
    """

    source: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    hidden: int
    words: int
    latent: Latent | None = None
    experts: int = 0
    chosen: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    first_dense: int = 0
    window: int = 0
    norms: bool = False
    biases: bool = False
    predictions: int = 0
    repeats: bool = False
    graphs: tuple[str, ...] = ("*first", "*second", "*attention*", "*feed*")
    aliases: tuple[str, ...] = ()

    @property
    def turned(self) -> int:
        """Return the channels of a head that carry positions."""
        return self.latent.places if self.latent else self.head

    def kinds(self) -> dict[str, int]:
        """Return the kinds of layers, with their counts, those of predictions included."""
        kind = "experts" if self.experts else "dense"
        rest = self.layers - self.first_dense
        narrow = rest // 2 if self.window else 0
        counts = {kind: rest - narrow + self.predictions, f"{kind}, window": narrow}
        counts["dense"] = counts.get("dense", 0) + self.first_dense
        return {name: count for name, count in counts.items() if count}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def configs() -> dict[str, Config]:
    """Return the models, by plain name: small letters and digits."""
    found = {}
    for path in sorted(MODELS.glob("*.json")):
        values = json.loads(path.read_text())
        latent = values.pop("latent", None)
        lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
        one = Config(**{**values, **lists}, latent=latent and Latent(**latent))
        names = (path.name.removesuffix(".json"), *one.aliases)
        found |= dict.fromkeys(map(_plain, names), one)
    return found


def config(model: str) -> Config:
    """Return the model with this name; case and punctuation do not matter."""
    if _plain(model) not in configs():
        names = sorted(path.stem for path in MODELS.glob("*.json"))
        raise ShardingError.here(
            f"there is no model {model!r}", fix=f"take one of {', '.join(names)}"
        )
    return configs()[_plain(model)]
