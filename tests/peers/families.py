"""Small models of ten families of transformers: inputs, and the behaviors that each lacks."""

from __future__ import annotations

import copy
import random
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import GPT, MOE, TEXT, TWO_SIDED, TWO_TOWERS, VISION, tokens
from coverage import random_spec
from small_models import without_broken_packages
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import torchgspmd as gspmd

transformers = pytest.importorskip("transformers", reason="make test-peers installs transformers")
without_broken_packages()
transformers.logging.set_verbosity_error()

Inputs = dict[str, Any]
ENCODER = {"generation": "encodes only", "padding on the left": "is not causal"}
IMAGES = {
    "embeddings": "has no table of tokens",
    "tied weights": "has no table of tokens",
    "generation": "generates no text",
    "padding on the left": "has no padding",
    "inputs_embeds": "takes pixels",
}
# What a family that takes minutes to plan leaves to the others.
LONG = (
    "checkpointing",
    "embeddings",
    "tied weights",
    "generation",
    "hidden states",
    "freezing",
    "inputs that require gradients",
    "inputs_embeds",
    "attention",
    "dtypes",
    "heads",
)
NO_DROPOUT = (
    "dropout attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout_prob "
    "attention_probs_dropout_prob dropout_rate activation_dropout classifier_dropout"
).split()


@dataclass(frozen=True)
class Family:
    """A model class, its configuration, its inputs and the behaviors that do not apply."""

    kind: str
    options: Mapping[str, Any]
    inputs: Callable[[], Inputs]
    lacks: Mapping[str, str] = field(default_factory=dict)
    # Attention weights come out of eager attention alone.
    attention: str = "eager"

    def config(self, **more: Any) -> Any:
        cls = getattr(transformers, self.kind).config_class
        config = cls(**{**self.options, **more})
        for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
            for name in NO_DROPOUT:
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        return config

    def make(self, **more: Any) -> Any:
        torch.manual_seed(0)
        cls = getattr(transformers, self.kind)
        return cls._from_config(self.config(**more), attn_implementation=self.attention).eval()

    def batch(self, seed: int = 0) -> Inputs:
        torch.manual_seed(seed)
        return self.inputs()


def text() -> Inputs:
    ids = tokens(2, 7)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def images() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}


FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM", TEXT, text),
    "GPT-2": Family("GPT2LMHeadModel", {**GPT, "bos_token_id": 1, "eos_token_id": 2}, text),
    "BERT": Family("BertForMaskedLM", TEXT, text, ENCODER),
    "T5": Family(
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        lambda: {"input_ids": tokens(2, 7), "labels": tokens(2, 5)},
        {"padding on the left": "has relative positions: both sides are alike"},
    ),
    "ViT": Family("ViTForImageClassification", VISION, images, IMAGES),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {**TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 24},
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": tokens(2, 5)},
        {
            "inputs_embeds": "takes spectrograms",
            "padding on the left": "takes spectrograms of one length",
        },
    ),
    "Mixtral": Family("MixtralForCausalLM", {**TEXT, **MOE}, text),
    "CLIP": Family(
        "CLIPModel",
        TWO_TOWERS,
        lambda: {
            "input_ids": tokens(2, 7),
            "pixel_values": torch.randn(2, 3, 32, 32),
            "return_loss": True,
        },
        {
            **ENCODER,
            "inputs_embeds": "takes tokens: the end's place says what it reads",
            "tied weights": "has no output table",
            **dict.fromkeys(
                ("embeddings", "inputs that require gradients"),
                "transformers says of no table that it is the input's",
            ),
        },
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM",
        {
            **TEXT,
            **MOE,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "shared_expert_intermediate_size": 8,
        },
        text,
        dict.fromkeys(LONG, "takes minutes to plan: each linear layer is a loop of 63 steps"),
    ),
    "Mamba": Family(
        "MambaForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "time_step_rank": 2,
        },
        lambda: {"input_ids": (ids := tokens(2, 7)), "labels": ids},
        {"attentions": "has no attention", "attention": "has no attention"},
    ),
}


def subjects(behavior: str) -> pytest.MarkDecorator:
    """Parametrize a test of a behavior over the families; those that lack it are skipped."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(
                name, marks=[pytest.mark.skip(f.lacks[behavior])] if behavior in f.lacks else []
            )
            for name, f in FAMILIES.items()
        ],
    )


def on_mesh(model: nn.Module, mesh: gspmd.Mesh, **options: Any) -> Any:
    """Return a copy on the mesh, each axis on a random dimension of each parameter, or on none."""
    rng = random.Random(zlib.crc32(type(model).__name__.encode()))
    marks = {n: random_spec(rng, p.shape, mesh.names) for n, p in model.named_parameters()}
    return gspmd.parallelize(gspmd.annotate(copy.deepcopy(model), mesh, marks), mesh, **options)


def whole(tree: Any) -> Any:
    """Return plain tensors of a structure, caches left out, as nested tuples and dicts."""
    leaves = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        if isinstance(leaf, Tensor):
            leaves[pytree.keystr(path)] = leaf.detach()
    return leaves


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def folder() -> str:
    """Return a new folder that all ranks see."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]
