"""Models of transformers with tiny random configurations: for each its class, its options and what
makes its inputs.
"""

from __future__ import annotations

import torch

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_SIDED = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 6,
}
STAGES = {"depths": [2, 2], "num_labels": 6}
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


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


def images_and_text() -> dict:
    return {
        "input_ids": tokens(4, 8),
        "pixel_values": torch.randn(4, 3, 32, 32),
        "return_loss": True,
    }


def speech() -> dict:
    return {"input_features": torch.randn(4, 32, 8), "labels": tokens(4, 6)}


def series() -> dict:
    return {
        "past_values": torch.randn(4, 10).abs() + 1,
        "past_time_features": torch.randn(4, 10, 1),
        "past_observed_mask": torch.ones(4, 10),
        "future_values": torch.randn(4, 4).abs(),
        "future_time_features": torch.randn(4, 4, 1),
    }


# Language models that need no other options than TEXT, and those that need some.
PLAIN = """CamembertForMaskedLM ErnieForMaskedLM MPNetForMaskedLM ModernBertForMaskedLM
    RobertaForMaskedLM XLMRobertaForMaskedLM CohereForCausalLM GraniteForCausalLM
    Olmo2ForCausalLM OlmoForCausalLM Phi3ForCausalLM
    PhiForCausalLM Qwen2ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM""".split()
HEADS = {"head_dim": 4, "sliding_window": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
GPT = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
STATE = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
TEXTS = {
    "BambaForCausalLM": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "Cohere2ForCausalLM": {"sliding_window": 4},
    "ConvBertForMaskedLM": {
        "embedding_size": 8,
        "head_ratio": 2,
        "num_groups": 1,
        "conv_kernel_size": 3,
    },
    "DebertaForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "DeepseekV2ForCausalLM": {**LATENT, "n_group": 1},
    "DeepseekV3ForCausalLM": {**LATENT, "n_group": 2},
    "ElectraForMaskedLM": {"embedding_size": 8},
    "Gemma3ForCausalLM": HEADS,
    "GemmaForCausalLM": HEADS,
    "MinistralForCausalLM": HEADS,
    "MistralForCausalLM": HEADS,
    "Qwen3ForCausalLM": HEADS,
    "GraniteMoeForCausalLM": MOE,
    "JambaForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 2,
        "use_mamba_kernels": False,
    },
    "MobileBertForMaskedLM": {
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "true_hidden_size": 16,
        "num_feedforward_networks": 1,
    },
    "OlmoeForCausalLM": MOE,
    "GptOssForCausalLM": {
        **MOE,
        **HEADS,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Qwen3MoeForCausalLM": {**MOE, "head_dim": 4},
    "RecurrentGemmaForCausalLM": {
        "num_hidden_layers": 3,
        "lru_width": 16,
        "attention_window_size": 4,
        "head_dim": 4,
    },
    "RoFormerForMaskedLM": {"embedding_size": 16},
    "SqueezeBertForMaskedLM": {
        "embedding_size": 16,
        "q_groups": 2,
        "k_groups": 2,
        "v_groups": 2,
        "intermediate_groups": 2,
        "output_groups": 2,
    },
}

MODELS = {  # model class, its options, its inputs
    "Albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 8}, text),
    "Bart": ("BartForConditionalGeneration", {**TWO_SIDED, "max_position_embeddings": 32}, pairs),
    "Bert": ("BertForMaskedLM", TEXT, text),
    "Bloom": ("BloomForCausalLM", {**TEXT, "n_layer": 2, "n_head": 4}, text),
    "ConvNext": (
        "ConvNextForImageClassification",
        {**STAGES, "hidden_sizes": [8, 16], "num_stages": 2},
        images,
    ),
    "DebertaV2": (
        "DebertaV2ForMaskedLM",
        {
            **TEXT,
            "relative_attention": True,
            "position_buckets": 4,
            "pos_att_type": ["p2c", "c2p"],
            "type_vocab_size": 0,
        },
        text,
    ),
    "Falcon": ("FalconForCausalLM", {**TEXT, "alibi": True}, text),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
        text,
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", TEXT, text),
    "Gemma2": ("Gemma2ForCausalLM", {**TEXT, "head_dim": 4, "sliding_window": 4}, text),
    "Llama": ("LlamaForCausalLM", TEXT, text),
    "Mamba": (
        "MambaForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "time_step_rank": 2,
        },
        plain_text,
    ),
    "Mixtral": ("MixtralForCausalLM", {**TEXT, **MOE}, text),
    "OPT": ("OPTForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, text),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        {**TEXT, **MOE, "shared_expert_intermediate_size": 12},
        text,
    ),
    "ResNet": (
        "ResNetForImageClassification",
        {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic"},
        images,
    ),
    "Swin": (
        "SwinForImageClassification",
        {
            **STAGES,
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images,
    ),
    "T5": (
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
        pairs,
    ),
    "ViT": ("ViTForImageClassification", VISION, images),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {
            **TEXT,
            "vocab_size": 32,
            "conv_dim": [8, 8],
            "conv_stride": [2, 2],
            "conv_kernel": [3, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "feat_extract_norm": "layer",
        },
        lambda: {"input_values": torch.randn(4, 64)},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        lambda: {"input_features": torch.randn(4, 8, 32), "labels": tokens(4, 6)},
    ),
    "BEiT": ("BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, images),
    "Swinv2": (
        "Swinv2ForImageClassification",
        {
            **STAGES,
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images,
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 6,
        },
        lambda: {
            "pixel_values": torch.randn(4, 3, 32, 32),
            "labels": torch.randint(0, 6, (4, 32, 32)),
        },
    ),
    "BigBirdSparse": (
        "BigBirdForMaskedLM",
        {
            **TEXT,
            "attention_type": "block_sparse",
            "block_size": 4,
            "num_random_blocks": 1,
            "max_position_embeddings": 64,
        },
        lambda: {"input_ids": (x := tokens(2, 48)), "labels": x},
    ),
    "CodeGen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, text),
    "DistilBert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 64,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 24,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
        },
        text,
    ),
    "FNet": ("FNetForMaskedLM", TEXT, plain_text),
    "FalconMamba": ("FalconMambaForCausalLM", {**STATE, "time_step_rank": 2}, plain_text),
    "Funnel": (
        "FunnelForMaskedLM",
        {
            "vocab_size": 64,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 4,
            "d_head": 4,
            "d_inner": 24,
            "num_decoder_layers": 1,
        },
        text,
    ),
    "GPTBigCode": ("GPTBigCodeForCausalLM", GPT, text),
    "GPTJ": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, text),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        text,
    ),
    "Mamba2": (
        "Mamba2ForCausalLM",
        {**STATE, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        plain_text,
    ),
    "XLNet": (
        "XLNetLMHeadModel",
        {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24},
        plain_text,
    ),
}
TWO_TOWERS = {
    "text_config": {
        **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"},
        "projection_dim": 8,
    },
    "vision_config": {**VISION, "projection_dim": 8},
    "projection_dim": 8,
}
BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
SIDES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
MODELS |= {  # of several modalities, of detection, of speech, of time series
    "CLIP": ("CLIPModel", TWO_TOWERS, images_and_text),
    "DETR": (
        "DetrForObjectDetection",
        {
            **SIDES,
            "use_timm_backbone": False,
            "backbone": None,
            "backbone_config": BACKBONE,
            "num_queries": 5,
            "num_labels": 6,
        },
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    ),
    "SAMVision": (
        "SamVisionModel",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "output_channels": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 24,
            "num_pos_feats": 4,
        },
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    ),
    "SigLIP": ("SiglipModel", TWO_TOWERS, images_and_text),
    "Speech2Text": (
        "Speech2TextForConditionalGeneration",
        {
            **TWO_SIDED,
            "num_conv_layers": 2,
            "conv_kernel_sizes": [3, 3],
            "conv_channels": 8,
            "input_feat_per_channel": 8,
            "input_channels": 1,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
        speech,
    ),
    "TimeSeries": (
        "TimeSeriesTransformerForPrediction",
        {
            **SIDES,
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "encoder_layers": 1,
            "decoder_layers": 1,
            "num_time_features": 1,
        },
        series,
    ),
}
MODELS |= {name: (name, {**TEXT, **TEXTS.get(name, {})}, text) for name in (*PLAIN, *TEXTS)}
RECURRENCES = {  # for a sharded sequence
    "Rwkv": (
        "RwkvForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "num_hidden_layers": 2,
            "context_length": 64,
        },
        plain_text,
    ),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        {
            **TEXT,
            **MOE,
            "head_dim": 4,
            "max_position_embeddings": 512,
            "shared_expert_intermediate_size": 8,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "mlp_only_layers": [0, 1],
            "layer_types": ["linear_attention", "full_attention"],
        },
        plain_text,
    ),
}
