"""Arguments for model classes of diffusers, by the names and the documentation of forward.

A table has a value for each name. The documentation often says the shape of an argument, and so
whether a model takes sequences, pictures or videos.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from narrow_models import BATCH
from torch import Tensor, nn

WORDS, PATCHES, SOUNDS = 7, 16, 6  # rows of sequences
TEXT = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim",
    "caption_projection_dim", "encoder_hid_dim", "encoder_hidden_states_dim", "cap_feat_dim",
    "llm_features_dim", "condition_dim", "in_text_dim", "encoder_hidden_size",
)  # fmt: skip
OTHER_TEXT = r"^(text|cap|caption|txt|context)\w*_(in_)?(dim|channels)$"
MORE = (  # arguments with a default that some need, in turn
    "encoder_hidden_states", "timestep", "img_shapes", "class_labels", "added_cond_kwargs",
    "control_hidden_states", "pose_hidden_states", "padding_mask", "pooled_embeds",
    "conditioning_mask", "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds",
)  # fmt: skip
OTHER_RANK = ("encoder_hidden_states",)  # where a documented shape of another rank is right
SIZES_SAID = [  # words of a documented shape, and the size
    (r"batch", "batch"),
    (r"(text|encoder|cap\w*)_?(seq\w*|tokens?|len\w*)", WORDS),
    (r"(num_)?audio\w*(tokens|len\w*)", SOUNDS),
    (r"seq|len|tokens", PATCHES),
    (r"frames?$", 5),
    (r"height|width|^[hw]$", "side"),
    (r"\d+$", 0),
]


def said(forward, name: str) -> list[str] | None:
    """Return the shape of an argument that the documentation of forward says."""
    found = re.search(rf"\b{name} \([^()]*shape `?\(([^()]*)\)", inspect.getdoc(forward) or "")
    return found and [size.strip() for size in found[1].split(",") if size.strip()]


def rank(model: nn.Module) -> int:
    """Return how many dimensions the first argument has: as documented, or by names."""
    shape = said(model.forward, next(iter(inspect.signature(model.forward).parameters)))
    if shape:
        return len(shape)
    name, layers = type(model).__name__, {type(m) for m in model.modules()}
    timed = any(re.search(r"frames|temporal|patch_size_t", n) for n in model.config)
    if re.search("3D|Motion|SpatioTemporal", name) or nn.Conv3d in layers or timed:
        return 5
    return 3 if "1D" in name or (nn.Conv1d in layers and nn.Conv2d not in layers) else 4


def number(config, *names: str, default: int = 32) -> int:
    """The first of these entries of a configuration that is a number."""
    values = (getattr(config, n, None) for n in names)
    return next((v for v in values if type(v) is int), default)


class World(NamedTuple):
    """Sizes that one call's arguments share."""

    batch: int
    picture: tuple[int, ...]  # without the batch
    text: int
    clocks: Tensor


def worlds(model: nn.Module) -> Iterator[World]:
    """Yield sizes to try, those of the likely number of dimensions first."""
    config, names = model.config, inspect.signature(model.forward).parameters
    side = number(config, "sample_size", default=16)
    side = side if side <= 64 else 16
    channels = number(
        config, "audio_acoustic_hidden_dim", "in_channels", "in_visual_dim", "in_dim", default=4
    )
    heard = number(config, "audio_channels", default=channels)
    patch = getattr(config, "patch_size", 1)
    whole = channels * patch[-1] ** 2 if isinstance(patch, tuple | list) else channels
    pictures = [(channels, side, side), (channels, 5, side, side), (PATCHES, channels)]
    pictures += [(5, channels, side, side), (3, 5, 32, 32), (3, 9, 64, 64), (3, 64, 64)]
    pictures += [(1, side, side, channels), (channels, 1, 16, 16), (3, 17, 64, 64)]
    pictures += [(channels - 2, 5, side, side)] if channels > 2 else []  # beside two masks
    pictures += [(channels, 1920), (1, 1920), (channels, 7), (heard, 4096), (PATCHES, whole)]
    pictures += [(PATCHES, channels, *patch)] if isinstance(patch, tuple | list) else []
    likely = rank(model)
    pictures.sort(key=lambda shape: len(shape) + 1 != likely)
    widths = [w for n in TEXT if isinstance(w := getattr(config, n, None), int)]
    widths += [v for n, v in config.items() if type(v) is int and re.search(OTHER_TEXT, n)]
    times = torch.randint(1, 1000, (BATCH,))
    clocks = times, times.float(), times[:, None].float().expand(-1, 5)
    if not any("time" in n for n in names):
        clocks = clocks[:1]
    for batch, shape, text, clock in itertools.product(  # some fit no batch
        (BATCH, 1), dict.fromkeys(pictures), dict.fromkeys(widths or [32]), clocks
    ):
        yield World(batch, shape, text, clock[:batch])


def table(model: nn.Module, world: World) -> dict[str, Any]:
    """Values of arguments by patterns of their names; functions that make the large ones."""
    config, (batch, shape, text, times) = model.config, world
    side = shape[-1]
    torch.manual_seed(0)
    picture, words = torch.randn(batch, *shape), torch.randn(batch, WORDS, text)
    channels = shape[0] if len(shape) > 2 else shape[-1]
    heard = number(config, "audio_in_channels", "in_audio_dim", default=channels)
    seen = number(config, "image_proj_dim", "image_dim", "image_embed_dim")
    pooled = number(config, "pooled_projection_dim", "in_text_dim2")
    embedded = number(config, "cond_embed_dim", default=pooled)
    conditions = number(config, "conditioning_channels", default=3)
    controls = number(
        config, "vace_in_channels", "control_in_dim", "latent_channels", default=shape[0]
    )
    books = [getattr(config, n, None) for n in ("codebook_size", "vocab_size", "prior_vocab_size")]
    most = min((n for n in books if type(n) is int), default=8)
    ahead = 1 if getattr(config, "use_simplified_condition_embedding", False) else 8
    other_text = number(config, "cross_attention_dim_t5", "text_embed_dim_t5")
    axes = (getattr(config, n, None) for n in ("axes_dims_rope", "axes_dims", "axes_dim"))
    places = next((len(a) for a in axes if isinstance(a, tuple | list)), 3)
    rows = torch.arange(PATCHES)[:, None] * torch.tensor([0, *[1] * (places - 1)])
    together = "+" in ",".join(shape_said := said(model.forward, "position_ids") or ["+"])
    positions = torch.cat([0 * rows[:1].expand(WORDS, -1), rows]) if together else rows
    if "token_tags" in inspect.signature(model.forward).parameters:
        positions = torch.cat([positions, 0 * rows[:1].expand(WORDS + SOUNDS, -1)])
    positions = positions.expand(batch, -1, -1) if len(shape_said) == 3 else positions
    masked = "condition_mask" in inspect.signature(model.forward).parameters and controls > 2
    beside = number(config, "in_channels", default=0) - channels  # a concatenation's other part
    two = torch.full((batch, 2), float(side))
    mask = torch.ones(batch, WORDS)
    patch = getattr(config, "patch_size", 1)
    patch = patch if isinstance(patch, tuple | list) else (1, patch, patch)
    grid = [n // p for n, p in zip((1, *shape[-3:-1]), patch)]  # channels stand last
    packed = torch.arange(PATCHES + SOUNDS + WORDS)
    return {
        r"sample|hidden_states|x|latent_model_input": picture,
        r"context_latents": torch.randn(batch, *shape[:-1], beside) if beside > 0 else picture,
        r"timesteps?|r_timestep|timestep_r|t": times,
        r"encoder_hidden_states|text_bth|cap_feats|audio_encoder_hidden_states": words,
        r"encoder_hidden_states_2": torch.randn(
            batch, WORDS, number(config, "text_embed_2_dim", default=text)
        ),
        r"encoder_hidden_states_llama3": torch.randn(1, batch, WORDS, text),
        r"text_encoder_layers": [
            torch.randn(batch, WORDS, number(config, "text_encoder_dim")) for _ in range(2)
        ],
        r"text_lens|\w*_lengths?": torch.full((batch,), WORDS),
        r"audio_hidden_states": torch.randn(batch, SOUNDS, heard),
        r"image_embeds|encoder_hidden_states_image": torch.randn(batch, 5, seen),
        r"indices_latents": torch.arange(shape[1] if len(shape) == 4 else 1),
        r"audio_num_frames": SOUNDS,
        r"class_labels": torch.randint(0, 4, (batch,)),
        r"encoder_hidden_states_t5": torch.randn(batch, WORDS, other_text),
        r"image_meta_size": torch.full((batch, 6), float(side)),
        r"style": torch.zeros(batch).long(),
        r"pooled_projections|encoder_pooled_projections|pooled_embeds": torch.randn(batch, pooled),
        r"img_ids": rows.float(),
        r"txt_ids": torch.zeros(WORDS, places),
        r"num_frames": 1,
        r"height|width": 4 if len(shape) == 2 else side,
        r"guidance": torch.full((batch,), 3.5),
        r"controlnet_cond": lambda: (
            picture
            if len(shape) == 2 or not hasattr(model, "controlnet_cond_embedding")
            else torch.randn(batch, conditions, *shape[1:-2], ahead * side, ahead * side)
        ),
        r"padding_mask": torch.ones(1, 1, *shape[-2:]),
        r"conditioning_mask": lambda: torch.ones(
            batch, 1, *shape[1:-2], ahead * side, ahead * side
        ),
        r"controls_latents": picture,
        r"latents": torch.randn(batch, controls - 2, *shape[1:]) if masked else picture,
        r"(control|pose)_hidden_states|control_context": torch.randn(batch, controls, *shape[1:]),
        r"condition_mask": torch.ones(batch, 1, *shape[1:]),
        r"img_shapes": [[(1, 4, 4)]] * batch,
        r"shape_list": [[(1, 4, 4)]] * batch,
        r"img_sizes": torch.full((batch, 2), 4),
        r"img_mask": torch.ones(batch, PATCHES).bool(),
        r"position_ids": positions,
        r"input_ids": torch.randint(0, most, (batch, 8, 8)),
        r"pooled_text_emb": torch.randn(batch, embedded),
        r"micro_conds": torch.full((batch, 5), float(side)),
        r"added_time_ids": torch.ones(batch, 3),
        r"prior_token_id": torch.randint(0, most, (batch, (side // 2) ** 2)),
        r"prior_token_drop": torch.zeros(batch, (side // 2) ** 2).bool(),
        r"visual_rope_pos": [torch.arange(n) for n in grid],
        r"text_rope_pos": torch.arange(WORDS),
        r"chunk_partition": [1] * shape[1],
        r"original_size|target_size|crop_coords": two,
        r"(encoder_attention_|encoder_hidden_states_|text_|text_embedding_|encoder_)?mask"
        r"(_t5|_2)?": mask,
        r"added_cond_kwargs": {"resolution": two, "aspect_ratio": two[:, :1]},
        r"timestep_indices": 0 * packed,
        r"token_tags": (packed >= PATCHES).long() + (packed >= PATCHES + WORDS).long(),
        r"video_indices": packed[:PATCHES],
        r"text_indices": packed[PATCHES : PATCHES + WORDS],
        r"audio_indices": packed[-SOUNDS:],
    }


def documented(model: nn.Module, name: str, world: World) -> Tensor | None:
    """Return a tensor of the shape that the documentation says, if its words are known."""
    sizes = {"batch": world.batch, "side": world.picture[-1]}
    shape = []
    for word in said(model.forward, name) or ():
        known = (size for pattern, size in SIZES_SAID if re.search(pattern, word))
        size = getattr(model.config, word, None) or next(known, None)
        if size is None:
            return None
        shape.append(sizes.get(size, size) or int(word))
    if not shape:
        return None
    whole = re.search(r"ids$|indices$|indicator$|tags$", name)
    return torch.randint(2, 4, shape) if whole else torch.randn(shape)


def inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments: the needed ones, some more in turn, then all known."""
    names = inspect.signature(model.forward).parameters
    needed = {n for n, p in names.items() if p.default is inspect.Parameter.empty}
    for world in worlds(model):
        made = table(model, world)
        known = {n: v for n in names for pattern, v in made.items() if re.fullmatch(pattern, n)}
        known = {
            n: v() if callable(v) and not isinstance(v, Tensor) else v for n, v in known.items()
        }
        for name in needed - known.keys():
            if (value := documented(model, name, world)) is not None:
                known[name] = value
        for name, value in known.items():
            kind = str(names[name].annotation).lower()
            if isinstance(value, Tensor) and kind.startswith("list[torch.tensor"):
                known[name] = list(value)
            elif name in OTHER_RANK and (other := documented(model, name, world)) is not None:
                known[name] = other if other.dim() != value.dim() else value
        once = {n: v for n, v in known.items() if n in needed}
        yield once
        for more in MORE:
            once |= {n: v for n, v in known.items() if n == more}
            yield dict(once)
        yield {n: v for n, v in known.items() if n != "guidance"}
        yield known
