"""Tables of measured training runs, and the models that their rows name.

A table is a CSV file whose columns are the fields of Row; a model's name is one of
torchgspmd/tools/decoders/models.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from torchgspmd.tools.decoders.runs import DecoderRun

# Megatron-Bridge's names for FP8 by its scales: of a tensor, late ones, of a channel, of a block.
SCALES = {"FP8CS": "FP8", "FP8DS": "FP8", "FP8SC": "FP8", "FP8MX": "MXFP8", "FP4": "NVFP4"}
TEXTS = ("source", "model", "system", "precision")
RECIPES = ("has_adapters", "is_automodel")  # no columns: the source tells
SIZES = ("micro_batch", "fsdp", "tensor", "pipeline", "context", "virtual_stages", "expert")


class BadRow(ValueError):
    """A row that cannot be read."""


@dataclass(frozen=True)
class Row(DecoderRun):
    """A measured run. An empty size is 1, an empty fsdp 0. Without tokens a second it was not
    measured. source: says whose it is, and whether it trains adapters.
    """

    source: str = ""
    tokens_per_second_per_gpu: float = 0.0
    model_tflops_per_gpu: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of a step; 0 if it was not measured."""
        speed = self.tokens_per_second_per_gpu
        return self.tokens / speed if speed else 0.0

    @property
    def tokens(self) -> float:
        """Return a GPU's share of a step's tokens."""
        return self.global_batch * self.sequence / self.gpus

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} {self.system}, {self.precision}"

    @property
    def run(self) -> DecoderRun:
        """Return the layout and the recipe."""
        return DecoderRun(**{each.name: getattr(self, each.name) for each in fields(DecoderRun)})


def read_rows(path: str | Path) -> list[Row]:
    """Return a table's rows.

    Raises:
        BadRow: A column is missing, or a row has no such number; with the file and the line.
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        needed = [x.name for x in fields(Row) if x.default is MISSING or x.name in SIZES]
        missing = [x for x in ("source", *needed) if x not in (reader.fieldnames or ())]
        if missing:
            raise BadRow(f"{path} has no column {', '.join(missing)}")
        return [_row(f"{path}, line {reader.line_num}", values) for values in reader]


def _row(where: str, values: dict[str, Any]) -> Row:
    try:
        found = dict(_fields(values))
    except BadRow as error:
        raise BadRow(f"{where}: {error}") from None
    source = found["source"].lower()
    return Row(has_adapters="lora" in source, is_automodel="automodel" in source, **found)


def _precision(text: str) -> str:
    plain = re.sub("[^A-Z0-9]", "", text.upper())
    return SCALES.get(plain, plain)


def _fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for each in fields(Row):
        if each.name in RECIPES:
            continue
        text = (values.get(each.name) or "").strip()
        if each.name in TEXTS:
            if not text:
                raise BadRow(f"{each.name} is empty")
            yield each.name, _precision(text) if each.name == "precision" else text
            continue
        kind, least = (float, 0) if each.type == "float" else (int, 0 if each.name == "fsdp" else 1)
        if not text and (each.default is not MISSING or each.name in SIZES):
            yield each.name, each.default if each.default is not MISSING else least
            continue
        try:
            number = kind(text)
        except ValueError:
            number = -1
        is_speed = each.name == "tokens_per_second_per_gpu"
        if not number >= least or (is_speed and not number):
            what = "a whole number" if kind is int else "a positive number"
            raise BadRow(f"{each.name} is '{text}'; write {what}{f' from {least}' * (kind is int)}")
        yield each.name, number
