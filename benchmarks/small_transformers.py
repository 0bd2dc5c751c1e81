"""Model classes of transformers by their own configurations, made small."""

from __future__ import annotations

import copy
import importlib
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from message_repairs import absent_entry, wrong_size
from narrow_models import LARGEST, Built
from small_arguments import running_arguments
from small_configurations import (
    CHECKPOINTS_GIVE,
    NAMED_ENTRIES,
    TRIED,
    Widths,
    add_entry,
    replace_size,
    shrink,
)
from torch import nn

LONGEST = 20  # CPU seconds, after which no more configurations of a class are tried


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


def small_model(cls, by: Widths, entries: Iterable[Any] = ()) -> nn.Module:
    """A model class with its configuration made small. entries: names to add to it, and
    sizes to replace."""
    config = cls.config_class()
    given = {n: v for n, v in CHECKPOINTS_GIVE.items() if vars(config).get(n, 0) in (None, (), [])}
    given |= {n: v for n, v in NAMED_ENTRIES.items() if n in entries}
    config = cls.config_class(**given)
    shrink(config, by)
    for name in entries:
        if isinstance(name, tuple):
            replace_size(config, *name)
        else:
            add_entry(config, name)
    if "tuples" in entries:
        for name, value in vars(cls.config_class(**given)).items():
            if isinstance(value, tuple):
                setattr(config, name, tuple(getattr(config, name)))
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
    if cls.forward is nn.Module.forward:
        raise TypeError("it has no forward: only generate calls its parts")
    first: Exception | None = None
    end = time.process_time() + LONGEST
    for by in TRIED:
        if time.process_time() > end:
            break
        entries: list[Any] = []  # that its configuration lacks, or pairs of sizes to replace
        while True:
            try:
                model = small_model(cls, by, entries)
                return model, running_arguments(model)
            except Exception as failed:  # noqa: BLE001 (other sizes may fit)
                first = first or failed
                entry = absent_entry(failed) or wrong_size(failed)
                if entry is None or entry in entries or time.process_time() > end:
                    break
                entries.append(entry)
    raise first
