"""Models of timm, torchvision and diffusers, made small by one function for each library."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]  # a model and the arguments of a call
BATCH, LARGEST = 4, 30_000_000  # rows, and parameters


def without_cuda_ops() -> None:
    """Define the operations without which torchvision cannot be imported on a host without CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    without_cuda_ops.library = library


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
    name = next((n for small in SMALLEST for n in names if small in n), names[0])
    first: Exception | None = None
    widths = {"embed_dim": 32, "num_heads": 2}, {"embed_dim": 32}, {"embed_dim": 48}, {}
    for width, depth, classes in itertools.product(widths, ({"depth": 2}, {}), (10, 0)):
        fewer = {**width, **depth, **({"num_classes": classes} if classes else {})}
        try:
            model = timm.create_model(name, **fewer)
            size = model.default_cfg.get("input_size", (3, 224, 224))
            if not model.default_cfg.get("fixed_input_size") and size[-1] > 64:
                size = (3, 64, 64)
            x = torch.randn(BATCH, *size)
            model.eval()(x)
            return model, {"x": x}
        except Exception as failed:  # noqa: BLE001 (no such argument, a list, or it does not fit)
            first = first or failed
    raise first or TypeError("no arguments")


def torchvision_names() -> list[str]:
    """The smallest model of each family, of the models whose argument is a batch."""
    models = importlib.import_module("torchvision").models
    families: dict[str, dict[str, int]] = {}
    for module in (models, models.segmentation, models.video):
        for name in models.list_models(module=module):
            weights = next(iter(models.get_model_weights(name)), None)
            size = weights.meta["num_params"] if weights else 10**9
            families.setdefault(re.split(r"[\d_]", name)[0], {})[name] = size
    return sorted(min(sizes, key=sizes.__getitem__) for sizes in families.values())


def torchvision_model(name: str) -> Built:
    torchvision = importlib.import_module("torchvision")
    builder = inspect.signature(torchvision.models.get_model_builder(name))
    given = {"weights_backbone": None} if "weights_backbone" in builder.parameters else {}
    model = torchvision.models.get_model(name, num_classes=10, **given)
    side = 299 if "inception" in name else 224 if re.match("vit|maxvit|mvit", name) else 64
    module = type(model).__module__
    frames = (16,) if ".video." in module else ()
    return model, {"x": torch.randn(BATCH // 2 if frames else BATCH, 3, *frames, side, side)}


DIFFUSERS = r"(Transformer\w*Model|UNet\w*Model|Autoencoder\w+|VQModel|ControlNetModel|\w+DModel)$"


def diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    return sorted(  # one of several models is not a model of its own
        n for n in dir(diffusers) if re.match(r"\w*?" + DIFFUSERS, n) and "Multi" not in n
    )


FEWER = [  # names of a constructor's arguments, and their largest value
    (r"num_\w*layers|layers_per_block|^depth$|num_blocks$", 1),
    (r"num_(attention_|key_value_)?heads|^n_heads", 2),
    (r"cross_attention_dim|joint_attention_dim|caption|text_.*dim|pooled", 32),
]
NARROWER = [  # these do not fit each other in each model
    (r"^(base_|decoder_base_|inner_|hidden_|ffn_)?(dim|size)$|^(d_model|embed_dim|width)$", 32),
    (r"(intermediate|mlp|ffn?|ff_inner).*(size|dim|width)$", 64),
    (r"^((base|model|encoder|decoder)_)?channels$|channels_base$", 32),
    (r"^(encoder|decoder|latent)_(dim|hidden_size)$", 32),
]
NEEDED = [  # arguments without a default
    (r"block_out_channels", (32, 32)),
    (r"latent_channels", 4),
    (r"channels", 3),
    (r"sample_size", 32),
    (r"compression_ratio", 2),
    (r"layers", 1),
]
PART = 4  # of a head's width, and of the parts of it that rotate


def diffusers_arguments(cls, narrow: bool, divide: bool) -> dict[str, Any]:
    """A constructor's defaults, made small."""
    given: dict[str, Any] = {}
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    for key, value in defaults.items():
        if key in ("in_channels", "sample_size") and value is None:
            given[key] = 32
        if value is inspect.Parameter.empty:
            given |= {key: v for p, v in NEEDED[::-1] if re.search(p, key)}  # noqa: B035 (the first)
        if type(value) is int and value > 0:
            table = [*FEWER, *(NARROWER if narrow else [])]
            most = next((most for pattern, most in table if re.search(pattern, key)), value)
            given[key] = min(value, most)
            if divide and re.search(r"head_dim$", key) and value % PART == 0:
                given[key] = value // PART
        elif isinstance(value, tuple | list) and value and all(type(v) is int for v in value):
            if "channels" in key:
                part = 1 if narrow else max(min(value) // 16, 1)  # else they keep their ratios
                given[key] = type(value)(min(v, 32) if narrow else v // part for v in value)
            elif divide and re.search(r"axes_dims?|rope_dim", key):
                given[key] = type(value)(v // PART for v in value)
            elif re.search(r"num_layers|depths$", key):
                given[key] = type(value)(1 for _ in value)
    factors = ("num_attention_heads", "attention_head_dim")
    if all(type(defaults.get(key)) is int for key in factors):
        whole, small = (math.prod(of[key] for key in factors) for of in (defaults, given))
        given |= {key: small for key, value in defaults.items() if value == whole > 1}
    return given


def diffusers_model(name: str) -> Built:
    """The narrowest that runs of a constructor's defaults made small."""
    diffusers = importlib.import_module("diffusers")
    cls, first = getattr(diffusers, name), None
    for narrow, divide in ((True, True), (False, True), (True, False), (False, False)):
        try:
            given = diffusers_arguments(cls, narrow, divide)
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(**given).parameters())
            if size > LARGEST:
                raise MemoryError(f"{size:,} parameters: not small")
            model = cls(**given).eval()
            tried: set[tuple] = set()
            for kwargs in diffusers_inputs(model):
                kinds = (
                    (k, getattr(v, "shape", 0), str(getattr(v, "dtype", 0)))
                    for k, v in kwargs.items()
                )
                if (kind := tuple(kinds)) in tried:
                    continue
                tried.add(kind)
                try:
                    model(**kwargs)
                    return model, kwargs
                except Exception as failed:  # noqa: BLE001 (other arguments may fit)
                    first = first or failed
        except Exception as failed:  # noqa: BLE001 (other sizes may fit)
            first = first or failed
    raise first or TypeError("no arguments")


TEXT = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim",
    "caption_projection_dim", "encoder_hid_dim", "encoder_hidden_states_dim", "cap_feat_dim",
)  # fmt: skip
OTHER_TEXT = r"^(text|cap|caption|txt|context)\w*_(in_)?(dim|channels)$"


def diffusers_inputs(model) -> Iterator[dict[str, Any]]:
    """Yield arguments by their names: pictures, videos, sequences; needed ones, then all known."""
    names, config = inspect.signature(model.forward).parameters, model.config
    needed = {n for n, p in names.items() if p.default is inspect.Parameter.empty}
    side = getattr(config, "sample_size", None)
    side = side if isinstance(side, int) and side <= 64 else 16
    channels = getattr(config, "in_channels", 4) or 4
    widths = [w for n in TEXT if isinstance(w := getattr(config, n, None), int)]
    widths += [v for n, v in config.items() if type(v) is int and re.search(OTHER_TEXT, n)]
    heard = getattr(config, "audio_in_channels", None) or channels
    seen = getattr(config, "image_proj_dim", None) or getattr(config, "image_dim", None) or 32
    pooled = getattr(config, "pooled_projection_dim", None) or 32
    pictures = [(channels, side, side), (channels, 5, side, side), (16, channels)]
    pictures += [(5, channels, side, side), (3, 5, 32, 32), (3, 9, 64, 64), (3, 64, 64)]
    heard_channels = getattr(config, "audio_channels", None) or channels
    pictures += [(channels, 1920), (1, 1920), (channels, 7), (heard_channels, 4096)]
    words_of = [
        getattr(config, n, None) for n in ("codebook_size", "vocab_size", "prior_vocab_size")
    ]
    most = min((n for n in words_of if type(n) is int), default=8)
    embedded = getattr(config, "cond_embed_dim", None) or pooled
    conditions = getattr(config, "conditioning_channels", None) or 3
    times = torch.randint(1, 1000, (BATCH,))
    axes = (getattr(config, n, None) for n in ("axes_dims_rope", "axes_dims", "axes_dim"))
    places = next((len(a) for a in axes if isinstance(a, tuple | list)), 3)
    clocks = times, times.float(), times[:, None].float().expand(-1, 5)
    if not any("time" in n for n in names):
        clocks = clocks[:1]
    for batch, shape, text, times in itertools.product(  # some fit no batch
        (BATCH, 1), dict.fromkeys(pictures), dict.fromkeys(widths or [32]), clocks
    ):
        torch.manual_seed(0)
        picture, times = torch.randn(batch, *shape), times[:batch]
        words = torch.randn(batch, 7, text)
        two = torch.full((batch, 2), float(side))
        rows = torch.arange(16)[:, None] * torch.tensor([0, *[1] * (places - 1)])
        made = {
            r"sample|hidden_states|x|latent_model_input|context_latents": picture,
            r"timesteps?|r_timestep|timestep_r|t": times,
            r"encoder_hidden_states|text_bth|cap_feats|audio_encoder_hidden_states": words,
            r"text_lens|\w*_lengths?": torch.full((batch,), 7),
            r"audio_hidden_states": torch.randn(batch, 6, heard),
            r"image_embeds|encoder_hidden_states_image": torch.randn(batch, 5, seen),
            r"indices_latents": torch.arange(shape[1] if len(shape) == 4 else 1),
            r"audio_num_frames": 6,
            r"class_labels": torch.randint(0, 4, (batch,)),
            r"pooled_projections|encoder_pooled_projections": torch.randn(batch, pooled),
            r"img_ids": rows.float(),
            r"txt_ids": torch.zeros(7, places),
            r"num_frames": 1,
            r"height|width": 4 if len(shape) == 2 else shape[-1],
            r"guidance": torch.full((batch,), 3.5),
            r"controlnet_cond": picture
            if len(shape) == 2
            else torch.randn(batch, conditions, *shape[1:-2], 8 * side, 8 * side),
            r"conditioning_mask": torch.ones(batch, 1, *shape[1:-2], 8 * side, 8 * side),
            r"controls_latents|latents|control_context": picture,
            r"condition_mask": torch.ones(batch, 1, *shape[1:]),
            r"img_shapes": [[(1, 4, 4)]] * batch,
            r"img_mask": torch.ones(batch, 16).bool(),
            r"position_ids": torch.cat([0 * rows[:1].expand(7, -1), rows]),
            r"input_ids": torch.randint(0, most, (batch, 8, 8)),
            r"pooled_text_emb": torch.randn(batch, embedded),
            r"micro_conds": torch.full((batch, 5), float(side)),
            r"added_time_ids": torch.ones(batch, 3),
            r"prior_token_id": torch.randint(0, most, (batch, (shape[-1] // 2) ** 2)),
            r"prior_token_drop": torch.zeros(batch, (shape[-1] // 2) ** 2).bool(),
            r"visual_rope_pos": [torch.arange(n) for n in (*([1] * 3), *shape[1:3])[-3:]],
            r"text_rope_pos": torch.arange(7),
            r"chunk_partition": [1] * shape[1],
            r"original_size|target_size|crop_coords": two,
            r"(encoder_attention_|encoder_hidden_states_|text_|encoder_)?mask": torch.ones(
                batch, 7
            ),
            r"added_cond_kwargs": {"resolution": two, "aspect_ratio": two[:, :1]},
        }
        known = {n: v for n in names for pattern, v in made.items() if re.fullmatch(pattern, n)}
        once = {n: v for n, v in known.items() if n in needed}
        yield once
        for more in ("timestep", "img_shapes", "class_labels", "added_cond_kwargs"):
            once |= {n: v for n, v in known.items() if n == more}
            yield dict(once)
        yield {n: v for n, v in known.items() if n != "guidance"}
        yield known


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


def x_transformers_model(name: str) -> Built:
    """A decoder of two layers with one switch on."""
    package = importlib.import_module("x_transformers.x_transformers")
    part, switch = name.split("_", 1)
    layers = {switch: True} if part == "layers" else {name: True} if part != "model" else {}
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
