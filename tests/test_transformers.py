"""Models of transformers, whose source is not ours, sharded by `annotate` alone: tiny random
configurations, every parameter marked on both axes of a 2x2 mesh, forward and gradients compared
with one device. `make test-transformers` installs what they need.
"""

from __future__ import annotations

import random

import pytest
import torch
from architectures import MODELS, RECURRENCES
from helpers import assert_same, eager

import torchgspmd as gspmd
from torchgspmd.capture.state.object_trees import opened

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers does that"
)
MESH = gspmd.Mesh(data=2, model=2)


def make(name: str, **other) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    family, options, inputs = {**MODELS, **RECURRENCES}[name]
    cls = getattr(transformers, family)
    return cls(cls.config_class(**{**options, **other})).eval(), inputs()


def both_axes(model: torch.nn.Module) -> dict[str, str]:
    """The first dimension of every parameter over model, the second over data."""
    return {
        name: " ".join((["model", "data"] + ["_"] * p.dim())[: p.dim()])
        for name, p in model.named_parameters()
    }


def anywhere(model: torch.nn.Module) -> dict[str, str]:
    """Each axis on a random dimension of every parameter, or on none."""
    rng, marks = random.Random(0), {}
    for name, p in model.named_parameters():
        words: list[list[str]] = [[] for _ in p.shape]
        for axis in ("data", "model"):
            if p.dim() and rng.random() < 0.6:
                words[rng.randrange(p.dim())].append(axis)
        marks[name] = " ".join("+".join(w) or "_" for w in words)
    return marks


def tensors(outputs) -> list[torch.Tensor]:
    """All tensors of a model's outputs, those in caches too."""
    return [
        t for t in torch.utils._pytree.tree_leaves(opened(outputs)) if isinstance(t, torch.Tensor)
    ]


@pytest.mark.parametrize("marks", [both_axes, anywhere])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_one_device(name, marks):
    model, inputs = make(name)
    want, gradients = eager(model, **inputs)
    gspmd.annotate(model, MESH, marks(model))
    plan = gspmd.plan(model, mesh=MESH, grad=True, **inputs)
    got, found = plan.simulate(**inputs, _poison=True)
    assert_same(tensors(got), tensors(want), name, terms=1024)
    assert_same(found, gradients, name, terms=4096)
    assert [r.op for r in plan.replicated_ops if r.why.startswith("no rule")] == []


# ----------------------------------------------------------------------------------------- experts

EXPERT_SIZES = "moe_intermediate_size", "intermediate_size"
EXPERTS = ("Mixtral", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")


def sharded_experts(name: str, how: str, dtype: torch.dtype = torch.float32):
    """A model whose experts compute in a way of transformers, marked along `expert` alone.

    Its matrices are larger than the tokens: those of smaller ones may be gathered.
    """
    options = MODELS[name][1]
    model, inputs = make(name, **{size: 64 for size in EXPERT_SIZES if size in options})
    model = model.to(dtype)
    model.set_experts_implementation(how)
    gradients = eager(model, **inputs) if how != "eager" else None
    mesh = gspmd.Mesh(expert=2)
    marks = {"**.experts.*_proj": "expert _ _"}
    if name == "GptOssForCausalLM":
        marks["**.experts.*_proj_bias"] = "expert _"
    return gspmd.annotate(model, mesh, marks), mesh, inputs, gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_multiply_their_own_rows(name, how, dtype):
    model, mesh, inputs, (want, gradients) = sharded_experts(name, how, dtype)
    plan = gspmd.plan(model, mesh=mesh, grad=True, **inputs)
    got, found = plan.simulate(**inputs, _poison=True)
    assert_same(tensors(got), tensors(want), name, terms=1024)
    assert_same(found, gradients, name, terms=4096)
    assert not [r for r in plan.replicated_ops if "experts" in r.why]  # no weight is gathered
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    choices = inputs["input_ids"].numel() * model.config.num_experts_per_tok
    assert max(c.payload_bytes for c in plan.collectives) < choices * 64 * dtype.itemsize


def test_a_loop_over_chosen_experts_is_an_error_with_a_way_out():
    model, mesh, inputs, _ = sharded_experts("Mixtral", "eager")
    with pytest.raises(gspmd.ShardingError, match="in 'model.layers.0.mlp.experts'") as error:
        gspmd.plan(model, mesh=mesh, grad=True, **inputs)
    assert 'set_experts_implementation("grouped_mm")' in str(error.value)


# ------------------------------------------------------------------ recurrences along the sequence

RECURRENT: dict[str, tuple[str, tuple[int, ...]]] = {  # how each calls its embedding; lengths
    "Mamba2": ("backbone.embeddings", (32, 64)),
    "BambaForCausalLM": ("model.embed_tokens", (32, 64)),
    "Rwkv": ("rwkv.embeddings", (16, 32)),
    "Qwen3Next": ("model.embed_tokens", (256,)),  # its loop is over parts of 64 tokens
}


class Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("name", RECURRENT)
def test_devices_have_parts_of_a_recurrent_models_sequence(name):
    embedding, lengths = RECURRENT[name]
    mesh, sent = gspmd.Mesh(seq=4), []
    for tokens in lengths:
        inner, _ = make(name)
        loss, ids = Loss(inner), torch.randint(3, 64, (2, tokens))
        want, gradients = eager(loss, ids)
        gspmd.annotate(loss, mesh, {f"model.{embedding}": "_ seq _"})
        plan = gspmd.plan(loss, ids, mesh=mesh, in_specs="_ seq", grad=True)
        got, found = plan.simulate(ids, _poison=True)
        assert_same(got, want, name, terms=1024)
        assert_same(found, gradients, name, terms=4096)
        sent.append(plan.sent_bytes)
    # Two rows of a layer for each token that is added, twice as wide inside: there and back.
    config = inner.config
    row = 2 * config.hidden_size * 4
    added = 2 * (lengths[-1] - lengths[0])
    assert sent[-1] - sent[0] <= added * config.num_hidden_layers * 2 * row
