"""TRL: its SFTTrainer on a mesh."""

from __future__ import annotations

from typing import Any

from . import library
from .transformers import Trainer

trl: Any = library("trl")


class SFTTrainer(Trainer, trl.SFTTrainer):
    """TRL's SFTTrainer for a mesh; `mesh=` is the one argument more."""

    out_specs = None  # its measures read the logits
