"""Arguments and configurations mended by the message of a failed call.

A message often says which size, how many tokens or which entry it wants.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from small_arguments import Arguments

LENGTH = 16  # tokens

SIZES = (  # of the last dimension: the one there is, and the one wanted
    r"cannot be multiplied \(\d+x(?P<got>\d+) and (?P<want>\d+)x\d+\)",
    r"normalized_shape=\[(?P<want>\d+)\], .* size\[.*, (?P<got>\d+)\]",
    r"to have (?P<want>\d+) channels, but got (?P<got>\d+) channels",
    r"Expected (?P<want>\d+), got (?P<got>\d+)",
    r"size of tensor a \((?P<got>\d+)\) must match the size of tensor b \((?P<want>\d+)\)",
    r"mask \[\d+, (?P<got>\d+)\] .* indexed tensor \[\d+, (?P<want>\d+)",
    r"dimension of the inputs: (?P<got>\d+) .*: (?P<want>\d+)",
)
PLACEHOLDERS = r"^(image|video|audio|speech)_token_(id|index)$"


def repaired(kwargs: dict[str, Any], message: str, arguments: Arguments) -> dict[str, Any] | None:
    """Return the arguments with the size, the name, or as many placeholders, as a failed call asks
    for. message: the exception's, and the line that raised it."""
    if found := re.search(r"length (\d+) is not a multiple of (\d+)", message):
        length, unit = int(found[1]), int(found[2])
        return resized(kwargs, length, length // unit * unit)
    if any(re.search(pattern, message) for pattern in SIZES):
        return resized_by(kwargs, message)
    if counts := re.search(r"tokens: (\d+),? features:? (\d+)", message):
        return with_placeholders(kwargs, int(counts[2]), arguments.config)
    for name in re.findall(r"\w+", message):
        if name in arguments.names and name not in kwargs and (values := arguments.likely(name)):
            return kwargs | {name: values[0]}
    return None


def resized_by(kwargs: dict[str, Any], message: str) -> dict[str, Any] | None:
    """Return the arguments with the size that a failed call's message asks for."""
    found = next(filter(None, (re.search(pattern, message) for pattern in SIZES)), None)
    return found and resized(kwargs, int(found["got"]), int(found["want"]))


def with_placeholders(kwargs: dict[str, Any], count: int, config) -> dict[str, Any] | None:
    """Put as many placeholders of images or sounds before the tokens as there are features."""
    ids = kwargs.get("input_ids")
    tokens = [v for n, v in vars(config).items() if re.search(PLACEHOLDERS, n)]
    if ids is None or ids.dim() != 2 or count > 4096:
        return None
    each = -(-count // len(ids))
    for token in tokens:
        if isinstance(token, int) and (ids == token).sum() != count:
            text = torch.where(ids[:, :LENGTH] == token, token + 1, ids[:, :LENGTH])
            return kwargs | {"input_ids": torch.cat([torch.full((len(ids), each), token), text], 1)}
    return None


def resized(kwargs: dict[str, Any], got: int, want: int) -> dict[str, Any] | None:
    """The arguments with another size, of the first tensor that has one dimension of this size."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            places = [d for d, size in enumerate(value.shape) if size == got and d]
            if len(places) == 1:
                if value.dtype == torch.bool:  # each row keeps as many
                    around = torch.arange(want) % got
                    return kwargs | {name: value.index_select(places[0], around)}
                shape = [*value.shape]
                shape[places[0]] = want
                return kwargs | {name: value.flatten()[torch.randint(value.numel(), shape)]}
    return None


ABSENT = (  # messages that say which entry a configuration lacks
    (r"Config' object has no attribute '(\w+)'", ""),
    (r"Could not find a `(\w+)` argument in the config", ""),
    (r"ne\(\) received .* got \(NoneType\)", "pad_token_id"),
    (r"^'(\w+_attention)'$", ""),  # a rotary table for each kind of layer
    (r"config.(out_indices) to be a list of 4", ""),
    (r'can only concatenate tuple \(not "list"\)', "tuples"),
    (r"split_sizes to sum exactly|stack expects each tensor to be equal size", "mrope_section"),
)


WRONG_SIZES = (  # messages of a layer: the size that a configuration has, and the right one
    r"to have (?P<old>\d+) channels, but got (?P<new>\d+) channels",
    r"running_mean should contain (?P<new>\d+) elements not (?P<old>\d+)",
    r"normalized_shape=\[(?P<old>\d+)\], .* size\[\d+, (?P<new>\d+), \d+, \d+\]",
)


def wrong_size(failed: Exception) -> tuple[int, int] | None:
    """Return the size that a layer has and the size that its input has, if a message says so."""
    found = next(filter(None, (re.search(p, str(failed)) for p in WRONG_SIZES)), None)
    return (int(found["old"]), int(found["new"])) if found else None


def absent_entry(failed: Exception) -> str | None:
    """Return the entry that a configuration lacks, if a message says so."""
    for pattern, entry in ABSENT:
        if found := re.search(pattern, str(failed)):
            return entry or found[1]
    return None
