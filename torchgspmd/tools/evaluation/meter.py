"""evaluate: a model's metrics over all batches, whose sums stay on their devices until the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...comm.process_groups import find_groups
from ...comm.rank_check import agree
from ...dtensor.storage import whole_of
from ...errors import ShardingError
from ...layout.spec_notation import UNCONSTRAINED
from ...runtime.sharded_module import ShardedModule
from .metrics import Metric


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
    with _evaluating(model):
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
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and leave results where they are computed, for the block."""
    # One by one, since some modules may have been in eval mode before.
    modes = [(module, module.training) for module in model.modules()]
    leaves_results = isinstance(model, ShardedModule) and model._out_specs is None
    model.eval()
    if leaves_results:
        model.__dict__["_out_specs"] = UNCONSTRAINED
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        if leaves_results:
            model.__dict__["_out_specs"] = None


def _on_mesh(outputs: Tensor, model: nn.Module) -> Tensor:
    """Return a module's outputs on a mesh as a DTensor; some are whole on every device."""
    if not isinstance(model, ShardedModule) or isinstance(outputs, DTensor):
        return outputs
    device_mesh = model._groups.device_mesh
    replicated = [Replicate()] * device_mesh.ndim
    return DTensor.from_local(outputs, device_mesh, replicated, run_check=False)


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


# A batch's rows: filled up to a size, and those that this device counts.


def pad_rows(batch: Sequence[Tensor], size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Fill up a batch with copies of its last row, or with zeros if it has none.

    Args:
        batch: Tensors with as many rows each: [rows, ...].
        size: How many rows there are to be.

    Returns:
        The tensors, and which rows were there before: a bool tensor [size].

    Raises:
        ShardingError: The tensors have different numbers of rows, or more than `size`.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import pad_rows
        >>> pad_rows((torch.tensor([1.0, 2.0]), torch.tensor([3, 4])), 3)
        ((tensor([1., 2., 2.]), tensor([3, 4, 4])), tensor([ True,  True, False]))
    """
    rows = count_rows(batch)
    if rows > size:
        raise ShardingError.here(f"a batch has {rows} rows, more than {size}")
    padded = []
    for t in batch:
        last = t[-1:] if rows else t.new_zeros(1, *t.shape[1:])
        padded.append(torch.cat([t, last.expand(size - rows, *t.shape[1:])]))
    return tuple(padded), torch.arange(size) < rows


def count_rows(batch: Sequence[Tensor]) -> int:
    """Count a batch's rows, if its tensors agree."""
    counts = {len(t) if isinstance(t, Tensor) and t.dim() else -1 for t in batch}
    if len(counts) != 1 or -1 in counts:
        kinds = (list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in batch)
        raise ShardingError.here(
            f"a batch has entries of shapes {', '.join(map(str, kinds))}",
            why="dimension 0 of each is the rows of the batch",
            fix="pass what has no rows by call=lambda model, *batch: ...",
        )
    return counts.pop()


class Part:
    """The outputs that one device counts: a block, or all on one device.

    outputs: the model's results. whole: their dims that a device needs whole. The others correspond
    in order to the targets' first dims; the smallest target has `rank` dims.
    """

    def __init__(self, outputs: Tensor, whole: Sequence[int], rank: int) -> None:
        lacking = {d % outputs.dim() for d in whole}
        self.dims = [d for d in range(outputs.dim()) if d not in lacking][:rank]
        self.mesh = outputs.device_mesh if isinstance(outputs, DTensor) else None
        self.placements: list[Placement] = []
        self.outputs = outputs
        if isinstance(outputs, DTensor):
            self.placements = [
                p if isinstance(p, Shard) and p.dim in self.dims else Replicate()
                for p in outputs.placements
            ]
            # Dims that targets lack, such as classes, are gathered.
            self.outputs = outputs.redistribute(placements=self.placements).to_local()
        self.shape = outputs.shape

    @property
    def is_counted(self) -> bool:
        """Return whether this device, among all that have the block, counts it."""
        return self.mesh is None or all(
            isinstance(p, Shard) or self.mesh.get_local_rank(i) == 0
            for i, p in enumerate(self.placements)
        )

    def cut(self, target: Tensor) -> Tensor:
        if isinstance(target, DTensor):
            if self.mesh is None:
                return target.full_tensor()
            dims = {out: d for d, out in enumerate(self.dims)}
            placements = [
                Shard(dims[p.dim]) if isinstance(p, Shard) else Replicate() for p in self.placements
            ]
            return target.redistribute(placements=placements).to_local()
        for d, out in enumerate(self.dims[: target.dim()]):
            if target.shape[d] != self.shape[out]:
                raise ShardingError.here(
                    f"dimension {d} of a target of shape {list(target.shape)} does not have the "
                    f"{self.shape[out]} rows of dimension {out} of outputs {list(self.shape)}",
                    fix="name in `whole` the dimensions of the outputs that targets lack",
                )
            target = target.narrow(d, *self._span(out))
        return target

    def _span(self, dim: int) -> tuple[int, int]:
        """Return the block's first row in an output dim, and how many there are."""
        # Several mesh dimensions may divide one dim: each divides the block of those before it.
        begin, count = 0, self.shape[dim]
        for i, placement in enumerate(self.placements):
            if self.mesh is not None and isinstance(placement, Shard) and placement.dim == dim:
                rows = -(-count // self.mesh.size(i))
                skipped = min(rows * self.mesh.get_local_rank(i), count)
                begin, count = begin + skipped, min(rows, count - skipped)
        return begin, count


def real_part(
    outputs: Tensor, targets: Sequence[Tensor], whole: Sequence[int], real: Tensor | None
) -> tuple[Part, list[Tensor]]:
    """Return the outputs and targets that this device counts, without rows that are not real."""
    part = Part(outputs, whole, min((t.dim() for t in targets), default=outputs.dim()))
    tensors = [part.outputs, *(part.cut(t).to(part.outputs.device) for t in targets)]
    if real is not None:
        mask = part.cut(real)
        if not mask.all():
            # Rows are dim 0 of targets, and the output dim that corresponds to it.
            dims = [part.dims[0], *(0 for _ in targets)]
            index = mask.nonzero().flatten()
            tensors = [t.index_select(d, index.to(t.device)) for t, d in zip(tensors, dims)]
    return part, tensors
