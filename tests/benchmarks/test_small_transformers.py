"""Small configurations keep what their sizes have to do with each other."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from small_arguments import running_arguments  # noqa: E402
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
        stage_names=["stem", *(f"stage{i}" for i in range(1, layers + 1))],
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
    assert config.vocab_size < 100
    assert config.vision_config.depth == (before.num_hidden_layers if by.whole else 2)
    assert len(config.stage_names) == config.num_hidden_layers + 1 and len(config._out_indices) == 3
    chosen = getattr(config, "_out_features", None) or [f"stage{i}" for i in before._out_indices]
    assert chosen == [config.stage_names[i] for i in config._out_indices]
    assert sum(config.rope_parameters["mrope_section"]) == config.head_dim // 2
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.sliding_window or "sliding_attention" not in config.layer_types
    assert config.hidden_size == config.num_attention_heads * config.head_dim
    assert config.hidden_size == config.vision_config.hidden_size


class Hears(nn.Module):
    """Takes sounds of a width that only its first layer knows, and a second argument."""

    main_input_name = "input_features"

    def __init__(self, first: nn.Module, second: str):
        super().__init__()
        self.first, self.second, self.config = first, second, Config(num_mel_bins=20)

    def forward(self, input_features, input_ids=None, decoder_input_ids=None):
        out = self.first(input_features)
        if locals()[self.second] is None:
            raise ValueError(f"You must specify {self.second}")
        return out


@pytest.mark.parametrize("second", ["input_ids", "decoder_input_ids"])
@pytest.mark.parametrize(
    "first", [nn.Linear(13, 3), nn.LayerNorm(37), nn.Conv1d(11, 3, 3), nn.GRU(7, 3)], ids=str
)
def test_messages_say_which_arguments_run(first, second):
    kwargs = running_arguments(Hears(first, second))
    assert {"input_features", second} <= {*kwargs}
    first(kwargs["input_features"])


class Sees(nn.Module):
    """Takes as many placeholders as a picture has features."""

    config = Config(image_token_id=7, image_size=32)

    def __init__(self, features: int):
        super().__init__()
        self.features = features

    def forward(self, input_ids, pixel_values):
        tokens, features = int((input_ids == 7).sum()), self.features * len(input_ids)
        if tokens != features:
            raise ValueError(
                f"features and tokens do not match, tokens: {tokens}, features: {features}"
            )
        return pixel_values


@pytest.mark.parametrize("features", [1, 9, 40])
def test_placeholders_are_as_many_as_features(features):
    assert (running_arguments(Sees(features))["input_ids"] == 7).sum() == 4 * features
