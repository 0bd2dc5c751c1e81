"""Models of timm and x-transformers, made small by one function for each library."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from typing import Any

import torch
from narrow_models import BATCH, LARGEST, Built, narrowed, shallower
from small_torchvision import without_cuda_ops


def without_broken_packages() -> None:
    """Hide packages that cannot be imported on this host from transformers."""
    for name in ("torchvision", "torchaudio"):
        try:
            importlib.import_module(name)
        except RuntimeError:
            without_cuda_ops()
        except (ImportError, OSError):  # a library of another version of torch
            sys.modules[name] = None  # type: ignore[assignment]


def timm_names() -> list[str]:
    """One model of each of timm's modules: its first."""
    timm = importlib.import_module("timm")
    return [f"{m}" for m in timm.list_modules() if timm.list_models(module=m)]


SMALLEST = ("atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "small", "_s", "mini", "lite")


def timm_model(module: str) -> Built:
    """A module's model with a small name, and fewer layers where the constructor takes some."""
    timm = importlib.import_module("timm")
    names = timm.list_models(module=module)
    small_name = next((n for small in SMALLEST for n in names if small in n), names[0])
    last: Exception = TypeError("no arguments")
    widths = {"embed_dim": 32, "num_heads": 2}, {"embed_dim": 32}, {"embed_dim": 48}, {}
    wide = [(1, False), (8, False), (4, False), (1, True), (4, True)]  # divisors; fewer layers
    ways = itertools.product(
        dict.fromkeys((small_name, names[0])), wide, widths, ({"depth": 2}, {}), (11, 0)
    )
    for name, (by, shallow), width, depth, classes in ways:
        fewer = {**width, **depth, **({"num_classes": classes} if classes else {})}
        if (by > 1 or shallow) and width:
            continue  # the layers' widths are divided, or layers left out
        try:
            with torch.device("meta"), narrowed(by):
                model = timm.create_model(name, **fewer)
            if shallow:
                shallower(model)
            if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
                raise MemoryError(f"{size:,} parameters: not small")
            with narrowed(by):
                model = timm.create_model(name, **fewer)
            if shallow:
                shallower(model)
        except Exception as failed:  # noqa: BLE001 (no such argument, or a list)
            last = failed
            continue
        given = model.default_cfg.get("input_size", (3, 224, 224))
        small = not model.default_cfg.get("fixed_input_size") and given[-1] > 64
        for side in (64, 56, given[-1]) if small else given[-1:]:
            x = torch.randn(BATCH, given[0], side, side)
            try:
                model.eval()(x)
                return model, {"x": x}
            except Exception as failed:  # noqa: BLE001 (it does not fit)
                last = failed
    raise last


# ---------------------------------------------------------------------------------- x-transformers


def x_transformers_names() -> list[str]:
    """Each switch that its decoder has: prefix_switch."""
    package = importlib.import_module("x_transformers.x_transformers")
    parts = {
        "layers": package.AttentionLayers,
        "attn": package.Attention,
        "ff": package.FeedForward,
        "model": package.TransformerWrapper,
    }
    return sorted(
        f"{part}_{name}"
        for part, cls in parts.items()
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if p.default is False
    )


BESIDE = {  # switches that need others, or that a decoder's layers set by others
    "attn_causal": {},
    "attn_learned_value_residual_mix": {"add_value_residual": True},
    "attn_qkv_receive_diff_residuals": {
        "qkv_receive_diff_residuals": True,
        "num_residual_streams": 2,
    },
    "attn_use_latent_q": {"attn_use_latent_q": True, "attn_dim_latent_q": 16},
    "attn_use_latent_kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
    "attn_flash_pack_seq": {"attn_flash_pack_seq": True, "rotary_pos_emb": True},
    "layers_attn_aggregated_residuals": {
        "attn_aggregated_residuals": True,
        "attn_aggregated_residual_kwargs": {"lora_rank": 8},
    },
    "layers_gated_multi_residual": {
        "gated_multi_residual": True,
        "num_residual_streams": 2,
        "residual_fn_kwargs": {"read_gate_rank": 8},
    },
    "model_looped": {"pre_and_post_norm": True},
}


def x_transformers_model(name: str) -> Built:
    """A decoder of two layers with one switch on."""
    package = importlib.import_module("x_transformers.x_transformers")
    part, switch = name.split("_", 1)
    layers = {switch: True} if part == "layers" else {name: True} if part != "model" else {}
    layers = BESIDE.get(name, layers)
    if layers.pop("causal", False) or layers.get("cross_attend") or layers.get("only_cross"):
        layers |= {"cross_attend": True}
    decoder = package.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **layers)
    options = {switch: True} if part == "model" else {}
    model = package.TransformerWrapper(
        num_tokens=96, max_seq_len=32, attn_layers=decoder, **options
    )
    kwargs: dict[str, Any] = {"x": torch.randint(0, 96, (BATCH, 16))}
    if layers.get("cross_attend"):
        kwargs["context"] = torch.randn(BATCH, 8, 32)
    if switch.startswith("use_adaptive"):
        kwargs["condition"] = torch.randn(BATCH, 32)
    return model, kwargs
