"""Models of diffusers, made small by one function."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import re
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from narrow_models import BATCH, LARGEST, Built, narrowed
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

DIFFUSERS = r"(Transformer\w*Model|UNet\w*Model|Autoencoder\w+|VQModel|ControlNetModel|\w+DModel)$"


def diffusers_names() -> list[str]:
    diffusers = importlib.import_module("diffusers")
    return sorted(  # one of several models is not a model of its own
        n for n in dir(diffusers) if re.match(r"\w*?" + DIFFUSERS, n) and "Multi" not in n
    )


FEWER = [  # names of a constructor's arguments, and their largest value
    (r"max_text_seq_length|text_len", 7),
    (r"^sample_(width|height)$|^(min_num_gist_tokens|gist_step|gist_min_text_len)$", 8),
    (r"num_\w*(layers|blocks)$|layers_per_block|depth$|^(n|mmdit)_\w*layers$", 1),
    (r"num_\w*heads|^n_(kv_)?heads", 2),
    (r"cross_attention_dim|joint_attention_dim|caption|text_.*dim|pooled", 32),
]
NARROWER = [  # these do not fit each other in each model
    (r"^((decoder_)?base|inner|hidden|ffn|model|time)?_?(dim|size)$", 32),
    (r"^(d_model|embed_dim|width|model_channels|ch)$", 32),
    (r"(intermediate|mlp|ffn?|ff|ff_inner)_(size|dim|width)$", 64),
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
UNKNOWN = [  # arguments that are None: often needed, and where nothing else runs
    (r"in_channels|sample_size", 32),
    (r"patch_size", 2),
    (r"num_\w*(layers|heads)", 2),
    (r"\w*(channels|dim|dim_t5|size)", 32),
]
NUMBERS = [(r"\w*(layers|places|ids)\w*", [0]), (r"\w*(channels|dims?)", [32, 32])]
PART = 4  # of a head's width, and of the parts of it that rotate


def diffusers_arguments(cls, narrow: bool, divide: bool, fit: bool, fill: bool) -> dict[str, Any]:
    """A constructor's defaults, made small."""
    given: dict[str, Any] = {}
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    for key, value in defaults.items():
        if value is None:
            numbers = "list[int]" in str(parameters[key].annotation).lower()
            table = NUMBERS if numbers else UNKNOWN if fill else UNKNOWN[:1]
            given |= {key: v for p, v in table[::-1] if re.fullmatch(p, key)}  # noqa: B035 (the first)
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
            elif "heads" in key:
                given[key] = type(value)(2 for _ in value)
            elif divide and re.search(r"axes_dims?|rope_dim", key):
                given[key] = type(value)(v // PART for v in value)
            elif re.search(r"layers$|layer_ids$|places$", key) and value != sorted(set(value)):
                given[key] = type(value)(1 for _ in value)
            elif re.search(r"layers$|layer_ids$|places$", key):  # numbers of layers
                given[key] = type(value)([0])
            elif re.search(r"num_layers|depths$", key):
                given[key] = type(value)(1 for _ in value)
    factors = ("num_attention_heads", "attention_head_dim")
    if all(type(defaults.get(key)) is int for key in factors):
        whole, small = (math.prod(of[key] for key in factors) for of in (defaults, given))
        given |= {key: small for key, value in defaults.items() if value == whole > 1}
    if fit:
        fit_axes({**defaults, **given}, given)
    return given


WIDTH = ("hidden_size", "dim", "inner_dim", "model_dim", "width")
HEADS = ("num_attention_heads", "num_heads", "n_heads")
HEAD = ("attention_head_dim", "head_dim")


def fit_axes(known: dict[str, Any], given: dict[str, Any]) -> None:
    """Make the parts of a head that rotate with each axis add up to its width."""

    def number(names: tuple[str, ...]) -> int | None:
        return next((known[n] for n in names if type(known.get(n)) is int), None)

    width, heads, head = number(WIDTH), number(HEADS), number(HEAD)
    head = head or (width // heads if width and heads else None)
    for key, value in known.items():
        if head and re.search(r"axes_dims?|rope_dim_list", key) and isinstance(value, tuple | list):
            part = head // (2 * len(value)) * 2
            given[key] = type(value)([head - part * (len(value) - 1), *[part] * (len(value) - 1)])


REDUCTIONS = (  # narrow, divide heads, fit axes, fill None, divide the layers' widths
    (True, True, True, False, 1), (True, True, False, False, 1), (False, True, True, False, 1),
    (False, True, False, False, 1), (True, False, True, False, 1), (True, True, True, True, 1),
    (False, False, False, False, 1), (True, True, True, False, 8), (False, False, False, False, 8),
)  # fmt: skip
SEARCH = 10  # CPU seconds, after which no more arguments are tried


def line_of(error: Exception, cls: type[nn.Module]) -> int:
    """Return the line of a class's forward that an error comes from."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = inspect.unwrap(cls.forward).__code__
    return max((line for code, line in frames if code is own), default=0)


def diffusers_model(name: str) -> Built:
    """The narrowest that runs of a constructor's defaults made small."""
    diffusers = importlib.import_module("diffusers")
    cls, furthest = getattr(diffusers, name), ((-1, -1), TypeError("no arguments"))
    done: list[nn.Module] = []  # layers that have run
    end = time.process_time() + SEARCH
    for narrow, divide, fit, fill, by in REDUCTIONS:
        try:
            given = diffusers_arguments(cls, narrow, divide, fit, fill)
            with torch.device("meta"), narrowed(by):
                size = sum(p.numel() for p in cls(**given).parameters())
            if size > LARGEST:
                raise MemoryError(f"{size:,} parameters: not small")
            with narrowed(by):
                model = cls(**given).eval()
        except Exception as failed:  # noqa: BLE001 (other sizes may fit)
            furthest = max(furthest, ((-1, 0), failed), key=lambda f: f[0])
            continue
        tried: set[tuple] = set()
        for kwargs in diffusers_inputs(model):
            kinds = (
                (k, getattr(v, "shape", 0), str(getattr(v, "dtype", 0))) for k, v in kwargs.items()
            )
            if (kind := tuple(kinds)) in tried:
                continue
            if time.process_time() > end:
                raise furthest[1]
            tried.add(kind)
            done.clear()
            hook = register_module_forward_hook(lambda layer, *_: done.append(layer))
            try:
                model(**kwargs)
                return model, kwargs
            except Exception as failed:  # noqa: BLE001 (other arguments may fit)
                far = len(done), line_of(failed, type(model))
                furthest = max(furthest, (far, failed), key=lambda f: f[0])
            finally:
                hook.remove()
    raise furthest[1]


TEXT = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim",
    "caption_projection_dim", "encoder_hid_dim", "encoder_hidden_states_dim", "cap_feat_dim",
)  # fmt: skip
OTHER_TEXT = r"^(text|cap|caption|txt|context)\w*_(in_)?(dim|channels)$"


MORE = (  # arguments with a default that some need, in turn
    "timestep", "img_shapes", "class_labels", "added_cond_kwargs", "control_hidden_states",
    "pose_hidden_states", "padding_mask", "pooled_embeds", "conditioning_mask",
)  # fmt: skip


def diffusers_inputs(model) -> Iterator[dict[str, Any]]:
    """Yield arguments by their names: pictures, videos, sequences; needed ones, then all known."""
    names, config = inspect.signature(model.forward).parameters, model.config
    needed = {n for n, p in names.items() if p.default is inspect.Parameter.empty}
    side = getattr(config, "sample_size", None)
    side = side if isinstance(side, int) and side <= 64 else 16
    inputs = (getattr(config, n, None) for n in ("in_channels", "in_visual_dim", "in_dim"))
    channels = next((n for n in inputs if type(n) is int), 4)
    controls = [getattr(config, n, None) for n in ("vace_in_channels", "control_in_dim")]
    controls = [n for n in (*controls, getattr(config, "latent_channels", None)) if type(n) is int]
    widths = [w for n in TEXT if isinstance(w := getattr(config, n, None), int)]
    widths += [v for n, v in config.items() if type(v) is int and re.search(OTHER_TEXT, n)]
    heard = getattr(config, "audio_in_channels", None) or channels
    seen = getattr(config, "image_proj_dim", None) or getattr(config, "image_dim", None) or 32
    pooled = getattr(config, "pooled_projection_dim", None) or 32
    pictures = [(channels, side, side), (channels, 5, side, side), (16, channels)]
    pictures += [(5, channels, side, side), (3, 5, 32, 32), (3, 9, 64, 64), (3, 64, 64)]
    heard_channels = getattr(config, "audio_channels", None) or channels
    pictures += [(1, side, side, channels), (channels, 1, 16, 16)]
    pictures += [(channels, 1920), (1, 1920), (channels, 7), (heard_channels, 4096)]
    words_of = [
        getattr(config, n, None) for n in ("codebook_size", "vocab_size", "prior_vocab_size")
    ]
    most = min((n for n in words_of if type(n) is int), default=8)
    embedded = getattr(config, "cond_embed_dim", None) or pooled
    conditions = getattr(config, "conditioning_channels", None) or 3
    ahead = 1 if getattr(config, "use_simplified_condition_embedding", False) else 8
    texts = (getattr(config, f"{n}_dim_t5", None) for n in ("cross_attention", "text_embed"))
    other_text = next((n for n in texts if type(n) is int), 32)
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
            r"encoder_hidden_states_t5": torch.randn(batch, 7, other_text),
            r"image_meta_size": torch.full((batch, 6), float(side)),
            r"style": torch.zeros(batch).long(),
            r"text_embedding_mask(_t5)?": torch.ones(batch, 7),
            r"pooled_projections|encoder_pooled_projections|pooled_embeds": torch.randn(
                batch, pooled
            ),
            r"img_ids": rows.float(),
            r"txt_ids": torch.zeros(7, places),
            r"num_frames": 1,
            r"height|width": 4 if len(shape) == 2 else shape[-1],
            r"guidance": torch.full((batch,), 3.5),
            r"controlnet_cond": picture
            if len(shape) == 2
            else torch.randn(batch, conditions, *shape[1:-2], ahead * side, ahead * side),
            r"padding_mask": torch.ones(1, 1, *shape[-2:]),
            r"conditioning_mask": torch.ones(batch, 1, *shape[1:-2], ahead * side, ahead * side),
            r"controls_latents|latents": picture,
            r"(control|pose)_hidden_states|control_context": torch.randn(
                batch, *controls[:1] or shape[:1], *shape[1:]
            ),
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
        for more in MORE:
            once |= {n: v for n, v in known.items() if n == more}
            yield dict(once)
        yield {n: v for n, v in known.items() if n != "guidance"}
        yield known
