"""Models of timm, torchvision and diffusers, made small by one function for each library."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]  # a model and the arguments of a call
BATCH = 4


def without_cuda_ops() -> None:
    """Define the operations without which torchvision cannot be imported on a host without CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    without_cuda_ops.library = library


def timm_names() -> list[str]:
    """One model of each of timm's modules: its first."""
    timm = importlib.import_module("timm")
    return [f"{m}" for m in timm.list_modules() if timm.list_models(module=m)]


SMALLEST = ("atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "small", "_s", "mini", "lite")


def timm_model(module: str) -> Built:
    """A module's model with a small name, and fewer layers where the constructor takes some."""
    timm = importlib.import_module("timm")
    names = timm.list_models(module=module)
    name = next((n for small in SMALLEST for n in names if small in n), names[0])
    model, fewer = None, {"num_classes": 10, "embed_dim": 32, "num_heads": 2, "depth": 2}
    while model is None:
        try:
            model = timm.create_model(name, **fewer)
        except Exception:  # noqa: BLE001 (it has no such argument, or wants a list)
            if not fewer:
                raise
            fewer.popitem()
            fewer.pop("num_heads", None)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    if not model.default_cfg.get("fixed_input_size") and size[-1] > 64:
        size = (3, 64, 64)
    return model, {"x": torch.randn(BATCH, *size)}


def torchvision_names() -> list[str]:
    torchvision = importlib.import_module("torchvision")
    heads: dict[str, str] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        heads.setdefault(re.split(r"[\d_]", name)[0], name)
    return sorted(heads.values())


def torchvision_model(name: str) -> Built:
    torchvision = importlib.import_module("torchvision")
    model = torchvision.models.get_model(name, num_classes=10)
    side = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit")) else 64
    return model, {"x": torch.randn(BATCH, 3, side, side)}


DIFFUSERS = r"(Transformer\w*Model|UNet\w*Model|Autoencoder\w+|VQModel|ControlNetModel|\w+DModel)$"


def diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    return sorted(n for n in dir(diffusers) if re.match(r"\w*?" + DIFFUSERS, n))


def diffusers_model(name: str) -> Built:
    """Widths of a constructor's defaults, made small."""
    diffusers = importlib.import_module("diffusers")
    cls = getattr(diffusers, name)
    given: dict[str, Any] = {}
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        value = parameter.default
        if value is inspect.Parameter.empty or isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            if re.search(r"num_(single_|refiner_)?layers|^num_layers|layers_per_block", key):
                given[key] = min(value, 1)
            elif re.search(r"num_attention_heads|num_heads|n_heads", key):
                given[key] = min(value, 2)
            elif re.search(r"cross_attention_dim|joint_attention_dim|caption|text_dim|pooled", key):
                given[key] = min(value, 32)
        elif isinstance(value, tuple) and "channels" in key:
            given[key] = tuple(min(v, 32) for v in value)
    model = cls(**given)
    return model, diffusers_inputs(model)


def diffusers_inputs(model) -> dict[str, Any]:
    names, config = inspect.signature(model.forward).parameters, model.config
    side = getattr(config, "sample_size", None)
    side = side if isinstance(side, int) and side <= 64 else 16
    channels = getattr(config, "in_channels", 4)
    text = next(
        (
            getattr(config, n)
            for n in (
                "joint_attention_dim",
                "cross_attention_dim",
                "caption_channels",
                "text_dim",
                "text_embed_dim",
            )
            if isinstance(getattr(config, n, None), int)
        ),
        32,
    )
    frames = (
        (5,)
        if "3D" in type(model).__name__
        or re.search("Video|Wan|Mochi|LTX|Cosmos|CogVideo|Allegro|Magvit", type(model).__name__)
        else ()
    )
    picture = lambda: torch.randn(BATCH, channels, *frames, side, side)  # noqa: E731
    made = {
        "sample": picture,
        "hidden_states": picture,
        "x": picture,
        "timestep": lambda: torch.randint(1, 1000, (BATCH,)),
        "encoder_hidden_states": lambda: torch.randn(BATCH, 7, text),
        "class_labels": lambda: torch.randint(0, 4, (BATCH,)),
        "pooled_projections": lambda: torch.randn(BATCH, config.pooled_projection_dim),
    }
    return {
        n: made[n]()
        for n, p in names.items()
        if n in made
        and (
            p.default is inspect.Parameter.empty
            or n == "class_labels"
            and getattr(config, "num_embeds_ada_norm", None)
        )
    }
