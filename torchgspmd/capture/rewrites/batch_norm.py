"""Batch normalization by PyTorch's own kernels, which say that they change running statistics.

cuDNN's operation changes them, but its schema does not say so. Running a captured program, to know
a size or to certify a plan, would then change the model's buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...rules.rewrites import rewrite


def _without_cudnn(function: Callable[..., Any]) -> None:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return function(*args, **kwargs)

    rewrite("value", function)(replacement)


for _function in (torch.batch_norm, F.batch_norm, torch.instance_norm, F.instance_norm):
    _without_cudnn(_function)
