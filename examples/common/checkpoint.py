"""Checkpoints by torch.distributed.checkpoint: those of any mesh and backend are read by all
others.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_map_only


def save(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, folder: Path) -> None:
    """XLA tensors are read before: that is a program of all hosts, and each writes another part of
    the checkpoint.
    """
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, "steps": torch.tensor(steps)}
    dcp.save(
        tree_map_only(Tensor, lambda t: t.cpu() if t.device.type == "xla" else t, content),
        checkpoint_id=folder,
    )


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """The number of steps that the checkpoint has behind it."""
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "steps": torch.tensor(0)}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(found["steps"])


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on every rank, gathered."""
    return {
        name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().cpu()
        for name, w in model.state_dict().items()
    }
