"""marks: small models of transformers with a family's marks compute what one device computes."""

import pytest
import torch
import transformers

import torchgspmd as gspmd
from torchgspmd.layout.annotate import glob_pattern
from torchgspmd.runtime.module_proxy import mark_on

MESH = gspmd.Mesh(model=2)
STYLES = {"colwise": "model _", "rowwise": "_ model", "colwise_gather_output": "model _"}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, **LAYERS}
HEADS = {**WIDTHS, "vocab_size": 64, "num_key_value_heads": 2}
EXPERTS = {**HEADS, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2},
    **{"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
SPEECH = {
    f"{part}_{name}": n
    for part in ("encoder", "decoder")
    for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
SPEECH |= {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 8}
SPEECH |= {"pad_token_id": 0, "decoder_start_token_id": 1}
TOKENS = torch.arange(16).view(2, 8)
WORDS = {"input_ids": TOKENS, "labels": TOKENS}
IMAGES = {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.arange(2)}
SOUNDS = {"input_features": torch.ones(2, 8, 16), "labels": TOKENS}
PICTURES = {"image_size": 16, "patch_size": 8, "problem_type": "single_label_classification"}
MODELS = [  # family, class, configuration, a batch, and what stays whole
    (
        "gpt2",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
        WORDS,
        "wpe",
    ),
    ("llama", "LlamaForCausalLM", HEADS, WORDS, ""),
    ("qwen3", "Qwen3ForCausalLM", {**HEADS, "head_dim": 8}, WORDS, ""),
    ("qwen3", "Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8, "num_experts": 4}, WORDS, "gate"),
    ("mixtral", "MixtralForCausalLM", {**HEADS, "num_local_experts": 4}, WORDS, "gate"),
    ("deepseek-v3", "DeepseekV3ForCausalLM", {**EXPERTS, **LATENT}, WORDS, "gate _mqa q_a_proj"),
    (
        "gpt-oss",
        "GptOssForCausalLM",
        {**HEADS, "head_dim": 8, "num_local_experts": 4},
        WORDS,
        "router",
    ),
    (
        "vit",
        "ViTForImageClassification",
        {**WIDTHS, **PICTURES},
        IMAGES,
        "classifier cls_token projection position_embeddings",
    ),
    (
        "whisper",
        "WhisperForConditionalGeneration",
        {**SPEECH, "d_model": 32, "vocab_size": 64},
        SOUNDS,
        "embed_positions conv1 conv2",
    ),
    (
        "t5",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
        WORDS,
        "",
    ),
]


def tiny(name: str, options: dict) -> transformers.PreTrainedModel:
    kind = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return kind(kind.config_class(**options)).eval()


@pytest.mark.parametrize("family, name, options, batch, whole", MODELS, ids=[m[1] for m in MODELS])
def test_a_family_is_divided_and_computes_the_same(family, name, options, batch, whole):
    model = tiny(name, options)
    gspmd.annotate(model, MESH, gspmd.marks(family))
    matrices = {n: mark_on(p, MESH) for n, p in model.named_parameters() if p.dim() > 1}
    unmarked = {n for n, mark in matrices.items() if mark is None}
    assert unmarked == {n for n in matrices if any(f"{w}." in f"{n}." for w in whole.split())}
    # transformers' own plan for tensor parallelism, where it has one, says the same.
    styles = {n: s for n, s in (getattr(model, "tp_plan", None) or {}).items() if s in STYLES}
    for n, mark in matrices.items():
        own = {s for glob, s in styles.items() if glob_pattern(f"{glob}.weight").fullmatch(n)}
        assert not own or str(mark) in {STYLES[s] for s in own}, (n, own)
    plan = gspmd.plan(model, mesh=MESH, grad=True, advanced={"unmarked": "replicated"}, **batch)
    loss = model(**batch).loss
    # Sums of float32 terms in another order.
    torch.testing.assert_close(plan.simulate(**batch)[0].loss, loss)
