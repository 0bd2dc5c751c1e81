"""transformers' models in stages by `pipeline_model`: which give one device's numbers.

    python benchmarks/staged_models.py                  the table of docs/pipelines.md
    python benchmarks/staged_models.py --only gemma2    one model, with its error
    python benchmarks/staged_models.py --schedule zero_bubble
    python benchmarks/staged_models.py --json rows.json --count 4     the next four models

With --json the rows are in a file, and models that have a row there are left out: the whole table
can be measured in parts.

Each model is small, in float64, with the layers of every kind that its configuration has. One
training step (loss and the gradients of all parameters) on Mesh(data=2, stage=2) is simulated and
compared with eager PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import without_broken_packages
from torch import Tensor, nn

import torchgspmd as gspmd

WORDS, WIDTH, BATCH, LENGTH = 48, 16, 8, 12
SMALL = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
    "max_position_embeddings": 32, "use_cache": False, "attention_dropout": 0.0,
}  # fmt: skip
ALIKE = {name: value for name, value in SMALL.items() if name != "head_dim"}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": False}
BOTH = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
CROSS = "attention_mask", "encoder_hidden_states", "encoder_attention_mask"
LISTS = ("model.encoder.layers", "model.decoder.layers")
T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2,
    "dropout_rate": 0.0, "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
BLOCKS = ("encoder.block", "decoder.block")
SPEECH = {
    "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "hidden_dropout": 0.0,
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0,
    "apply_spec_augment": False, "ctc_loss_reduction": "mean", "feat_extract_norm": "layer",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A class, its configuration, and its lists of layers."""

    kind: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ("model.layers",)
    inputs: str = "tokens"
    rows: tuple[str, ...] = ("attention_mask",)

    def make(self) -> nn.Module:
        options = dict(self.options)
        small, checkpoint = options.pop("instead", SMALL), options.pop("checkpoint", False)
        attention = options.pop("attn", "sdpa")
        config = getattr(transformers, self.config)(**{**small, **options})
        config._attn_implementation = attention
        # grouped_mm computes in no float64
        config._experts_implementation = "batched_mm"
        torch.manual_seed(0)
        model = getattr(transformers, self.kind)(config).double().train()
        if checkpoint:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, -3:] = mask[6, -1:] = 0
        if self.inputs == "pixels":
            pixels = torch.randn(BATCH, 3, 16, 16, generator=generator).double()
            return {"pixel_values": pixels, "labels": labels[:, 0] % 2}
        if self.inputs == "sound":
            sound = torch.randn(BATCH, 8, 24, generator=generator).double()
            return {"input_features": sound, "labels": labels}
        if self.inputs in ("wave", "speech"):
            wave = torch.randn(BATCH, 64, generator=generator).double()
            words = labels[:, :4] if self.inputs == "speech" else labels[:, 0] % 2
            return {"input_values": wave, "labels": words}
        if self.inputs == "features":
            sound = torch.randn(BATCH, 24, 8, generator=generator).double()
            return {"input_features": sound, "labels": labels}
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


GEMMA = {
    "attn": "eager",
    "sliding_window": 4,
    "query_pre_attn_scalar": 4,
    "hidden_activation": "gelu_pytorch_tanh",
}
MODELS = {
    "llama": Model("LlamaForCausalLM", "LlamaConfig"),
    "mistral": Model("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "qwen2": Model("Qwen2ForCausalLM", "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": Model("Qwen3ForCausalLM", "Qwen3Config"),
    "gemma": Model("GemmaForCausalLM", "GemmaConfig"),
    "gemma2": Model("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": Model("Gemma3ForCausalLM", "Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 8}),
    "cohere2": Model("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": 4}),
    "gpt_oss": Model("GptOssForCausalLM", "GptOssConfig",
        {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "attn": "eager"}),
    "smollm3": Model("SmolLM3ForCausalLM", "SmolLM3Config"),
    "olmo2": Model("Olmo2ForCausalLM", "Olmo2Config"),
    "phi3": Model("Phi3ForCausalLM", "Phi3Config"),
    "granite": Model("GraniteForCausalLM", "GraniteConfig"),
    "gpt_neox": Model("GPTNeoXForCausalLM", "GPTNeoXConfig", layers=("gpt_neox.layers",)),
    "gpt2": Model("GPT2LMHeadModel", "GPT2Config",
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, ("transformer.h",)),
    "opt": Model("OPTForCausalLM", "OPTConfig",
        {"dropout": 0.0, "ffn_dim": 24, "word_embed_proj_dim": WIDTH}, ("model.decoder.layers",)),
    "mixtral": Model("MixtralForCausalLM", "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**MIXTURE, "num_experts": 4, "decoder_sparse_step": 2}),
    "deepseek_v3": Model("DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**MIXTURE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
         "qk_rope_head_dim": 4, "v_head_dim": 4, "head_dim": 4, "num_key_value_heads": 4,
         "num_hidden_layers": 5}),
    "mixtral_router_loss": Model("MixtralForCausalLM", "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
         "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "qwen3_moe_router_loss": Model("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**MIXTURE, "num_experts": 4, "decoder_sparse_step": 2, "output_router_logits": True,
         "router_aux_loss_coef": 0.1}),
    "llama_all_states": Model("LlamaForCausalLM", "LlamaConfig",
        {"attn": "eager", "output_hidden_states": True, "output_attentions": True}),
    "bert_all_states": Model("BertForMaskedLM", "BertConfig",
        {"attn": "eager", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
         "output_hidden_states": True, "output_attentions": True}, ("bert.encoder.layer",)),
    "bert": Model("BertForMaskedLM", "BertConfig",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ("bert.encoder.layer",)),
    "vit": Model("ViTForImageClassification", "ViTConfig",
        {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}, ("vit.layers",), "pixels"),
    "bart": Model("BartForConditionalGeneration", "BartConfig", {"instead": BOTH}, LISTS,
        rows=CROSS),
    "whisper": Model("WhisperForConditionalGeneration", "WhisperConfig",
        {"instead": BOTH, "num_mel_bins": 8, "max_source_positions": 12,
         "max_target_positions": 16}, LISTS, "sound", CROSS),
    "phi": Model("PhiForCausalLM", "PhiConfig",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "num_key_value_heads": 4}),
    "bloom": Model("BloomForCausalLM", "BloomConfig",
        {"hidden_dropout": 0.0, "n_head": 4, "n_layer": 4, "attn": "eager"}, ("transformer.h",),
        rows=("attention_mask", "alibi")),
    "falcon": Model("FalconForCausalLM", "FalconConfig",
        {"instead": ALIKE, "hidden_dropout": 0.0}, ("transformer.h",)),
    "falcon_alibi": Model("FalconForCausalLM", "FalconConfig",
        {"instead": ALIKE, "hidden_dropout": 0.0, "alibi": True}, ("transformer.h",),
        rows=("attention_mask", "alibi")),
    "mpt": Model("MptForCausalLM", "MptConfig",
        {"d_model": WIDTH, "n_heads": 4, "n_layers": 4, "expansion_ratio": 2, "max_seq_len": 32,
         "attn": "eager"},
        ("transformer.blocks",)),
    "gptj": Model("GPTJForCausalLM", "GPTJConfig",
        {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 32,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, ("transformer.h",)),
    "gpt_neo": Model("GPTNeoForCausalLM", "GPTNeoConfig",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]],
         "window_size": 4, "embed_dropout": 0.0, "resid_dropout": 0.0, "attn": "eager"},
        ("transformer.h",)),
    "xlnet": Model("XLNetLMHeadModel", "XLNetConfig",
        {"d_model": WIDTH, "n_layer": 4, "n_head": 2, "d_inner": 24, "dropout": 0.0,
         "instead": {"vocab_size": WORDS, "pad_token_id": 0}, "attn": "eager"},
        ("transformer.layer",), rows=("attn_mask_h", "r")),
    "modernbert": Model("ModernBertForMaskedLM", "ModernBertConfig",
        {"local_attention": 4, "global_attn_every_n_layers": 3, "num_hidden_layers": 6}),
    "deberta_v2": Model("DebertaV2ForMaskedLM", "DebertaV2Config",
        {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
         "share_att_key": True, "norm_rel_ebd": "layer_norm", "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, "attn": "eager"}, ("deberta.encoder.layer",)),
    "deberta_v2_conv": Model("DebertaV2ForMaskedLM", "DebertaV2Config",
        {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
         "share_att_key": True, "norm_rel_ebd": "layer_norm", "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, "conv_kernel_size": 3, "attn": "eager"},
        ("deberta.encoder.layer",)),
    "electra": Model("ElectraForMaskedLM", "ElectraConfig",
        {"embedding_size": WIDTH, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}, ("electra.encoder.layer",)),
    "distilbert": Model("DistilBertForMaskedLM", "DistilBertConfig",
        {"dim": WIDTH, "n_layers": 4, "n_heads": 4, "hidden_dim": 24, "dropout": 0.0},
        ("distilbert.transformer.layer",)),
    "mpnet": Model("MPNetForMaskedLM", "MPNetConfig",
        {"attn": "eager", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ("mpnet.encoder.layer",), rows=("attention_mask", "position_bias")),
    "albert": Model("AlbertForMaskedLM", "AlbertConfig",
        {"embedding_size": WIDTH, "hidden_dropout_prob": 0.0, "inner_group_num": 1,
         "attention_probs_dropout_prob": 0.0}, ("albert.encoder.albert_layer_groups",)),
    "clip_vision": Model("CLIPForImageClassification", "CLIPConfig",
        {"instead": {"text_config": {}, "vision_config": {
            "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 8}}},
        ("vision_model.encoder.layers",), "pixels"),
    "siglip": Model("SiglipForImageClassification", "SiglipConfig",
        {"instead": {"text_config": {}, "vision_config": {
            "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 8}}},
        ("vision_model.encoder.layers",), "pixels"),
    "dinov2": Model("Dinov2ForImageClassification", "Dinov2Config",
        {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0, "mlp_ratio": 2,
         "attention_probs_dropout_prob": 0.0}, ("dinov2.encoder.layer",), "pixels"),
    "wav2vec2": Model("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        {**SPEECH, "do_stable_layer_norm": False}, ("wav2vec2.encoder.layers",), "wave"),
    "hubert": Model("HubertForSequenceClassification", "HubertConfig",
        {**SPEECH, "do_stable_layer_norm": True}, ("hubert.encoder.layers",), "wave"),
    "wav2vec2_ctc": Model("Wav2Vec2ForCTC", "Wav2Vec2Config",
        {**SPEECH, "do_stable_layer_norm": False}, ("wav2vec2.encoder.layers",), "speech"),
    "mamba": Model("MambaForCausalLM", "MambaConfig", {"state_size": 4, "attn": "eager"},
        ("backbone.layers",)),
    "mamba2": Model("Mamba2ForCausalLM", "Mamba2Config",
        {"num_heads": 4, "head_dim": 8, "expand": 2, "state_size": 4, "n_groups": 1,
         "chunk_size": 4, "attn": "eager"}, ("backbone.layers",)),
    "bamba": Model("BambaForCausalLM", "BambaConfig",
        {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4,
         "attn_layer_indices": [1, 3]}),
    "jamba": Model("JambaForCausalLM", "JambaConfig",
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
         "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "qwen3_next": Model("Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**MIXTURE, "num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_hidden_layers": 8,
         "shared_expert_intermediate_size": 8}),
    "rwkv": Model("RwkvForCausalLM", "RwkvConfig",
        {"attention_hidden_size": WIDTH, "context_length": 32, "attn": "eager"},
        ("rwkv.blocks",), rows=()),
    "mbart": Model("MBartForConditionalGeneration", "MBartConfig", {"instead": BOTH}, LISTS,
        rows=CROSS),
    "pegasus": Model("PegasusForConditionalGeneration", "PegasusConfig", {"instead": BOTH}, LISTS,
        rows=CROSS),
    "marian": Model("MarianMTModel", "MarianConfig", {"instead": BOTH}, LISTS, rows=CROSS),
    "blenderbot": Model("BlenderbotForConditionalGeneration", "BlenderbotConfig",
        {"instead": BOTH}, LISTS, rows=CROSS),
    "m2m_100": Model("M2M100ForConditionalGeneration", "M2M100Config",
        {"instead": BOTH, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, LISTS, rows=CROSS),
    "speech_to_text": Model("Speech2TextForConditionalGeneration", "Speech2TextConfig",
        {"instead": BOTH, "input_feat_per_channel": 8, "conv_channels": 8,
         "max_source_positions": 32, "max_target_positions": 16, "attn": "eager"}, LISTS,
        "features", CROSS),
    "mt5": Model("MT5ForConditionalGeneration", "MT5Config", {"instead": T5}, BLOCKS, rows=CROSS),
    "t5_gated": Model("T5ForConditionalGeneration", "T5Config",
        {"instead": {**T5, "num_layers": 5, "num_decoder_layers": 4,
                     "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}},
        BLOCKS, rows=CROSS),
    "umt5": Model("UMT5ForConditionalGeneration", "UMT5Config", {"instead": T5}, BLOCKS,
        rows=CROSS),
    "switch": Model("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {"instead": {**T5, "num_layers": 4, "num_experts": 2, "num_sparse_encoder_layers": 2,
                     "num_sparse_decoder_layers": 2, "output_router_logits": False},
         "attn": "eager"},
        BLOCKS, rows=CROSS),
    "t5_encoder": Model("T5ForTokenClassification", "T5Config",
        {"instead": {**T5, "num_labels": WORDS}},
        ("transformer.encoder.block",)),
    "llama_tied": Model("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama_checkpointed": Model("LlamaForCausalLM", "LlamaConfig", {"checkpoint": True}),
    "t5_checkpointed": Model("T5ForConditionalGeneration", "T5Config",
        {"instead": {**T5, "num_layers": 4}, "checkpoint": True}, BLOCKS, rows=CROSS),
    "t5": Model("T5ForConditionalGeneration", "T5Config", {"instead": T5}, BLOCKS, rows=CROSS),
}  # fmt: skip
# Relative to a gradient's largest value. transformers computes norms, rotary tables, scores and
# logits in float32, whatever the weights are: some hundred roundings.
EXACT = 1e-5


def compare(model: Model, schedule: str) -> float:
    """Return the largest difference of a step's loss and gradients, relative to the gradients'."""
    plain, batch = model.make(), model.batch()
    # The loss is the mean over the microbatches' losses, which have every other row.
    parts = [{name: x[i::2].contiguous() for name, x in batch.items()} for i in range(2)]
    expected = torch.stack([plain(**part).loss for part in parts]).mean()
    expected.backward()
    mesh = gspmd.Mesh(data=2, stage=2)
    layers = model.layers if len(model.layers) > 1 else model.layers[0]
    pipelined = gspmd.pipeline_model(
        copy.deepcopy(plain), layers, mesh, microbatches=2, schedule=schedule, rows=model.rows
    )
    specs = {name: "data" + " _" * (x.dim() - 1) for name, x in batch.items()}
    plan = gspmd.plan(pipelined, mesh=mesh, in_specs=specs, grad=True, **batch)
    results, gradients = plan.simulate(**batch)
    found = rows_of_layers(pipelined, gradients)
    worst = float((results.loss - expected.detach()).abs())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1e-3)
            worst = max(worst, float((found[name] - parameter.grad).abs().max() / scale))
    return worst


def rows_of_layers(model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by the names that the model's state_dict has."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    return dict(model.state_dict())


@dataclass(frozen=True)
class Measured:
    """A row of the table. worst: the largest difference; None: an error, which `why` has."""

    worst: float | None
    why: str
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.worst is not None and self.worst < EXACT

    def text(self, name: str) -> str:
        worst = "" if self.worst is None else f"{self.worst:.0e}"
        return f"| {name} | {'yes' if self.is_right else 'no'} | {worst} | {self.why} |"


def measure(model: Model, schedule: str) -> Measured:
    start = time.process_time()
    try:
        worst, why = compare(model, schedule), ""
    except Exception as error:
        worst, why = None, f"{type(error).__name__}: {error}".split("\n")[0]
    return Measured(worst, why, round(time.process_time() - start, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=MODELS, nargs="*")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--json", type=Path, help="rows, of this and of earlier calls")
    parser.add_argument("--count", type=int, default=len(MODELS), help="models in this call")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    without_broken_packages()
    if args.only and len(args.only) == 1:
        worst = compare(MODELS[args.only[0]], args.schedule)
        print(Measured(worst, "", 0.0).text(args.only[0]))
        return
    rows: dict[str, Measured] = {}
    if args.json and args.json.exists():
        rows = {name: Measured(**row) for name, row in json.loads(args.json.read_text()).items()}
    left = [name for name in args.only or MODELS if name not in rows]
    for name in left[: args.count]:
        rows[name] = measure(MODELS[name], args.schedule)
        print(rows[name].text(name), f"{rows[name].seconds} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps({n: asdict(row) for n, row in rows.items()}, indent=1))
    print("\n| model | in stages | largest difference | why not |\n|---|---|---|---|")
    print(*(row.text(name) for name, row in rows.items()), sep="\n")
    print(f"\n{sum(row.is_right for row in rows.values())} of {len(rows)}")


if __name__ == "__main__":
    main()
