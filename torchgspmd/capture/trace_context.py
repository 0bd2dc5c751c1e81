"""A capture's environment: patches to library code, modes, sites, no garbage collection."""

from __future__ import annotations

import gc
import logging
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.utils import checkpoint as checkpointing

from ..compat.patches import Patch, apply, setting
from ..compat.private_apis import (
    DisableTorchFunction,
    FunctionalTensor,
    _BatchNorm,
    _CachedTorchDispatchMode,
    _disable_current_modes,
    _disable_dynamo,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
    has,
    is_missing,
)
from ..layout.mesh import Mesh
from .draws import recomputing_dispatch, region_or
from .rewrites import numpy_arrays
from .rewrites.vmapped import mapping_apply
from .state.symbolic_numbers import MATH, with_symbols
from .traced_values import SavedValue


class _Checkpoint:
    """Replaces torch.utils.checkpoint.CheckpointFunction."""

    @staticmethod
    def apply(function: object, preserve_rng_state: bool, *args: object) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


_batch_norm = nn.BatchNorm1d.forward  # inherited from _BatchNorm


def _cumulative_batch_norm(self: _BatchNorm, input: Tensor) -> Tensor:
    """Run BatchNorm with momentum=None without turning the batch count into a number.

    The running statistics are means over all batches then.
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
    mean, variance = of_batch = [buffer.clone() for buffer in running]
    affine = {"weight": self.weight, "bias": self.bias}
    # With a momentum of 1 the copies receive this batch's statistics.
    result = F.batch_norm(
        input, mean, variance, **affine, training=True, momentum=1.0, eps=self.eps
    )
    for buffer, value in zip(running, of_batch):
        share = 1.0 / self.num_batches_tracked.to(buffer.dtype)
        buffer.mul_(1 - share).add_(value * share)
    return result


def always(value: object) -> Callable[[Any], Any]:
    """Return a replacement that ignores the original and is a value."""
    return lambda _: value


def around(function: Callable) -> Callable[[Callable], Callable]:
    """Return a replacement that calls a function with the original, and the arguments."""
    return lambda before: partial(function, before)


def _comparison(compare: Callable[[object, object], object]) -> Callable[[Callable], Callable]:
    """Return a replacement for comparing SymBools: with numbers, as bools do."""
    return lambda before: (
        lambda self, other: (
            compare(bool(self), other) if isinstance(other, (int, float)) else before(self, other)
        )
    )


_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_COMPILED = "masks of transformers ask whether the code is being compiled"
_TRUTH = "a truth would not equal the number that it is compared with"
_BATCHES = "the batch count would become a number; SyncBatchNorm is the same on whole batches"
_WEIGHTS = "recurrent layers would take the weights of a list that was made before"

# Since 2.14 `checkpoint` calls the second one. The first one is there for others.
_GENERATOR = "_checkpoint_without_reentrant_generator"
if has("torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl"):
    _GENERATOR = "_checkpoint_without_reentrant_generator_impl"

# That of the program that is being traced.
MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)
# Whether code that asks if a compiler runs hears that none does.
IS_EAGER: ContextVar[bool] = ContextVar("is_eager", default=False)
OPENED: list[str] = []  # names of the user's ranges that a trace is in


def _opening(before: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        OPENED.append(self.name.replace("/", "|"))
        return before(self)

    return enter


def _closing(before: Callable[..., object]) -> Callable[..., Any]:
    def leave(self: object, *error: object) -> Any:
        OPENED.pop()
        return before(self, *error)

    return leave


_RANGES = "a profile of the program would not have the user's ranges"

PATCHES = [  # features add rows
    Patch(torch.profiler.record_function, "__enter__", _opening, _RANGES),
    Patch(torch.profiler.record_function, "__exit__", _closing, _RANGES),
    Patch(torch.compiler, "_is_compiling_flag", lambda _: not IS_EAGER.get(), _COMPILED),
    Patch(torch.compiler, "_is_exporting_flag", lambda _: not IS_EAGER.get(), _COMPILED),
    Patch(
        checkpointing,
        "CheckpointFunction",
        always(_Checkpoint),
        "a checkpoint with use_reentrant=True runs a backward of its own",
    ),
    Patch(
        checkpointing,
        _GENERATOR,
        region_or,
        "a block of a stack or pipeline would be recomputed with the weights of all blocks",
    ),
    Patch(
        checkpointing,
        "_is_compiling",
        always(lambda *_: False),
        "a selective checkpoint would save everything, and leave it to a compiler to recompute",
    ),
    Patch(
        checkpointing,
        "_VersionWrapper",
        always(SavedValue),
        "a selective checkpoint refuses tensors that are changed later: values in a trace",
    ),
    Patch(
        _CachedTorchDispatchMode,
        "__torch_dispatch__",
        recomputing_dispatch,
        "a draw after a saved one would have other numbers; what is saved in place would be lost",
    ),
    Patch(
        transformer,
        "_detect_is_causal_mask",
        always(lambda mask, is_causal=None, size=None: is_causal is True),
        "nn.Transformer reads whether a mask is causal, which only chooses a kernel",
    ),
    Patch(
        Distribution,
        "_validate_args",
        always(False),
        "distributions read their parameters to check the range",
    ),
    *(
        Patch(FunctionalTensor, name, always(getattr(Tensor, name)), "it has a method of its own")
        for name in ("tolist", "to_dense")
    ),
    *(
        Patch(math, name, with_symbols(name), "math.sqrt(self.step) would be one step's")
        for name in MATH
    ),
    Patch(
        torch.autograd.Function,
        "apply",
        mapping_apply,
        "torch.vmap refuses a Function whose forward takes a ctx",
    ),
    Patch(torch.SymBool, "__eq__", _comparison(operator.eq), _TRUTH),
    Patch(torch.SymBool, "__ne__", _comparison(operator.ne), _TRUTH),
    Patch(_BatchNorm, "forward", always(_cumulative_batch_norm), _BATCHES),
    Patch(nn.SyncBatchNorm, "forward", always(_cumulative_batch_norm), _BATCHES),
    Patch(
        nn.RNNBase,
        "_flat_weights",
        always(
            property(lambda self: [getattr(self, name, None) for name in self._flat_weights_names])
        ),
        _WEIGHTS,
    ),
    Patch(nn.RNNBase, "_update_flat_weights", always(lambda self: None), _WEIGHTS),
    Patch(nn.RNNBase, "flatten_parameters", always(lambda self: None), _WEIGHTS),
    Patch(
        _FAKE_LOG,
        "disabled",
        lambda before: before or not _FAKE_LOG.isEnabledFor(logging.DEBUG),
        "shapes that do not fit are logged with 60 lines of torch before the error",
    ),
]


@contextmanager
def without_patches(feature: str) -> Iterator[None]:
    """Take a feature's rows out of the table while in this context."""
    before = list(PATCHES)
    PATCHES[:] = [each for each in before if each.feature != feature]
    try:
        yield
    finally:
        PATCHES[:] = before


class capturing:
    """A context manager that patches library code during a capture.

    It also switches anomaly detection off, and runs code compiled by torch.compile as it was
    written. Hooks for saved tensors, such as those in a checkpoint around the call, apply to
    runs only.
    """

    active = 0  # number of captures under way

    def __enter__(self) -> None:
        capturing.active += 1
        self.anomaly = torch.autograd.set_detect_anomaly(False)
        # Otherwise a GPU's backward runs in a thread that has no context variable of ours.
        self.threads = torch.autograd.set_multithreading_enabled(False)
        self.hooks = []
        while (
            not is_missing(_top_saved_tensors_default_hooks)
            and (hooks := _top_saved_tensors_default_hooks(True)) is not None
        ):
            self.hooks.append(hooks)
            _pop_saved_tensors_default_hooks()
        self.stance = torch.compiler.set_stance("force_eager")
        self.patches = apply([*PATCHES, *numpy_arrays.patches()])
        OPENED.clear()  # what an error has left

    def __exit__(self, *_: object) -> None:
        self.patches.close()
        self.stance.__exit__(None, None, None)
        for hooks in reversed(self.hooks):
            _push_saved_tensors_default_hooks(*hooks)
        self.threads.__exit__(None, None, None)
        self.anomaly.__exit__()
        capturing.active -= 1


@contextmanager
def compiling() -> Iterator[None]:
    """Tell code in a trace that a compiler runs, for which optimizers read no values."""
    if not is_capturing():
        yield
        return
    before = torch.compiler.is_compiling()
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def at_once() -> Iterator[None]:
    """Compute eagerly: results computed from tensors with values are no part of the program."""
    with _disable_current_modes(), DisableTorchFunction():
        yield


@contextmanager
def no_other_random_numbers() -> Iterator[None]:
    """Warn about random numbers from other generators than PyTorch's.

    They are constants in the program: the same in every run.
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
    state: Any = numpy.random.get_state()
    return state[1].tobytes(), state[2]


def not_compiled(method: Callable) -> Callable:
    """Return the method so that torch.compile calls it without tracing it."""
    return method if is_missing(_disable_dynamo) else _disable_dynamo(method)


def is_capturing() -> bool:
    """Return whether a program is being traced."""
    return capturing.active > 0


# Planning makes millions of small objects, which the collector would scan in vain: a fifth of the
# time. At the end the new objects join the old ones unscanned: one scan would take half a second.
MOST_UNSEEN = 3_000_000  # Objects that the collector has not seen; it runs when there are more.


class _Unseen:
    """Objects that became old unscanned. alive: how many there were in all at the last check."""

    count = 0
    alive: int | None = None


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector: a context manager or a decorator."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _age()
            gc.enable()


def _age() -> None:
    """Make all objects old without a scan, unless too many that escaped it are alive."""
    if gc.get_freeze_count():  # The user's, which only unfreezing everything would make old.
        return
    # Objects made since the last collection, none of them scanned.
    _Unseen.count += gc.get_count()[0]
    # freeze() takes all objects from the generations; unfreeze() puts them into the oldest one.
    gc.freeze()
    grown = 0
    if _Unseen.count > MOST_UNSEEN:
        # Most belonged to plans that are gone. A scan of a large process takes seconds.
        _Unseen.count, alive = 0, gc.get_freeze_count()
        _Unseen.alive = min(_Unseen.alive or alive, alive)
        grown = alive - _Unseen.alive
    gc.unfreeze()
    if grown > MOST_UNSEEN:
        gc.collect()
        _Unseen.alive = None


# A site is a source line whose values a rewrite leaves out, as the results need only other values.
# A softmax whose weights only attention needs is no part of the captured program. If the program
# needs the weights elsewhere, too, it is traced again and the rewrite keeps that site. A checkpoint
# computes a value again on the same line.
SITE = "site"  # the key for a site in its node's metadata


class RewriteSites:
    """One trace's sites. kept: those whose values the program needs."""

    def __init__(self, kept: set[str]) -> None:
        self.kept, self.rewritten = kept, set[str]()

    def needed(self, graph: fx.Graph) -> set[str]:
        """Return the rewritten sites whose values a graph needs all the same.

        The metadata that says so is removed.
        """
        nodes = graph.nodes if self.rewritten else ()
        return self.rewritten & {node.meta.pop(SITE, "") for node in nodes}


_sites: ContextVar[RewriteSites | None] = ContextVar("sites", default=None)


def current_sites() -> RewriteSites | None:
    """Return the running trace's sites; None if rewrites may leave out nothing."""
    return _sites.get()


def rewriting(sites: RewriteSites) -> AbstractContextManager[RewriteSites | None]:
    """Allow rewrites to leave out values while in this context."""
    return setting(_sites, sites)
