"""Small configurations keep what their sizes have to do with each other."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from small_transformers import TRIED, shrink  # noqa: E402


class Config(SimpleNamespace):
    """As transformers' configurations: attributes, and this method."""

    def to_diff_dict(self) -> dict:
        return vars(self)


def drawn(seed: int) -> Config:
    rng = random.Random(seed)
    heads, head, layers = rng.choice([8, 16, 32]), rng.choice([64, 128]), rng.choice([6, 12, 31])
    kinds = [rng.choice(["full_attention", "sliding_attention", "linear"]) for _ in range(layers)]
    return Config(
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([heads, heads // 4]),
        head_dim=head,
        hidden_size=heads * head,
        intermediate_size=4 * heads * head,
        num_hidden_layers=layers,
        layer_types=kinds,
        windows=[float(i) for i in range(layers)],
        _out_indices=sorted(rng.sample(range(1, layers + 1), 3)),
        sliding_window=None,
        vocab_size=50_000,
        rope_parameters={"mrope_section": [head // 4, head // 8, head // 8]},
        ignore_keys_at_rope_validation={"mrope_section"},
        vision_config=Config(hidden_size=heads * head, num_heads=heads, depth=layers),
    )


@pytest.mark.parametrize("by", TRIED)
@pytest.mark.parametrize("seed", range(4))
def test_sizes_fit_each_other(by, seed):
    before, config = drawn(seed), drawn(seed)
    shrink(config, by)
    assert config.num_hidden_layers == len(config.layer_types) == len(config.windows)
    assert {*config.layer_types} == {*before.layer_types}
    assert config.vocab_size < 100 and config.vision_config.depth == 2
    assert max(config._out_indices) <= config.num_hidden_layers and len(config._out_indices) == 3
    assert sum(config.rope_parameters["mrope_section"]) == config.head_dim // 2
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.sliding_window or "sliding_attention" not in config.layer_types
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert config.hidden_size == config.vision_config.hidden_size
