"""Tables of measured training runs, and the models that their rows name.

A table is a CSV file whose columns are the fields of Row; a model's name is one of
torchgspmd/tools/decoders/models.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

PRECISIONS = ("BF16", "FP8", "MXFP8", "NVFP4")
TEXTS = ("source", "model", "system", "precision")


class BadRow(ValueError):
    """A row that cannot be read, or whose layout cannot be planned."""


@dataclass(frozen=True)
class Row:
    """A measured run. sequence: tokens. fsdp: devices that weights are sharded over, 0 for data
    parallelism with a distributed optimizer. virtual_stages: stages of a device.
    """

    source: str
    model: str
    system: str
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    sequence: int
    fsdp: int
    tensor: int
    pipeline: int
    context: int
    virtual_stages: int
    expert: int
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        tokens = self.global_batch * self.sequence / self.gpus
        return tokens / self.tokens_per_second_per_gpu

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} {self.system}, {self.precision}"

    @property
    def layout(self) -> str:
        """Return the sizes that are more than one, by letters, and microbatches x their size."""
        parts = {
            "d": self.replicas,
            "t": self.tensor,
            "p": self.pipeline,
            "v": self.virtual_stages,
            "c": self.context,
            "e": self.expert,
            "f": self.fsdp,
        }
        names = " ".join(f"{name}{size}" for name, size in parts.items() if size > 1)
        return f"{names or 'd1'}; {self.microbatches} x {self.micro_batch}"

    @property
    def has_adapters(self) -> bool:
        """Return True for a run that trains adapters of low rank (LoRA) only."""
        return "lora" in self.source.lower()

    @property
    def replicas(self) -> int:
        """Return how many parts of the batch are computed at once."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.replicas)

    def check(self) -> None:
        """Raise BadRow if its numbers do not fit each other; `read_rows` does not ask."""
        whole = self.tensor * self.pipeline * self.context
        if self.gpus % whole:
            raise BadRow(
                f"{self.gpus} gpus are not a multiple of tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context}"
            )
        if self.global_batch % (self.micro_batch * self.replicas):
            raise BadRow(
                f"global_batch {self.global_batch} is not a multiple of micro_batch "
                f"{self.micro_batch} x {self.replicas} replicas"
            )
        if self.sequence % (self.context * self.tensor):
            raise BadRow(
                f"sequence {self.sequence} is not a multiple of context {self.context} x tensor "
                f"{self.tensor}"
            )
        if self.precision not in PRECISIONS:
            raise BadRow(f"precision is '{self.precision}'; there are {', '.join(PRECISIONS)}")
        if self.fsdp > 1 and self.replicas % self.fsdp:
            raise BadRow(f"fsdp {self.fsdp} does not divide {self.replicas} replicas")


def read_rows(path: str | Path) -> list[Row]:
    """Return a table's rows.

    Raises:
        BadRow: A column is missing, or a row has no such number; with the file and the line.
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        needed = [each.name for each in fields(Row) if each.default is MISSING]
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise BadRow(f"{path} has no column {', '.join(missing)}")
        return [_row(f"{path}, line {reader.line_num}", values) for values in reader]


def _row(where: str, values: dict[str, Any]) -> Row:
    try:
        return Row(**dict(_fields(values)))
    except BadRow as error:
        raise BadRow(f"{where}: {error}") from None


def _fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for each in fields(Row):
        text = (values.get(each.name) or "").strip()
        if each.name in TEXTS:
            if not text:
                raise BadRow(f"{each.name} is empty")
            yield each.name, text.upper() if each.name == "precision" else text
            continue
        if not text and each.default is not MISSING:
            continue
        kind, least = (float, 0) if each.type == "float" else (int, 0 if each.name == "fsdp" else 1)
        try:
            number = kind(text)
        except ValueError:
            number = -1
        if not number >= least or (kind is float and each.default is MISSING and not number):
            what = "a whole number" if kind is int else "a positive number"
            raise BadRow(f"{each.name} is '{text}'; write {what}{f' from {least}' * (kind is int)}")
        yield each.name, number
