"""Models of transformers, whose source is not ours, sharded by `annotate` alone: tiny random configurations, every parameter marked on
both axes of a 2x2 mesh, forward and gradients compared with one device. `make test-transformers` installs what they need."""
from __future__ import annotations

import random

import pytest
import torch
from helpers import assert_same, eager

import torchgspmd as gspmd
from torchgspmd.objects import opened

transformers = pytest.importorskip("transformers", reason="transformers is not installed; make test-transformers does that")
MESH = gspmd.Mesh(data=2, model=2)
TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "max_position_embeddings": 32, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_SIDED = {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2, "decoder_start_token_id": 1}
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 32, "patch_size": 8,
          "num_labels": 6}
STAGES = {"depths": [2, 2], "num_labels": 6}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape)


def text() -> dict:
    x = tokens(4, 8)
    mask = torch.ones_like(x)
    mask[1, 5:] = 0
    return {"input_ids": x, "attention_mask": mask, "labels": x}


def plain_text() -> dict:
    return {"input_ids": (x := tokens(4, 8)), "labels": x}


def pairs() -> dict:
    return {"input_ids": tokens(4, 8), "labels": tokens(4, 6)}


def images() -> dict:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 3])}


MODELS = {                              # model class, its configuration, its inputs
    "Albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 8}, text),
    "Bart": ("BartForConditionalGeneration", {**TWO_SIDED, "max_position_embeddings": 32}, pairs),
    "Bert": ("BertForMaskedLM", TEXT, text),
    "Bloom": ("BloomForCausalLM", {**TEXT, "n_layer": 2, "n_head": 4}, text),
    "ConvNext": ("ConvNextForImageClassification", {**STAGES, "hidden_sizes": [8, 16], "num_stages": 2}, images),
    "DebertaV2": ("DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"],
                                           "type_vocab_size": 0}, text),
    "Falcon": ("FalconForCausalLM", {**TEXT, "alibi": True}, text),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}, text),
    "GPTNeoX": ("GPTNeoXForCausalLM", TEXT, text),
    "Gemma2": ("Gemma2ForCausalLM", {**TEXT, "head_dim": 4, "sliding_window": 4}, text),
    "Llama": ("LlamaForCausalLM", TEXT, text),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
              plain_text),
    "Mixtral": ("MixtralForCausalLM", {**TEXT, **MOE}, text),
    "OPT": ("OPTForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, text),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", {**TEXT, **MOE, "shared_expert_intermediate_size": 12}, text),
    "ResNet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic"}, images),
    "Swin": ("SwinForImageClassification", {**STAGES, "image_size": 32, "patch_size": 2, "embed_dim": 8, "num_heads": [2, 4],
                                            "window_size": 4}, images),
    "T5": ("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
                                          "decoder_start_token_id": 0, "pad_token_id": 0}, pairs),
    "ViT": ("ViTForImageClassification", VISION, images),
    "Wav2Vec2": ("Wav2Vec2ForCTC", {**TEXT, "vocab_size": 32, "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3],
                                    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
                                    "mask_time_prob": 0.0, "feat_extract_norm": "layer"},
                 lambda: {"input_values": torch.randn(4, 64)}),
    "Whisper": ("WhisperForConditionalGeneration", {**TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
                lambda: {"input_features": torch.randn(4, 8, 32), "labels": tokens(4, 6)}),
}


def make(name: str) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    family, options, inputs = MODELS[name]
    cls = getattr(transformers, family)
    return cls(cls.config_class(**options)).eval(), inputs()


def both_axes(model: torch.nn.Module) -> dict[str, str]:
    """The first dimension of every parameter over model, the second over data."""
    return {name: " ".join((["model", "data"] + ["_"] * p.dim())[:p.dim()]) for name, p in model.named_parameters()}


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
    return [t for t in torch.utils._pytree.tree_leaves(opened(outputs)) if isinstance(t, torch.Tensor)]


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
