"""New tensors under torch.vmap that a mapped value is written into: one for each position.

y = torch.zeros(4)          torch.vmap writes no mapped x into a plain y, and raises; the next
y[1:] = x                   trace maps new tensors
"""

from __future__ import annotations

from typing import Any

import torch

from ...compat.private_apis import CVmapInterpreterPtr, _add_batch_dim, get_interpreter_stack
from ...rules.rewrites import DECLINED, rewrite
from ..trace_context import current_sites
from ..traced_values import is_vectorizing
from .vmapped import is_mapped

# Among a trace's kept sites: new tensors are mapped, since a mapped value is written into one.
WRITTEN = "new tensors under torch.vmap"
WRITTEN_ERROR = "is not possible because there exists a Tensor `other` in extra_args"
_NEW = torch.zeros, torch.ones, torch.full, torch.empty
_LIKE = torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like


def _new(function: Any) -> Any:
    def new(*args: Any, **kwargs: Any) -> Any:
        sites, stack = current_sites(), get_interpreter_stack()
        is_asked = sites is not None and WRITTEN in sites.kept
        if not (is_asked and is_vectorizing() and stack) or is_mapped(*args):
            return DECLINED
        x = function(*args, **kwargs)
        size = CVmapInterpreterPtr(stack[-1]).batchSize()
        return _add_batch_dim(x.expand(size, *x.shape).clone(), 0, stack[-1].level())

    return new


for _function in (*_NEW, *_LIKE):
    rewrite("vmap value", _function)(_new(_function))
