"""What surrounds a capture: what library code is told meanwhile, and which of its errors become
ShardingErrors.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.attention import flex_attention
from torch.nn.modules import transformer
from torch.utils import checkpoint as checkpointing

from ..compat.private_apis import (
    DisableTorchFunction,
    FunctionalTensor,
    _BatchNorm,
    _disable_current_modes,
    _disable_dynamo,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
    is_missing,
    math_attention,
    peek_interpreter_stack,
)


class _Checkpoint:
    """In the place of torch.utils.checkpoint.CheckpointFunction."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


_batch_norm = nn.BatchNorm1d.forward  # that of _BatchNorm
_equal_truths, _other_truths = torch.SymBool.__eq__, torch.SymBool.__ne__


def _cumulative_batch_norm(self: _BatchNorm, input: Tensor) -> Tensor:
    """With momentum=None running statistics are means over all batches: their number stays a tensor
    here.
    """
    if (
        self.momentum is not None
        or not (self.training and self.track_running_stats)
        or self.num_batches_tracked is None
    ):
        return _batch_norm(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    running = self.running_mean, self.running_var
    of_batch = [buffer.clone() for buffer in running]
    result = F.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    for buffer, value in zip(running, of_batch):
        share = 1.0 / self.num_batches_tracked.to(buffer.dtype)
        buffer.mul_(1 - share).add_(value * share)
    return result


_PATCHES = (
    *(
        (torch.compiler, name, True)
        for name in ("_is_compiling_flag", "_is_exporting_flag")
        if hasattr(torch.compiler, name)
    ),
    (checkpointing, "CheckpointFunction", _Checkpoint),
    (flex_attention, "flex_attention_hop", math_attention),
    (flex_attention, "_validate_device", lambda *_: None),
    (
        transformer,
        "_detect_is_causal_mask",
        lambda mask, is_causal=None, size=None: is_causal is True,
    ),
    (Distribution, "_validate_args", False),
    (FunctionalTensor, "tolist", Tensor.tolist),
    (FunctionalTensor, "to_dense", Tensor.to_dense),
    (
        torch.SymBool,
        "__eq__",
        lambda self, other: (
            bool(self) == other if isinstance(other, (int, float)) else _equal_truths(self, other)
        ),
    ),
    (
        torch.SymBool,
        "__ne__",
        lambda self, other: (
            bool(self) != other if isinstance(other, (int, float)) else _other_truths(self, other)
        ),
    ),
    (_BatchNorm, "forward", _cumulative_batch_norm),
    (nn.SyncBatchNorm, "forward", _cumulative_batch_norm),
    (
        nn.RNNBase,
        "_flat_weights",
        property(lambda self: [getattr(self, name, None) for name in self._flat_weights_names]),
    ),
    (nn.RNNBase, "_update_flat_weights", lambda self: None),
    (nn.RNNBase, "flatten_parameters", lambda self: None),
)


class capturing:
    """Library code that asks whether it is being compiled (transformers' masks do) is told that it
    is; checkpointing is of the kind that can be captured: use_reentrant=True runs a backward of its
    own; and nn.Transformer takes a mask for what it is, without looking whether its values are
    those of a causal one, which only chooses the kernel. Distributions do not look whether their
    parameters are in range. BatchNorm does not turn its count of batches into a number, and
    SyncBatchNorm is the same, since batches are whole. Recurrent layers take their weights as they
    are now, without a list of them. Nobody looks for nan. What torch.compile made of functions and
    modules is not used: they run as they were written, and flex_attention as what it is, a softmax
    of scores. Hooks for saved tensors, such as those of a checkpoint around the call, are for what
    runs.
    """

    active = 0  # how many are under way

    def __enter__(self) -> None:
        capturing.active += 1
        self.anomaly = torch.autograd.set_detect_anomaly(False)
        self.hooks = []
        while (
            not is_missing(_top_saved_tensors_default_hooks)
            and (hooks := _top_saved_tensors_default_hooks(True)) is not None
        ):
            self.hooks.append(hooks)
            _pop_saved_tensors_default_hooks()
        self.stance = torch.compiler.set_stance("force_eager")
        self.before = [(owner, name, vars(owner).get(name)) for owner, name, _ in _PATCHES]
        for owner, name, value in _PATCHES:
            setattr(owner, name, value)

    def __exit__(self, *_: Any) -> None:
        for owner, name, value in self.before:
            delattr(owner, name) if value is None else setattr(owner, name, value)
        self.stance.__exit__(None, None, None)
        for hooks in reversed(self.hooks):
            _push_saved_tensors_default_hooks(*hooks)
        self.anomaly.__exit__()
        capturing.active -= 1


@contextmanager
def at_once() -> Iterator[None]:
    """What is computed of tensors with values inside of it has values, and is no part of the
    program.
    """
    with _disable_current_modes(), DisableTorchFunction():
        yield


@contextmanager
def no_other_random_numbers() -> Iterator[None]:
    """Warns of numbers that the program draws from generators which are not PyTorch's: they are the
    same in every run.
    """
    before = random.getstate(), _numpy_state()
    yield
    for name, was, now in zip(("Python", "NumPy"), before, (random.getstate(), _numpy_state())):
        if was != now:
            warnings.warn(
                f"forward draws random numbers from {name}: every run of the program gets "
                "those that were drawn when it was "
                "made; draw them with torch, or outside and pass them as an argument",
                stacklevel=2,
            )


def _numpy_state() -> tuple[bytes, int]:
    _, key, position, *_ = numpy.random.get_state()
    return key.tobytes(), position


def not_compiled(method: Callable) -> Callable:
    """What torch.compile does not look into; it calls it."""
    return method if is_missing(_disable_dynamo) else _disable_dynamo(method)


def is_transforming() -> bool:
    """Whether torch.func differentiates or vectorizes what is called."""
    return peek_interpreter_stack() is not None


def is_capturing() -> bool:
    """Whether a program is being traced."""
    return capturing.active > 0
