"""Arguments for model classes of transformers, by the names in forward's signature.

A name has a table of candidates, the likeliest first. Where a call fails, its message often says
which size or how many tokens it wants (`message_repairs.py`).
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from message_repairs import LENGTH, absent_entry, repaired
from narrow_models import BATCH
from torch import Tensor, nn

VOCABULARY = 96
PATIENCE = 10  # CPU seconds for the calls of one small model

# ------------------------------------------------------------------------------- candidates by name


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

    def __init__(self, config, names: Mapping[str, inspect.Parameter]):
        self.config, self.names = config, names
        self.width = setting(config, "hidden_size", "d_model", "n_embd", default=32)
        mels = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "feature_dim",
                "input_dim")  # fmt: skip
        self.mels = setting(config, *mels, default=80, first=HEARS)

    def tokens(self) -> Iterator[Tensor]:
        vocabulary = setting(self.config, "vocab_size", default=VOCABULARY, first="text|decoder")
        if isinstance(vocabulary, int):
            likely = torch.randint(3, max(vocabulary, 5), (BATCH, LENGTH))
            asked = vars(self.config).get("question_token_id")
            if isinstance(asked, int) and asked < vocabulary:
                likely[:, 1] = asked
            yield likely
            yield torch.randint(3, max(vocabulary, 5), (BATCH, 2, LENGTH))  # multiple choice
            books = setting(self.config, "num_codebooks", "num_quantizers", default=0)
            if books:
                for count in (books, books + 1):
                    yield torch.randint(3, max(vocabulary, 5), (BATCH, LENGTH, count))
                yield torch.randint(3, max(vocabulary, 5), (BATCH * books, LENGTH))

    def side(self) -> tuple[int, int]:
        size = setting(
            self.config, "image_size", "img_size", "max_img_size", "input_size", first=SEES
        )
        if size is None:
            size = 64
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def patches(self, times: int = 0) -> tuple[Tensor, Tensor]:
        """Flattened patches of BATCH pictures, and how many each has: time, height, width."""
        patch = setting(self.config, "patch_size", default=8, first=SEES)
        patch = math.prod(patch) if isinstance(patch, tuple | list) else patch**2
        times = times or setting(self.config, "temporal_patch_size", default=1, first=SEES)
        channels = setting(self.config, "in_channels", "num_channels", default=3, first=SEES)
        channels = channels if isinstance(channels, int) else 3
        merge = setting(self.config, "spatial_merge_size", default=2, first=SEES)
        merge = merge[0] if isinstance(merge, tuple | list) else merge
        self.merge = torch.full((BATCH,), merge)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * BATCH)
        return torch.randn(int(grid.prod(1).sum()), channels * times * patch), grid

    def places(self) -> Tensor:
        """The column and row of each patch of patches()."""
        _, high, wide = self.patches()[1][0].tolist()
        rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        return torch.stack([columns, rows], -1).flatten(0, 1).expand(BATCH, -1, -1)

    def rows(self, name: str) -> Tensor:
        """Rows of a width that the configuration names."""
        return torch.randn(BATCH, LENGTH, setting(self.config, name, default=self.width))

    def pictures(self) -> Iterator[Tensor]:
        channels = setting(self.config, "num_channels", "in_channels", default=3, first=SEES)
        channels = channels if isinstance(channels, int) else 3
        frames = setting(
            self.config, "num_frames", "frames_per_clip", "tubelet_size", default=4, first=SEES
        )
        frames = frames if isinstance(frames, int) else frames[0]
        side = self.side()[-1]
        for colors in dict.fromkeys((channels, 3)):
            yield torch.randn(BATCH, colors, *self.side())
            yield torch.randn(BATCH, colors, side, side)
            yield torch.randn(BATCH, frames, colors, *self.side())
            yield torch.randn(BATCH, 1, colors, *self.side())
            yield torch.randn(BATCH, 2, colors, *self.side())  # pairs
        yield torch.randn(BATCH, 3, 64, 64)
        yield torch.randn(BATCH, 3, 224, 224)
        yield torch.randn(BATCH, 3, 48, 320)
        flat = self.patches()[0]
        yield flat
        yield self.patches(2)[0]
        yield flat.unflatten(0, (BATCH, -1))
        if (side := math.isqrt(flat.shape[1] // channels)) ** 2 * channels == flat.shape[1]:
            yield flat.unflatten(1, (channels, side, side))
        merged = math.isqrt(flat.shape[1] // channels) * int(self.merge[0])
        yield torch.randn(len(flat), merged, merged, channels)

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
        yield torch.randn(BATCH, LENGTH, self.width)

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
        features = vars(self.config).get("num_time_features") or 0
        patch = setting(self.config, "patch_embed_hidden_size", default=768)
        table: dict[str, Callable[[], Any]] = {
            r"(decoder_|text_|semantic_|qformer_)?input_ids|task_inputs|text_inputs": self.tokens,
            r"((prompt|flattened)_)?pixel_values|(pixel_values_)?images": self.pictures,
            r"prompt_masks": self.pictures,
            "pixel_values_videos|video": self.videos,
            "input_features|audio_features|spectrogram|input_audio_features": self.spectra,
            "(decoder_)?input_values|waveform|audio_values|audio": self.waves,
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
            r"pixel_attention_mask": lambda: [
                torch.ones(BATCH, len(self.patches()[0]) // BATCH).long()
            ],
            r"spatial_shapes": lambda: [self.patches()[1][:, 1:]],
            r"visual_pos": lambda: [torch.rand(BATCH, LENGTH, 4)],
            r"merge_sizes": lambda: [self.patches() and self.merge],
            r"target_sizes": lambda: [self.patches()[1][:, 1:]],
            r"pixel_position_ids": lambda: [self.places()],
            r"image_attention_mask": lambda: [torch.ones(BATCH, LENGTH, n).long() for n in (1, 4)],
            r"image_embeds_position_mask": lambda: [
                (torch.arange(LENGTH) < setting(self.config, "latent_query_num", default=4)).expand(
                    BATCH, -1
                )
            ],
            r"bool_masked_pos": lambda: [(torch.arange(LENGTH) % 2 > 0).expand(BATCH, -1)],
            r"is_longer": lambda: [torch.zeros(BATCH, 1).bool()],
            r"states": lambda: [self.rows("state_dim")],
            r"actions": lambda: [self.rows("act_dim")],
            r"rewards|returns_to_go": lambda: [torch.randn(BATCH, LENGTH, 1)],
            r"timesteps": lambda: [torch.arange(LENGTH).expand(BATCH, -1)],
            r"state": lambda: [
                torch.randn(BATCH, setting(self.config, "max_state_dim", default=32))
            ],
            r".*features?_mask|feature_attention_mask": lambda: [torch.ones(BATCH, 64).long()],
            r".*attention_mask|padding_mask": lambda: [torch.ones(BATCH, LENGTH).long()],
            r"position_ids": lambda: [torch.arange(LENGTH).expand(BATCH, -1)],
            r"token_type_ids": lambda: [(torch.arange(LENGTH) // 4 % 2).expand(BATCH, -1)],
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

    def likely(self, name: str) -> list[Any]:
        """Values by an argument's name, or else by its annotation."""
        if values := self.named(name):
            return values
        kind = str(self.names[name].annotation)
        if "Tensor" not in kind:
            return []
        if "Bool" in kind:
            return [torch.ones(BATCH, LENGTH, dtype=torch.bool)]
        if re.search("Long|Int", kind):
            return [torch.randint(1, 3, (BATCH, 2)), torch.randint(1, 3, (BATCH, LENGTH))]
        return list(self.states(name))


SETS = (  # names beside those that forward requires; "main" is the class's main_input_name
    "main", "main decoder_input_ids", "input_ids", "main bbox", "main bbox decoder_input_ids",
    "main input_ids decoder_input_ids", "input_ids pixel_values", "hidden_states grid_thw",
    "main grid_thw", "pixel_values image_grid_thw", "series", "pixel_values", "input_features",
    "input_values", "flattened_patches decoder_input_ids", "input_ids pixel_values bbox",
    "input_ids pixel_values image_grid_thw", "input_ids input_features", "input_ids input_values",
    "input_ids qformer_input_ids pixel_values",
    "input_ids qformer_input_ids pixel_values decoder_input_ids",
    "input_ids pixel_values attention_mask",
    "pixel_values pixel_attention_mask spatial_shapes",
    "input_ids pixel_values pixel_attention_mask spatial_shapes", "pixel_values target_sizes",
    "states actions rewards returns_to_go timesteps attention_mask", "input_features is_longer",
    "input_ids pixel_values attention_mask image_attention_mask",
    "input_ids input_features is_longer", "input_ids pixel_values image_embeds_position_mask",
    "input_values decoder_input_values",
)  # fmt: skip


def transformers_inputs(model: nn.Module, arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield arguments by the names in forward's signature: of each set of names the likeliest
    values, and all values of each name beside them; then the second values of all, and so on."""
    names = arguments.names
    needed = {
        n
        for n, p in names.items()
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    if "pixel_values" in names:
        needed |= names.keys() & {"token_type_ids"}  # a processor of pictures and text makes them
    made = {n: values for n in names if (values := arguments.named(n))}
    for name in needed - made.keys():
        if values := arguments.likely(name):
            made[name] = values
    series = [n for n in made if n.startswith(("past_", "future_")) and n != "past_key_values"]
    main = getattr(model, "main_input_name", "input_ids")
    roles = {"main": [main] if isinstance(main, str) else main, "series": series}
    tried: list[set[str]] = []
    for line in SETS:
        wanted = {name for word in line.split() for name in roles.get(word, [word])}
        chosen = (wanted | needed) & set(made)
        if chosen and chosen not in tried:
            tried.append(chosen)
    for chosen in tried:
        likeliest = {n: made[n][0] for n in sorted(chosen)}
        yield likeliest
        for name, other in ((n, o) for n in likeliest for o in made[n][1:]):
            yield likeliest | {name: other}
    for chosen in (c for c in tried if len(c) > 1):
        for turn in range(1, max(len(made[n]) for n in chosen)):
            yield {n: made[n][min(turn, len(made[n]) - 1)] for n in sorted(chosen)}


def running_arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments with which a model runs. Raises the first failure if there are none."""
    first: Exception | None = None
    seen: set[str] = set()
    arguments = Arguments(model.config, inspect.signature(model.forward).parameters)
    torch.manual_seed(0)
    start = time.process_time()
    for kwargs in transformers_inputs(model, arguments):
        if time.process_time() - start > PATIENCE:
            break
        attempt: dict[str, Any] | None = kwargs
        for _ in range(4):
            shapes = str({n: getattr(v, "shape", v) for n, v in attempt.items()})
            if shapes in seen:
                break
            seen.add(shapes)
            try:
                copy.deepcopy(model)(**copy.deepcopy(attempt))  # a call may leave states behind
                return attempt
            except Exception as failed:  # noqa: BLE001 (the next arguments may do)
                first = first or failed
                if absent_entry(failed):
                    raise
                line = traceback.extract_tb(failed.__traceback__)[-1].line
                attempt = repaired(attempt, f"{failed}\n{line}", arguments)
            if attempt is None:
                break
    raise first or TypeError("no arguments")
