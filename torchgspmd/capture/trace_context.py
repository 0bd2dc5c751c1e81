"""What surrounds a capture: what library code is told meanwhile, and which of its errors become
ShardingErrors.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.nn.attention import flex_attention
from torch.nn.modules import transformer
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint as checkpointing

from ..compat.private_apis import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FunctionalTensor,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
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
from ..errors import ShardingError, user_line, user_line_of

_OLD = (
    torch.__version__ < "2.10"
)  # which cannot trace slices by numbers that depend on values, nor compute with truth values


def check_dense(what: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise ShardingError(
            f"{what} is a nested tensor, and a layout is one of dense tensors",
            where=user_line(),
            fix="pad it to the longest (torch.nested.to_padded_tensor), with a mask, before the program",
        )
    if tensor.layout is not torch.strided:
        raise ShardingError(
            f"{what} is {str(tensor.layout).removeprefix('torch.')}, and a layout is one of dense tensors",
            where=user_line(),
            fix="call to_dense() on it",
        )


def check_module(module: nn.Module) -> None:
    """ShardingError for modules that cannot be traced."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        check_dense(f"'{name}'", tensor)
        if is_lazy(tensor):
            raise ShardingError(
                f"parameter '{name}' has no shape yet",
                where=user_line(),
                why="it is that of a lazy module",
                fix="call the model once on one device before",
            )
    scripted = next(
        (name for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)), None
    )
    if scripted is not None:
        raise ShardingError(
            f"module '{scripted or type(module).__name__}' is compiled by TorchScript, which cannot be captured",
            where=user_line(),
            fix="give the module that torch.jit.script was called on",
        )


_COMMUNICATES = ("from the function c10d.", "torch.distributed.nn.functional")


def needs_values(what: str, where: str | None) -> ShardingError:
    """That a program asks for values which it does not have."""
    slices = "; on torch 2.9, for x[:n]: x.index_select(0, torch.arange(n))" if _OLD else ""
    return ShardingError(
        f"the program depends on values: {what} needs numbers that are known only when it runs",
        where=where,
        why="one program is made for all values, before any device computes",
        fix="use torch.where or a mask instead of a branch, or compute it outside and pass it as an argument"
        + slices,
    )


def check_constants(graph: fx.Graph, owner: nn.Module) -> None:
    """ShardingError where a constant has no values."""
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(owner, node.target, None), FakeTensor):
            raise _no_values_error(node.meta.get("source"))


def _no_values_error(where: str | None) -> ShardingError:
    return ShardingError(
        "the program uses a tensor without values, which somebody has kept from an earlier trace",
        where=where,
        why="what a trace computes of its inputs has values only when it runs",
        fix="keep it in an attribute of the module, or return it",
    )


class translate_errors:
    """What cannot be captured becomes a ShardingError; other errors of the program stay what they
    are.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        sized = isinstance(
            error, RuntimeError
        ) and "expected to contain only concrete integers" in str(error)
        if sized or isinstance(
            error,
            (
                DataDependentOutputException,
                DynamicOutputShapeException,
                GuardOnDataDependentSymNode,
            ),
        ):
            what = str(
                getattr(
                    error, "func", "an `if`, a loop or a slice" if _OLD else "an `if` or a loop"
                )
            )
            raise needs_values(what, user_line_of(error)) from error
        if _OLD and isinstance(error, TypeError) and "SymBool" in str(error):
            raise ShardingError(
                "torch 2.9 cannot compute with a truth value that is known only when the program runs",
                where=user_line_of(error),
                fix="keep it a tensor: (x == y).all() instead of torch.equal(x, y)",
            ) from error
        if kind in (AssertionError, RuntimeError) and any(
            words in str(error) for words in _COMMUNICATES
        ):
            raise ShardingError(
                "the program communicates by itself, through torch.distributed",
                where=user_line_of(error),
                why="its tensors are whole ones: what is sent between devices is found by sharding them",
                fix="leave the communication out: a sum, mean or cat of the batch is that of all devices",
            ) from error
        if isinstance(error, UnsupportedOperatorException):
            raise ShardingError(
                f"this cannot be captured: {error.func}",
                where=user_line_of(error),
                why="it does not run on tensors without values",
                fix="compute it outside and pass it as an argument, or write it with dense tensors",
            ) from error
        if isinstance(error, TypeError) and str(error).startswith("_foreach_"):
            name = str(error).partition("(")[0]
            raise ShardingError(
                f"{name} is given numbers that are known only when it runs",
                where=user_line_of(error),
                why="a list of numbers cannot hold them",
                fix="use foreach=False",
            ) from error
        if isinstance(error, RuntimeError) and str(error).startswith(".numpy() is not supported"):
            raise ShardingError(
                "the program turns a tensor into a NumPy array, which has values only when it runs",
                where=user_line_of(error),
                fix="compute it with torch, or outside and pass it as an argument",
            ) from error
        if isinstance(error, RuntimeError) and "FunctionalTensor on its own" in str(error):
            raise _no_values_error(user_line_of(error)) from error
        if isinstance(error, RuntimeError) and "mutating a non-functional tensor" in str(error):
            raise ShardingError(
                "the program changes a tensor in place that is no argument and found under no name, such as a default",
                where=user_line_of(error),
                why="it is none of the program's inputs, and would stay as it is",
                fix="make it a buffer or attribute of the module, or pass it as an argument",
            ) from error
        if (
            isinstance(error, RuntimeError)
            and "SymInt" in str(error)
            and "not tracked with proxy" in str(error)
        ):
            raise ShardingError(
                "the program makes a tensor of a size that has no number",
                where=user_line_of(error),
                why="it is that of a nested tensor, or of one that comes of values",
                fix="pad nested tensors to the longest (torch.nested.to_padded_tensor), with a mask",
            ) from error
        if (
            isinstance(error, NotImplementedError)
            and (name := re.search(r"HigherOrderOperator (\w+)", str(error))) is not None
        ):
            raise ShardingError(
                f"this cannot be captured: {name[1]}, whose branches or body are programs of their own",
                where=user_line_of(error),
                fix="instead of torch.cond use torch.where, instead of a scan or while_loop "
                "a loop of Python",
            ) from error


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
                f"forward draws random numbers from {name}: every run of the program gets those that were drawn when it was "
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
