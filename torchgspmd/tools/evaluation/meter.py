"""Meter: metrics' sums, which stay on their devices until they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...comm.process_groups import find_groups
from ...comm.rank_check import agree
from ...dtensor.storage import whole_of
from ...errors import ShardingError
from .metrics import Metric
from .rows import real_part


class Meter:
    """Metrics over rows that come batch by batch.

    Outputs may be DTensors: every device adds up its rows, and of several copies one counts.
    `compute` sends one small all_reduce. Outputs may also be plain tensors, the same on every
    process; then nothing is sent.

    Args:
        metrics: By name: a Metric, or an object with methods update, compute and reset, as
            torchmetrics has. Such an object gets this device's rows and sums up by itself.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, accuracy
        >>> meter = Meter({"top-1": accuracy()})
        >>> for logits, labels in [(torch.eye(4), torch.arange(4)), (torch.eye(4), torch.ones(4))]:
        ...     meter.update(logits, labels)
        >>> meter.compute()
        {'top-1': 0.625}
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = dict(metrics)
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric) and not hasattr(metric, "update"):
                raise ShardingError.here(
                    f"metric '{name}' is a {type(metric).__name__}",
                    fix="pass a Metric, as accuracy() returns, or an object with update, "
                    "compute, reset",
                )
        self._sums: dict[str, Tensor] = {}
        self._mesh: DeviceMesh | None = None  # all batches' outputs are on it
        self._is_empty = True
        self._failure: Exception | None = None  # in this process

    @torch.no_grad()
    def update(self, outputs: Tensor, *targets: Tensor, real: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            outputs: The model's result, a DTensor or a plain tensor.
            targets: DTensors, or plain tensors that every process has whole.
            real: Which rows count, a bool tensor [rows]; all without it.

        Raises:
            ShardingError: A target does not have the outputs' rows, or these are a DTensor where
                former ones were not.

        Example:
            >>> import torch
            >>> from torchgspmd.tools.evaluation import Meter, accuracy, pad_rows
            >>> (logits, labels), real = pad_rows((torch.eye(3), torch.tensor([0, 0, 2])), 4)
            >>> meter = Meter({"top-1": accuracy()})
            >>> meter.update(logits, labels, real=real)
            >>> round(meter.compute()["top-1"], 4)
            0.6667
        """
        mesh = outputs.device_mesh if isinstance(outputs, DTensor) else None
        if not self._is_empty and mesh != self._mesh:
            raise ShardingError.here(
                f"outputs of one batch are on {mesh}, those of another on {self._mesh}",
                why="rows of a DTensor are summed over devices, and those of plain tensors are not",
                fix="use evaluation.evaluate, or parallelize(..., out_specs=...) with a layout",
            )
        self._mesh, self._is_empty = mesh, False
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric):
                _update(metric, outputs, targets, real)
                continue
            part, tensors = real_part(outputs, targets, metric.whole, real)
            if part.is_counted and all(t.numel() for t in tensors):
                self._add(name, metric, tensors)

    def _add(self, name: str, metric: Metric, tensors: list[Tensor]) -> None:
        """Add sums. On a mesh, where others may have no rows, an error waits for `compute`."""
        try:
            sums = metric.sums(*tensors)
            _check(name, metric, sums)
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        except Exception as error:
            # On one process nobody waits in `compute`, so the error can be raised here.
            if self._mesh is None:
                raise
            self._failure = self._failure or error

    def compute(self) -> dict[str, Any]:
        """Return the metrics over all batches since the start, or since `reset`.

        Call it identically on every rank. It sends one all_reduce, with 8 bytes for each sum.

        Returns:
            Each metric's `value` by name, on every process the same.

        Raises:
            ShardingError: A metric has failed on another process; its own exception is raised
                there.

        Example:
            >>> import torch
            >>> from torchgspmd.tools.evaluation import Meter, accuracy
            >>> meter = Meter({"top-1": accuracy()})
            >>> meter.update(torch.eye(2), torch.tensor([0, 1]))
            >>> meter.compute()
            {'top-1': 1.0}
        """
        own = {n: m for n, m in self.metrics.items() if isinstance(m, Metric)}
        rows = [self._sums.get(name, torch.zeros(m.count)) for name, m in own.items()]
        # Integers up to 2^53 are exact.
        sums = torch.cat([row.double().cpu() for row in rows]) if rows else torch.zeros(0)
        if self._mesh is not None and rows:
            sums = self._all_reduce(sums, self._mesh)
        parts = dict(zip(own, sums.split([m.count for m in own.values()])))
        return {
            name: metric.value(parts[name]) if name in own else metric.compute()
            for name, metric in self.metrics.items()
        }

    def reset(self) -> None:
        """Start anew.

        Example:
            >>> from torchgspmd.tools.evaluation import Meter, accuracy
            >>> Meter({"top-1": accuracy()}).reset()
        """
        self._sums.clear()
        self._is_empty, self._failure = True, None
        for metric in self.metrics.values():
            if not isinstance(metric, Metric):
                metric.reset()

    def _all_reduce(self, sums: Tensor, mesh: DeviceMesh) -> Tensor:
        """Add up the sums over a mesh's devices, if no metric has failed on any."""
        groups = find_groups(mesh)
        if groups is None:
            raise ShardingError.here("outputs are DTensors on a mesh that is not of parallelize")
        failed = torch.tensor([float(self._failure is not None)])
        # Failures travel with the sums: a rank that raised alone would leave the others waiting.
        message = torch.cat([sums, failed]).to(groups.checked_on)
        agree(groups, "the sums of metrics (Meter.compute)", [("their numbers", str(len(message)))])
        groups.watcher.run(dist.all_reduce, message, group=groups.checks)
        total, failed = message.cpu().split([len(sums), 1])
        if self._failure is not None:
            raise self._failure
        if failed:
            raise ShardingError.here(
                f"a metric has failed on {int(failed)} of {groups.mesh.size} processes",
                fix="read the errors of these processes, which say why",
            )
        return total


def _check(name: str, metric: Metric, sums: Tensor) -> None:
    """Raise ShardingError if sums have another shape than the metric says."""
    if tuple(sums.shape) != (metric.count,):
        raise ShardingError.here(
            f"metric '{name}' returned sums of shape {list(sums.shape)}, not [{metric.count}]",
            fix=f"give Metric(sums, count={sums.numel()}), and stack numbers by torch.stack",
        )


def _update(metric: Any, outputs: Tensor, targets: Sequence[Tensor], real: Tensor | None) -> None:
    """Update a torchmetrics metric, whose outputs have the classes in dimension 1.

    One that adds up gets this device's rows. One that collects rows gets all devices' rows: its own
    exchange fails where a device has none.
    """
    if any(isinstance(state, list) for state in getattr(metric, "metric_state", {}).values()):
        outputs = whole_of(outputs)
    if not isinstance(outputs, DTensor):
        metric.distributed_available_fn = lambda: False  # every process sums up for itself
    lacks = bool(targets) and outputs.dim() == targets[0].dim() + 1
    part, tensors = real_part(outputs, targets, (1,) if lacks else (), real)
    if part.is_counted and all(t.numel() for t in tensors):
        metric.update(*tensors)
