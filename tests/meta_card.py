"""MetaCard: tensors on meta say that they are of CUDA, so that code for CUDA runs without a card.

    with MetaCard():
        x = torch.ones(3, device="cuda")    # x.is_cuda, x.device.type == "cuda"
        x.tolist()                          # an error: there are no values

PyTorch without CUDA makes fake tensors of it, but cannot index or copy them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA, META = torch.device("cuda"), torch.device("meta")
NO_VALUES = (NotImplementedError, RuntimeError)  # raised where a value is read
_GET_DEVICE, _GET_IS_CUDA = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda"))


class MetaCard(TorchFunctionMode):
    """See above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DEVICE:
            return CUDA if args[0].is_meta else func(*args)
        if func == _GET_IS_CUDA:
            return args[0].is_meta
        args, kwargs = tree_map(_on_meta, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    is_card = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device)
    return META if is_card and torch.device(value).type == "cuda" else value
