"""evaluate: a model's metrics over all batches in a data set, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...layout.spec_notation import UNCONSTRAINED
from ...runtime.sharded_module import ShardedModule
from .meter import Meter
from .rows import count_rows, pad_rows


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    metrics: Mapping[str, object],
    *,
    call: Callable[..., tuple[Tensor, ...]] | None = None,
    pad: bool = True,
) -> dict[str, Any]:
    """Compute a model's metrics over all batches, as on one device.

    The model is in eval mode meanwhile. On a mesh its results stay where they are computed, and the
    metrics send only one small all_reduce at the end. A batch with fewer rows than the first one is
    filled up, so that the same program runs; these rows are not counted.

    Args:
        model: A module from `parallelize`, or any other.
        batches: Each batch's inputs and target, such as a DataLoader returns: tensors whose
            dimension 0 is the batch's rows, the same on every process.
        metrics: By name: `accuracy()` and the like, a `Metric`, or torchmetrics' metrics.
        call: A function that takes the model and a batch and returns outputs and targets. By
            default `(model(*batch[:-1]), batch[-1])`.
        pad: Whether batches are filled up. False for models whose rows influence one another.

    Returns:
        Each metric's value by name, on every process the same.

    Raises:
        ShardingError: A batch's tensors have different numbers of rows.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import accuracy, evaluate
        >>> batches = torch.utils.data.DataLoader([*zip(torch.eye(5), range(5))], batch_size=2)
        >>> evaluate(torch.nn.Identity(), batches, {"top-1": accuracy()})
        {'top-1': 1.0}
    """
    meter, size = Meter(metrics), 0
    call = call or (lambda model, *batch: (model(*batch[:-1]), batch[-1]))
    with _in_eval(model), _open_results(model):
        for batch in batches:
            rows, real = count_rows(batch), None
            # The first batch's size: filled up to it, all batches run one program.
            size = size or rows
            if pad and rows < size:
                batch, real = pad_rows(batch, size)
            outputs, *targets = call(model, *batch)
            meter.update(_on_mesh(outputs, model), *targets, real=real)
    return meter.compute()


@contextmanager
def _open_results(model: nn.Module) -> Iterator[None]:
    """Leave a module's results where they are computed, if no out_specs say how."""
    if not isinstance(model, ShardedModule) or model._out_specs is not None:
        yield
        return
    model.__dict__["_out_specs"] = UNCONSTRAINED
    try:
        yield
    finally:
        model.__dict__["_out_specs"] = None


def _on_mesh(outputs: Tensor, model: nn.Module) -> Tensor:
    """Return a module's outputs on a mesh as a DTensor; some are whole on every device."""
    if not isinstance(model, ShardedModule) or isinstance(outputs, DTensor):
        return outputs
    device_mesh = model._groups.device_mesh
    replicated = [Replicate()] * device_mesh.ndim
    return DTensor.from_local(outputs, device_mesh, replicated, run_check=False)


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and restore their modes."""
    # One by one, since some modules may have been in eval mode before.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
