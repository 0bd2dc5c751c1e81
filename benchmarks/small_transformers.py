"""Model classes of transformers by their own configurations, made small by general rules.

No rule knows a model. Sizes are first made small by name; if one device cannot run that, all widths
are divided alike, which keeps sums and multiples of them. Arguments follow forward's signature.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]  # a model and the arguments of a call
BATCH, LENGTH, VOCABULARY, IMAGE = 4, 16, 96, 32
LARGEST = 30_000_000  # parameters
BACKBONE, FEATURES = "resnet10t", 512

# ---------------------------------------------------------------------------------- configurations


class Widths(NamedTuple):
    """All widths are divided by heads * head, without both by a table of names."""

    heads: int = 0
    head: int = 0


TRIED = (Widths(), Widths(4, 8), Widths(1, 8), Widths(2, 2), Widths(1, 2), Widths(1, 1))
LAYERS = r"layers?$|^depth$|^n_layer|num_blocks$|_depth$"
HEADS = r"heads?$|^n_groups$|_groups$"
OF_A_HEAD = (
    r"(head|key|value|rope|nope).*_dim$|^d_kv$|^dim_head$|_section$|^rotary_dim$|d_head$"
    r"|_head_size$"
)
INDICES = r"(indices|indexes|layer_ids?|(feature|proj)_layers?)$"  # of layers
WIDTH = (
    r"(size|dims?|width|channels?|embd|embed|model|rank|d_ff|n_inner|features|filters|scalar|scale"
    r"|hidden_sizes|in_features)$"
)
NO_WIDTH = (
    r"vocab|patch|image|img|window|kernel|chunk|block|position|merge|stride|batch|crop|context"
    r"|(in|num|input|mask_input)_channels|codebook_size|state_size|grid|pool|anchor|tile|spatial"
)
SAME = [  # sizes that are small whatever the widths are
    (r"vocab(_size|$)", VOCABULARY),
    (r"max.*(position|length|len)|n_positions|^n_ctx$|seq_len", 128),
    (r"shared_layers$", 0),
    (r"attention_window$", 8),
    (r"expert_num$", 4),
    (LAYERS, 2),
]
NUMBERS = [  # the first that matches a name of a configuration
    (r"(num_key_value|kv)_heads?$", 2),
    (r"(per_tok|top_?k)$", 2),
    (OF_A_HEAD, 8),
    (r"^(n|topk|mamba_n)_groups?$", 2),
    (HEADS, 4),
    (r"(intermediate|inner|ffn|mlp|feed_?forward).*(size|dim)$|^d_ff$|^n_inner$", 64),
    (r"expert.*size$", 32),
    (r"(experts|n_shared|num_shared).*$", 4),
    (r"(lora|low_rank|kv_lora|q_lora).*rank|_rank$", 8),
    (r"(hidden|embed|model|projection|output|width|channel).*(size|dim|dims|embd)$", 32),
    (r"^(d_model|d_latents|n_embd|embed_dim|dim|hidden_size|d_embed)$", 32),
    (r"^(image_size|img_size|input_size|crop_size)$", IMAGE),
    (r"^patch_size$|patch_stride$", 8),
    (r"(base|initial)_channels?$|filters$", 32),
]
SEVERAL: list[tuple[str, Callable[[int], int]]] = [
    (r"depth|layers|blocks", lambda i: 1),
    (r"attention_window", lambda i: 8),
    (r"head", lambda i: 2),
    (r"hidden|embed|dim|width|channels", lambda i: 16 << min(i, 3)),
]


def kept_layers(values: dict[str, Any]) -> tuple[int, list[int]]:
    """How many layers a configuration has, and those to keep: the first of each kind, two at least,
    and one for each layer that is named as an output."""
    counts = [v for n, v in values.items() if type(v) is int and re.search(LAYERS, n)]
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    count = len(kinds) or max(counts, default=0)
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    named = [len(v) for n, v in values.items() if re.search(INDICES, n) and isinstance(v, list)]
    wanted = max(2, len(first), *(n for n in named if n < 6), 0)
    others = (i for i in range(count) if i not in first.values())
    kept = sorted([*first.values(), *itertools.islice(others, wanted - len(first))])
    return count, kept or list(range(wanted))


def width(name: str, value: int, by: Widths) -> int:
    """A size of a configuration, divided as the others are."""
    if re.search(OF_A_HEAD, name):
        divisor = by.head
    elif re.search(HEADS, name):
        divisor = by.heads
    elif re.search(WIDTH, name) and not re.search(NO_WIDTH, name):
        divisor = by.heads * by.head
    else:
        return value
    return value // divisor if value % divisor == 0 else value


def number(name: str, value: int, layers: int, by: Widths) -> int:
    if name.endswith("token_id") or name.endswith("token_index"):
        return value % VOCABULARY
    if value < 0:
        return value
    for pattern, small in SAME:
        if re.search(pattern, name):
            return min(value, layers if pattern == LAYERS else small)
    if by.heads:
        if re.search(r"experts$|per_tok$|top_?k$", name):
            return min(value, 16 if name.endswith("experts") else 4)
        return width(name, value, by)
    return min(value, next((small for p, small in NUMBERS if re.search(p, name)), value))


def several(name: str, values: list[int], by: Widths) -> list[int]:
    if by.heads:
        return [min(v, 1) if re.search(r"^depths$", name) else width(name, v, by) for v in values]
    make = next((make for p, make in SEVERAL if re.search(p, name)), lambda i: 1 << 30)
    return [min(v, make(i)) for i, v in enumerate(values)]


def items(name: str, values: list, count: int, kept: list[int], by: Widths) -> list:
    """A list of a configuration: one item for each layer, indices of layers, or sizes."""
    if len(values) == count > len(kept) and not name.startswith("stage"):
        values = [values[i] for i in kept]
    if not all(type(v) is int for v in values):
        return values
    if not re.search(INDICES, name):
        return several(name, values, by)
    last = len(kept) - (name != "_out_indices")  # whose index 0 is the stem
    return values if max(values) <= last else list(range(last + 1))[-len(values) :]


def shrink(config, by: Widths) -> None:
    """Make a configuration of transformers, and those within it, small."""
    if getattr(config, "is_heterogeneous", False):
        config.per_layer_config = None
    values = {n: v for n, v in vars(config).items() if n[:1] != "_" or n == "_out_indices"}
    count, kept = kept_layers(values)
    for name, value in values.items():
        if hasattr(value, "to_diff_dict"):
            shrink(value, by)
        elif isinstance(value, dict) and name.startswith("rope"):
            setattr(config, name, sections(value, by))
        elif isinstance(value, list | tuple) and value:
            # A checkpoint's configuration has lists: JSON knows no tuples.
            setattr(config, name, items(name, list(value), count, kept, by))
        elif type(value) is int:
            setattr(config, name, number(name, value, len(kept), by))
    if values.get("_out_indices") != vars(config).get("_out_indices"):
        config._out_features = [f"stage{i}" if i else "stem" for i in config._out_indices]
    if values.get("num_key_value_heads") == values.get("num_attention_heads", ()):
        config.num_key_value_heads = config.num_attention_heads
    for name in ("use_cache", "scale_embedding"):
        if hasattr(config, name):
            setattr(config, name, False)
    small_backbone(config, values)
    complete(config)


def small_backbone(config, values: dict[str, Any]) -> None:
    """Set timm's smallest ResNet: an architecture's sizes are no numbers of a configuration."""
    if isinstance(made := values.get("model_args"), dict):  # of a vision transformer
        small = {n: number(n, v, 2, Widths()) for n, v in made.items() if type(v) is int}
        config.model_args = made | small
    elif isinstance(values.get("architecture"), str):
        config.architecture, config.hidden_size = BACKBONE, FEATURES
    elif values.get("model_type") == "timm_backbone" or "timm" in type(config).__name__.lower():
        config.backbone = BACKBONE


def complete(config) -> None:
    """Set the entries that checkpoints usually give, where a default of None does not run."""
    values = vars(config)
    heads, layers = values.get("num_attention_heads"), values.get("num_hidden_layers") or 2
    head = values.get("head_dim") or (
        values.get("hidden_size", 0) // heads if type(heads) is int else 0
    )
    missing = {
        "head_dim": head,
        "mlp_layer_types": ["dense", *["sparse"] * layers][:layers],
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "num_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_key_value_heads": heads,
        "prediction_length": 8,
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


def transformers_names() -> list[str]:
    """Two model classes of each family: the bare model, and one with a head that makes logits."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, list[str]] = {}
    mappings = [m for m in dir(auto) if m.startswith("MODEL_") and m.endswith("_MAPPING_NAMES")]
    heads = ["MODEL_MAPPING", "CAUSAL_LM", "SEQ_TO_SEQ", "IMAGE_TEXT", "MASKED_LM", ""]
    for mapping in sorted(mappings, key=lambda m: next(i for i, h in enumerate(heads) if h in m)):
        for family, value in getattr(auto, mapping).items():
            known = found.setdefault(family, [])
            for name in value if isinstance(value, tuple | list) else (value,):
                if len(known) < 2 and name not in known:
                    known.append(name)
    return sorted({name for names in found.values() for name in names})


def small_model(cls, by: Widths) -> nn.Module:
    """A model class with its configuration made small."""
    config = cls.config_class()
    shrink(config, by)
    if re.search("CausalLM|LMHead", cls.__name__) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    except Exception:  # noqa: BLE001 (its constructor reads numbers)
        size = 0
    if size > LARGEST:
        raise MemoryError(f"{size:,} parameters: not small")
    try:
        return cls(copy.deepcopy(config)).eval()
    except ValueError:  # some part of it has no fused attention
        config._attn_implementation = "eager"
        return cls(config).eval()


def transformers_model(name: str) -> Built:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    first: Exception | None = None
    for by in TRIED:
        try:
            model = small_model(cls, by)
        except Exception as failed:  # noqa: BLE001 (other sizes may fit)
            first = first or failed
            continue
        for kwargs in transformers_inputs(model, model.config):
            try:
                copy.deepcopy(model)(**copy.deepcopy(kwargs))  # a call may leave states behind
                return model, kwargs
            except Exception as failed:  # noqa: BLE001 (the next arguments may do)
                first = first or failed
    raise first or TypeError("no arguments")


# --------------------------------------------------------------------------------------- arguments


def setting(config, *names: str, default: Any = None, first: str = "") -> Any:
    """The first of these names that a configuration has, or one within it; first: where to look
    before."""
    within = [(n, v) for n, v in vars(config).items() if hasattr(v, "to_diff_dict")]
    within.sort(key=lambda pair: not (first and re.search(first, pair[0])))
    preferred = [v for n, v in within if first and re.search(first, n)]
    for part in [*preferred, config, *(v for _, v in within)]:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, int | list | tuple) and value:
                return value
        if part is not config:
            found = setting(part, *names, first=first)
            if found is not None:
                return found
    return default


SEES, HEARS = "vision|image|visual|backbone|encoder", "audio|speech|encoder"


class Arguments:
    """Candidates for arguments of these names, the likeliest first."""

    def __init__(self, config):
        self.config = config
        self.width = setting(config, "hidden_size", "d_model", "n_embd", default=32)
        mels = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "feature_dim")
        self.mels = setting(config, *mels, default=80, first=HEARS)

    def tokens(self) -> Iterator[Tensor]:
        vocabulary = setting(self.config, "vocab_size", default=VOCABULARY, first="text|decoder")
        if isinstance(vocabulary, int):
            yield torch.randint(3, max(vocabulary, 5), (BATCH, LENGTH))
            yield torch.randint(3, max(vocabulary, 5), (BATCH, 2, LENGTH))  # multiple choice
            books = setting(self.config, "num_codebooks", "num_quantizers", default=0)
            if books:
                for count in (books, books + 1):
                    yield torch.randint(3, max(vocabulary, 5), (BATCH, LENGTH, count))
                yield torch.randint(3, max(vocabulary, 5), (BATCH * books, LENGTH))

    def side(self) -> tuple[int, int]:
        size = setting(self.config, "image_size", "img_size", "input_size", first=SEES)
        if size is None:
            size = 64
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def patches(self, times: int = 0) -> tuple[Tensor, Tensor]:
        """Flattened patches of BATCH pictures, and how many each has: time, height, width."""
        patch = setting(self.config, "patch_size", default=8, first=SEES)
        patch = math.prod(patch) if isinstance(patch, tuple | list) else patch**2
        times = times or setting(self.config, "temporal_patch_size", default=1, first=SEES)
        channels = setting(self.config, "in_channels", "num_channels", default=3, first=SEES)
        merge = setting(self.config, "spatial_merge_size", default=2, first=SEES)
        merge = merge[0] if isinstance(merge, tuple | list) else merge
        self.merge = torch.full((BATCH,), merge)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * BATCH)
        return torch.randn(int(grid.prod(1).sum()), channels * times * patch), grid

    def pictures(self) -> Iterator[Tensor]:
        channels = setting(self.config, "num_channels", "in_channels", default=3, first=SEES)
        channels = channels if isinstance(channels, int) else channels[0]
        frames = setting(
            self.config, "num_frames", "frames_per_clip", "tubelet_size", default=4, first=SEES
        )
        frames = frames if isinstance(frames, int) else frames[0]
        for colors in dict.fromkeys((channels, 3)):
            yield torch.randn(BATCH, colors, *self.side())
            yield torch.randn(BATCH, frames, colors, *self.side())
            yield torch.randn(BATCH, 1, colors, *self.side())
            yield torch.randn(BATCH, 2, colors, *self.side())  # pairs
        yield torch.randn(BATCH, 3, 64, 64)
        yield torch.randn(BATCH, 3, 224, 224)
        yield torch.randn(BATCH, 3, 48, 320)
        yield self.patches()[0]
        yield self.patches(2)[0]

    def videos(self) -> Iterator[Tensor]:
        pictures = [p for p in self.pictures() if p.dim() == 5]
        yield from pictures
        yield from (p.transpose(1, 2) for p in pictures)

    def spectra(self) -> Iterator[Tensor]:
        mels = self.mels if isinstance(self.mels, int) else self.mels[0]
        longest = setting(
            self.config, "max_source_positions", "max_length", "max_position_embeddings", default=64
        )
        yield torch.randn(BATCH, mels, 2 * longest)
        yield torch.randn(BATCH, 64, mels)
        yield torch.randn(BATCH, setting(self.config, "max_length", default=64), mels)
        yield torch.randn(
            BATCH, 64, setting(self.config, "feature_projection_input_dim", default=mels)
        )
        yield torch.randn(BATCH, mels, 64)
        yield torch.randn(BATCH, 1, 64, mels)
        yield torch.randn(BATCH, 1, 1024, mels)

    def waves(self) -> Iterator[Tensor]:
        yield torch.randn(BATCH, 2048)
        channels = setting(self.config, "audio_channels", default=1)
        yield torch.randn(BATCH, channels, 3840)
        yield from self.spectra()

    def series(self, more: int = 0) -> Iterator[Tensor]:
        length = setting(self.config, "context_length", default=64)
        lags = setting(self.config, "lags_sequence", default=[0])
        channels = setting(self.config, "num_input_channels", "input_size", default=1)
        yield torch.randn(BATCH, length + max(lags))
        yield torch.randn(BATCH, length, channels)
        yield torch.randn(BATCH, length + max(lags), channels)

    def states(self, name: str) -> Iterator[Tensor]:
        """Hidden states by their width."""
        yield torch.randn(BATCH, LENGTH, self.width)
        other = setting(self.config, name.replace("states", "size"), default=self.width)
        yield torch.randn(BATCH, LENGTH, other)
        yield self.patches()[0]

    def named(self, name: str) -> list[Any]:
        """Return values to try for an argument; none if nothing is known of its name."""
        length = setting(self.config, "context_length", default=64)
        ahead = setting(self.config, "prediction_length", default=8)
        lags = max(setting(self.config, "lags_sequence", default=[0]))
        features = setting(self.config, "num_time_features", default=1)
        patch = setting(self.config, "patch_embed_hidden_size", default=768)
        table: dict[str, Callable[[], Any]] = {
            r"(decoder_|text_|semantic_|qformer_)?input_ids|task_inputs|text_inputs": self.tokens,
            r"((prompt|flattened)_)?pixel_values|(pixel_values_)?images": self.pictures,
            r"prompt_masks": self.pictures,
            "pixel_values_videos|video": self.videos,
            "input_features|audio_features|spectrogram|input_audio_features": self.spectra,
            "input_values|waveform|audio_values|audio": self.waves,
            "past_values": self.series,
            "past_time_features": lambda: [torch.randn(BATCH, length + lags, features)],
            "past_observed_mask": lambda: [torch.ones(BATCH, length + lags)],
            "future_values": lambda: [torch.randn(BATCH, ahead)],
            "future_time_features": lambda: [torch.randn(BATCH, ahead, features)],
            "past_values_padding": lambda: [torch.zeros(BATCH, length + lags)],
            "freq": lambda: [torch.zeros(BATCH, 1).long()],
            "flattened_patches": lambda: [torch.rand(BATCH, LENGTH, 2 + patch)],
            r"bbox": lambda: [
                torch.randint(0, 8, (BATCH, LENGTH, 4)).cumsum(-1),
                torch.rand(BATCH, LENGTH, 4).cumsum(-1) / 4,
            ],
            r"(image_)?grid_thw": lambda: [self.patches()[1]],
            r"merge_sizes": lambda: [self.patches() and self.merge],
            r"state": lambda: [
                torch.randn(BATCH, setting(self.config, "max_state_dim", default=32))
            ],
            r".*attention_mask|padding_mask": lambda: [torch.ones(BATCH, LENGTH).long()],
            r"position_ids": lambda: [torch.arange(LENGTH).expand(BATCH, -1)],
            r"input_points": lambda: [torch.rand(BATCH, 1, 2, 2)],
            r"audio_codes|codes": lambda: [
                torch.randint(
                    0,
                    8,
                    (
                        BATCH,
                        setting(self.config, "num_quantizers", "n_codebooks", default=8),
                        LENGTH,
                    ),
                )
            ],  # fmt: skip
            r"inputs": lambda: [*self.tokens(), *self.pictures()],
            r"(\w*hidden_states|\w*_embeds|\w*embeddings|x)": lambda: self.states(name),
        }
        for pattern, make in table.items():
            if re.fullmatch(pattern, name):
                return list(make())
        return []


def transformers_inputs(model: nn.Module, config) -> Iterator[dict[str, Any]]:
    """Yield arguments by the names in forward's signature: with the main input alone, with all."""
    names = inspect.signature(model.forward).parameters
    arguments = Arguments(config)
    torch.manual_seed(0)
    made = {n: values for n in names if (values := arguments.named(n))}
    needed = {
        n
        for n, p in names.items()
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    main = getattr(model, "main_input_name", "input_ids")
    decoder = {"decoder_input_ids"}
    pictures = {"pixel_values", "image_grid_thw"}
    series = {n for n in made if n.startswith(("past_", "future_"))} - {"past_key_values"}
    tried: list[set[str]] = []
    for wanted in (
        {main}, {main} | decoder, {"input_ids"}, {main, "bbox"},
        {main, "bbox"} | decoder, {main, "input_ids"} | decoder,
        {"input_ids", "pixel_values"}, {"hidden_states", "grid_thw"}, {main, "grid_thw"}, pictures,
        series, {"pixel_values"}, {"input_features"}, {"input_values"},
        {"flattened_patches"} | decoder,
        {"input_ids", "pixel_values", "bbox"}, {"input_ids"} | pictures,
        {"input_ids", "input_features"}, {"input_ids", "input_values"},
        {"input_ids", "qformer_input_ids", "pixel_values"},
    ):  # fmt: skip
        chosen = (wanted | needed) & set(made)
        if chosen and chosen not in tried:
            tried.append(chosen)
    for chosen in tried:
        for turn in range(max(len(made[n]) for n in chosen)):
            yield {n: made[n][min(turn, len(made[n]) - 1)] for n in sorted(chosen)}
