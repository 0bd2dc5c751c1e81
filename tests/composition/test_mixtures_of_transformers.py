"""Models of transformers train on processes as on one, in mixtures, by `annotate` alone.

`make test-mixtures` runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import distributed
from torch import Tensor, nn

import torchgspmd as gspmd
from composition.mixtures import EXACT, Training, compare, words

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

WORDS = 32
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
HEADS = {
    "**.[qkv]_proj.weight": "model _",
    "**.o_proj.weight": "_ model",
}
DENSE = {
    "**.mlp.gate_proj.weight": "model _",
    "**.mlp.up_proj.weight": "model _",
    "**.mlp.down_proj.weight": "_ model",
}
OF_EXPERTS = {"**.experts.*_proj": "expert _ _"}


def of_transformers(name: str, **options: Any) -> nn.Module:
    """Return a model with random weights in float64."""
    torch.manual_seed(0)
    family = getattr(transformers, name)
    return family(family.config_class(**{**SIZES, **options})).double()


def loop(model: nn.Module, parts: int = 1) -> Training:
    """Return a loop with clipping that accumulates gradients of parts of the batch.

    The loss of transformers is one of float32.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def run(tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        for some, next_ones in zip(tokens.chunk(parts), targets.chunk(parts)):
            logits = model(input_ids=some, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), next_ones.flatten()) / parts
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, words(WORDS, rows=8, length=8), run, optimizer)


def llama(mesh: gspmd.Mesh | None) -> Training:
    """Megatron, ZeRO, accumulation in the loop, recomputation, clipping."""
    model = of_transformers("LlamaForCausalLM")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is not None:
        gspmd.annotate(model, mesh, HEADS | DENSE)
        specs = {"input_ids": "data _"}
        model = gspmd.parallelize(model, mesh, in_specs=specs, shard_updates="data")
    return loop(model.train(), parts=2)


def qwen(mesh: gspmd.Mesh | None) -> Training:
    """Experts, heads and batch, each along an axis of its own."""
    model = of_transformers("Qwen3MoeForCausalLM", moe_intermediate_size=16, head_dim=4, **EXPERTS)
    model.set_experts_implementation("batched_mm")  # the other one has no float64
    if mesh is not None:
        gspmd.annotate(model, mesh, HEADS | OF_EXPERTS)
        model = gspmd.parallelize(model, mesh, in_specs={"input_ids": "data _"})
    return loop(model.train())


def mixtral(mesh: gspmd.Mesh | None) -> Training:
    """Experts and ZeRO-3, with recomputation."""
    model = of_transformers("MixtralForCausalLM", **EXPERTS)
    model.set_experts_implementation("batched_mm")  # the other one has no float64
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is not None:
        whole = {"**.[qkvo]_proj.weight": "data _", "**.embed_tokens.weight": "data _"}
        gspmd.annotate(model, mesh, whole | OF_EXPERTS)
        specs = {"input_ids": "data+expert _"}
        model = gspmd.parallelize(model, mesh, in_specs=specs, advanced={"regather": "always"})
    return loop(model.train())


class Adapter(nn.Module):
    """A linear layer whose weight is frozen, and a small product beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 2):
        super().__init__()
        self.linear = linear
        inputs, outputs = linear.in_features, linear.out_features
        self.a = nn.Parameter(torch.randn(rank, inputs, dtype=torch.float64) / 4)
        self.b = nn.Parameter(torch.randn(outputs, rank, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.a.T) @ self.b.T


class Written:
    """A Training that writes a text after every fifth step, whose words are added to the loss."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def step(self, number: int) -> float:
        loss, model = self.training.step(number), self.training.model
        if number % 5 == 4:
            prompt = torch.tensor([[3, 5, 7], [4, 6, 8]])
            model.eval()
            text = model.generate(prompt, do_sample=False, max_new_tokens=5, use_cache=True)
            model.train()
            loss += float((text * torch.arange(text.shape[1])).sum()) / 1e6
        return loss

    def weights(self) -> dict[str, Tensor]:
        return self.training.weights()


def lora(mesh: gspmd.Mesh | None) -> Written:
    """Adapters of a frozen SmolLM2, tied and sharded, and texts with a cache in between."""
    model = of_transformers("LlamaForCausalLM", tie_word_embeddings=True).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    if mesh is not None:
        adapters = {
            "**.[qv]_proj.linear.weight": "model _",
            "**.[qv]_proj.b": "model _",
        }
        gspmd.annotate(model, mesh, HEADS | DENSE | adapters)
        model = gspmd.parallelize(model, mesh)
    return Written(loop(model.train()))


MIXTURES = {
    "llama": ("data=2,model=2", llama),
    "qwen": ("data=2,expert=2,model=2", qwen),
    "mixtral": ("data=2,expert=2", mixtral),
    "lora": ("data=2,model=2", lora),
}


@distributed(timeout=600)
def train(mesh, name):
    compare(mesh, MIXTURES[name][1], EXACT)


@pytest.mark.xdist_group("ranks")
@pytest.mark.distributed
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture(name):
    train(MIXTURES[name][0], name=name)
