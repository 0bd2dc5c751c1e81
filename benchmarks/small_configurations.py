"""Configurations of transformers, made small by general rules.

No rule knows a model. Sizes are first made small by name; if one device cannot run that, all widths
are divided alike, which keeps sums and multiples of them; last, all layers are kept too, as lists
of stages and outputs may need them. Entries that a class reads and a configuration lacks are added.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from message_repairs import LENGTH
from small_arguments import VOCABULARY

IMAGE = 32
BACKBONE, FEATURES = "resnet10t", 512

# ---------------------------------------------------------------------------------- configurations


class Widths(NamedTuple):
    """All widths are divided by heads * head, without both by a table of names. whole: as many
    layers as before. each: the layers of each kind; two where layers of a kind share weights."""

    heads: int = 0
    head: int = 0
    whole: bool = False
    each: int = 1


TRIED = (
    *(Widths(), Widths(4, 8), Widths(1, 8), Widths(2, 2), Widths(4, 8, each=2)),
    *(Widths(4, 8, True), Widths(1, 8, True), Widths(1, 2), Widths(2, 2, True), Widths(1, 1)),
)
LARGEST_IMAGE, IMAGES = 256, r"^((max_)?(image|img)_size|input_size|crop_size)$"
LAYERS = r"layers?$|^depth$|^n_layer|num_blocks$|_depth$"
HEADS = r"heads?$|^n_groups$|_groups$"
OF_A_HEAD = (
    r"(head|key|value|rope|nope).*_dim$|^d_kv$|^dim_head$|_section$|^rotary_dim$|d_head$"
    r"|_head_size$"
)
INDICES = r"(indices|indexes|layer_ids?|hook_ids|(feature|proj)_layers?)$"  # of layers
WIDTH = (
    r"(size|dims?|width|channels?|embd|embed|model|rank|d_ff|d_ssm|n_inner|features|filters|scalar|scale"
    r"|hidden_sizes|in_features|size_global)$"
)
NO_WIDTH = (
    r"vocab|patch|image|img|window|kernel|chunk|block|position|merge|stride|batch|crop|context"
    r"|(in|num|input|mask_input)_channels|codebook_size|state_size|grid|pool|anchor|tile|spatial"
)
SAME = [  # sizes that are small whatever the widths are
    (r"vocab(_size|$)", VOCABULARY),
    (r"max.*(position|length|len)|n_positions|^n_ctx$|seq_len", 128),
    (r"shared_layers$", 0),
    (r"num_(object_)?quer(ies|y_tokens)$|query_num$", 12),
    (r"attention_window$", 8),
    (r"expert_num$", 4),
    (LAYERS, 2),
]
NUMBERS = [  # the first that matches a name of a configuration
    (r"(num_key_value|kv)_heads?$", 2),
    (r"(per_tok|top_?k|moe_k)$", 2),
    (OF_A_HEAD, 8),
    (r"^(n|topk|mamba_n)_groups?$", 2),
    (HEADS, 4),
    (r"(intermediate|inner|ffn|mlp|feed_?forward).*(size|dim)$|^d_ff$|^n_inner$", 64),
    (r"expert.*size$", 32),
    (r"(experts|n_shared|num_shared).*$", 4),
    (r"(lora|low_rank|kv_lora|q_lora).*rank|_rank$", 8),
    (
        r"(hidden|embed|model|projection|output|width|channel).*(size|dim|dims|embd|size_global)$",
        32,
    ),
    (r"^(d_model|d_latents|n_embd|embed_dim|dim|hidden_size|d_embed)$", 32),
    (IMAGES, IMAGE),
    (r"^(num_frames|frames_per_clip)$", 4),
    (r"prompt_size$", 4),
    (r"d_ssm$", 32),
    (r"^patch_size$|patch_stride$", 8),
    (r"(base|initial)_channels?$|filters$", 32),
]
SEVERAL: list[tuple[str, Callable[[int], int]]] = [
    (r"depth|layers|blocks", lambda i: 1),
    (r"attention_window", lambda i: 8),
    (r"head", lambda i: 2),
    (r"hidden|embed|dim|width|channels", lambda i: 16 << min(i, 3)),
]


def kept_layers(values: dict[str, Any], by: Widths) -> tuple[int, list[int]]:
    """How many layers a configuration has, and those to keep: the first of each kind, two at least,
    and one for each layer that is named as an output."""
    counts = [v for n, v in values.items() if type(v) is int and re.search(LAYERS, n)]
    names = "layer_types", "layers_block_type", "gnn_layers_types"
    kinds = next((v for name in names if (v := values.get(name))), [])
    count = len(kinds) or max(counts, default=0)
    if by.whole:
        return count, list(range(count))
    first = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < by.each]
    lists = ((n, v) for n, v in values.items() if isinstance(v, list | tuple))
    named = [len(v) for n, v in lists if re.search(INDICES, n)]
    wanted = max(2, len(first), *(n for n in named if n < 6), 0)
    others = (i for i in range(count) if i not in first)
    kept = sorted([*first, *itertools.islice(others, wanted - len(first))])
    return count, kept or list(range(wanted))


def width(name: str, value: int, by: Widths) -> int:
    """A size of a configuration, divided as the others are."""
    if re.search(OF_A_HEAD, name):
        divisor = by.head
    elif re.search(HEADS, name):
        divisor = by.heads
    elif re.search(WIDTH, name) and not re.search(NO_WIDTH, name):
        divisor = by.heads * by.head
    elif re.search(IMAGES, name):
        while value > LARGEST_IMAGE and value % 2 == 0:
            value //= 2
        return value
    else:
        return value
    return value // divisor if value % divisor == 0 else value


def number(name: str, value: int, layers: int, by: Widths) -> int:
    if name.endswith("token_id") or name.endswith("token_index"):
        return value % VOCABULARY
    if name == "max_keypoints":  # each pixel may be one
        return 16
    if value < 0:
        return value
    for pattern, small in SAME:
        if re.search(pattern, name):
            small = (value if by.whole else layers) if pattern == LAYERS else small
            return min(value, small)
    if by.heads:
        if re.search(r"experts$|per_tok$|top_?k$", name):
            return min(value, 16 if name.endswith("experts") else 4)
        return width(name, value, by)
    return min(value, next((small for p, small in NUMBERS if re.search(p, name)), value))


def several(name: str, values: list[int], by: Widths) -> list[int]:
    if by.heads:
        name = name.replace("in_channels", "channels")  # of a list's stages, not of the input
        depth = 8 if by.whole else 1
        return [min(v, depth) if name == "depths" else width(name, v, by) for v in values]
    if re.search(IMAGES, name) and min(values) >= IMAGE:
        return [round(v / min(values)) * IMAGE for v in values]
    make = next((make for p, make in SEVERAL if re.search(p, name)), lambda i: 1 << 30)
    ranks = {v: i for i, v in enumerate(sorted(set(values)))}  # lists in other orders agree
    return [min(v, make(ranks[v])) for v in values]


def items(name: str, values: list, count: int, kept: list[int], stages: int, by: Widths) -> list:
    """A list of a configuration: one item for each layer, indices of layers or stages, or sizes."""
    if len(values) == count > len(kept) and not name.startswith("stage"):
        values = [values[i] for i in kept]
    if not all(type(v) is int for v in values):
        return values
    if not re.search(INDICES, name):
        return several(name, values, by)
    last = (stages if name == "_out_indices" else len(kept)) - 1
    return values if max(values) <= last else list(range(last + 1))[-len(values) :]


def shrink(config, by: Widths) -> None:
    """Make a configuration of transformers, and those within it, small."""
    if getattr(config, "is_heterogeneous", False):
        config.per_layer_config = None
    values = {n: v for n, v in vars(config).items() if n[:1] != "_" or n == "_out_indices"}
    count, kept = kept_layers(values, by)
    written = any(is_nested(v) for v in values.values())  # widths of blocks, which stay
    stages = list(values.get("stage_names") or ())
    if count and len(stages) - count in (0, 1):  # a stem, and a stage for each layer
        stages = stages[: len(kept) + len(stages) - count]
        values["stage_names"] = stages
    stages = stages or ["stem", *(f"stage{i}" for i in range(1, len(kept) + 1))]
    for name, value in values.items():
        if hasattr(value, "to_diff_dict"):
            shrink(value, by)
        elif isinstance(value, dict) and name.startswith("rope"):
            setattr(config, name, sections(value, by))
        elif is_timm(config) and "_indices" in name:
            continue  # of timm's stages
        elif written and name.endswith("_channels"):
            continue
        elif isinstance(value, list | tuple) and value:
            # A checkpoint's configuration has lists: JSON knows no tuples.
            setattr(config, name, items(name, list(value), count, kept, len(stages), by))
        elif type(value) is int:
            setattr(config, name, number(name, value, len(kept), by))
        elif type(value) is float and name == "depth_coefficient":
            setattr(config, name, min(value, 1.0))
    if values.get("_out_indices") != vars(config).get("_out_indices"):
        config._out_features = [stages[i] for i in config._out_indices]
    if values.get("num_key_value_heads") == values.get("num_attention_heads", ()):
        config.num_key_value_heads = config.num_attention_heads
    for name in ("use_cache", "scale_embedding"):
        if hasattr(config, name):
            setattr(config, name, False)
    same_ends(config, values)
    small_backbone(config, values)
    complete(config)


def is_nested(value: Any) -> bool:
    """Whether a list has blocks of lists of numbers."""
    while isinstance(value, list | tuple) and value:
        if all(isinstance(v, list | tuple) for v in value) and isinstance(
            value[0][:1], list | tuple
        ):
            if value[0] and isinstance(value[0][0], list | tuple):
                return True
        value = value[0]
    return False


def same_ends(config, values: dict[str, Any]) -> None:
    """Keep a width equal to that of the first or last stage, if it was."""
    for name in ("hidden_size", "embed_dim"):
        width = values.get(name)
        for other, sizes in values.items():
            if (
                re.search(r"dim|hidden|embed", other)
                and isinstance(sizes, list | tuple)
                and len(sizes) > 1
                and type(width) is int
                and width in (sizes[0], sizes[-1])
            ):
                setattr(config, name, getattr(config, other)[0 if width == sizes[0] else -1])


def small_backbone(config, values: dict[str, Any]) -> None:
    """Set timm's smallest ResNet: an architecture's sizes are no numbers of a configuration."""
    made = values.get("model_args") or {}
    if sizes := {n: v for n, v in made.items() if type(v) is int}:  # of a vision transformer
        config.model_args = made | {n: number(n, v, 2, Widths()) for n, v in sizes.items()}
    elif isinstance(values.get("architecture"), str):
        config.architecture, config.hidden_size, config.model_args = BACKBONE, FEATURES, {}
    elif is_timm(config):
        config.backbone = BACKBONE
    if "timm_kwargs" in values:  # of the architecture that was replaced
        config.timm_kwargs = {}


def is_timm(config) -> bool:
    """Whether timm makes a model of this configuration, and names its stages."""
    return "timm" in type(config).__name__.lower()


CHECKPOINTS_GIVE = {  # entries whose default is None or empty
    "vocab_size": VOCABULARY,
    "image_token_id": 5,
    "image_token_index": 5,
    "video_token_id": 6,
    "video_token_index": 6,
    "vocabulary_map": {"<image>": 5} | {f"IMGIMG{c}Z": 6 + i for i, c in enumerate("ABCDEFGH")},
    "deepstack_layer_map": [(0, 0), (1, 1)],
    "projector_scale_factors": [1.0],
    "downsample_rate": "1/2",
    "clip_qkv": 8.0,
    "default_language": "en_XX",
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "prediction_length": 8,
}


NAMED_ENTRIES = {  # those that a message asks for
    "out_indices": [1, 2, 3, 4],
    "pad_token_id": 1,
    "mask_token_id": 4,
}


def add_entry(config, name: str) -> None:
    """Add an entry that a class reads to a configuration and to those within it."""
    values = vars(config)
    parts = [v for v in values.values() if hasattr(v, "to_diff_dict")]
    for part in parts:
        add_entry(part, name)
    if values.get(name) is not None:
        return
    head = values.get("head_dim") or 8
    rope, heads = values.get("rope_parameters"), values.get("num_attention_heads")
    if name == "mrope_section":
        if isinstance(rope, dict):
            half = int(head * (rope.get("partial_rotary_factor") or 1)) // 2
            rope[name] = [half // 3, half // 3, half - half // 3 * 2]
        return
    if name.endswith("_attention") and (kinds := values.get("layer_types")):
        thirds = [head // 6, head // 6, head // 2 - head // 6 * 2]
        one = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": thirds}
        config.rope_parameters = {kind: dict(one) for kind in kinds}
        return
    known = {"sliding_window": LENGTH // 2, "rope_theta": 1e4, "num_key_value_heads": heads}
    within = (vars(p)[name] for p in parts if vars(p).get(name) is not None)
    value = known.get(name) or next(within, 0.0 if "dropout" in name else None)
    if value is not None:
        setattr(config, name, value)


def replace_size(config, old: int, new: int) -> None:
    """Replace a size of a configuration, or in its lists, if it has this size once."""
    found: list[tuple[Any, Any]] = []

    def look(values: Any, keys: Iterable) -> None:
        for key in keys:
            if hasattr(value := values[key], "to_diff_dict"):
                look(vars(value), list(vars(value)))
            elif isinstance(value, list):
                look(value, range(len(value)))
            elif type(value) is int and value == old:
                found.append((values, key))

    look(vars(config), list(vars(config)))
    if len(found) == 1:
        values, key = found[0]
        values[key] = new


def complete(config) -> None:
    """Set the entries that checkpoints usually give, where a default of None does not run."""
    values = vars(config)
    if type(values.get("image_embedding_size")) is int:
        config.image_embedding_size = config.image_size // config.patch_size
    heads, layers = values.get("num_attention_heads"), values.get("num_hidden_layers")
    layers = layers if type(layers) is int else 2
    head = values.get("head_dim") or (
        values.get("hidden_size", 0) // heads if type(heads) is int else 0
    )
    missing = CHECKPOINTS_GIVE | {
        "head_dim": head,
        "mlp_layer_types": ["dense", *["sparse"] * layers][:layers],
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "num_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention"] * layers,
    }
    for name, value in missing.items():
        if values.get(name, 0) is None:
            setattr(config, name, value)
    if "sliding_attention" in (values.get("layer_types") or ()) and not values.get(
        "sliding_window"
    ):
        config.sliding_window = LENGTH // 2
    rope, ignored = values.get("rope_parameters"), ()
    half = head // 2
    if isinstance(rope, dict) and head:
        ignored = getattr(config, "ignore_keys_at_rope_validation", None) or ()
        half = int(head * (rope.get("partial_rotary_factor") or 1)) // 2
    is_partial = isinstance(rope, dict) and 3 <= half < head // 2 and "mrope_section" in rope
    if ("mrope_section" in ignored or is_partial) and sum(rope.get("mrope_section", [0])) != half:
        third = half // 3
        rope["mrope_section"] = [half - 2 * third, third, third]


def sections(value: Any, by: Widths):
    """Rotary parameters whose sections are parts of a head."""
    if isinstance(value, dict):
        return {k: sections(v, by) if k != "factor" else v for k, v in value.items()}
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return type(value)(max(v // (by.head or 16), 1) for v in value)
    return value
