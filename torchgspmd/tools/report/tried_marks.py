"""Marks that a report proposes for values that every device holds whole, and their effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...capture import BUFFER, PARAMETER, Captured
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .report import Report, TriedMark, WholeTensor, mark_largest

TRIES = 3  # marks that are planned for a report
MIN_BYTES = 2**20  # a smaller tensor's mark is not planned
MIN_SHARE = 1 / 64  # nor is a tensor's with a smaller share in the device's peak


def try_marks(
    report: Report, captured: Captured, judge: Callable[[Captured], Report]
) -> tuple[WholeTensor, ...]:
    """Return the tensors that are whole; the largest with the mark that gives the shortest step.

    judge: returns the report for a program with other marks.
    """

    def best(tensor: WholeTensor) -> WholeTensor:
        tried = [
            (mark, _difference(judge(_marked(captured, tensor, mark)), report))
            for mark in _marks(tensor, report.estimate.mesh)
        ]
        mark, change = min(tried, key=lambda pair: (pair[1].seconds, pair[1].memory))
        return replace(tensor, mark=mark, tried=change)

    least = max(MIN_BYTES, MIN_SHARE * report.memory.peak)
    large = [tensor for tensor in report.whole if tensor.bytes >= least][:TRIES]
    return (*map(best, large), *report.whole[len(large) :])


def _marks(tensor: WholeTensor, mesh: Mesh) -> list[str]:
    """Return marks on a tensor's largest dimension along each axis, and the one it has."""
    marks = [mark_largest(tensor.shape, axis) for axis, size in mesh.axes if size > 1]
    return list(dict.fromkeys([tensor.mark, *marks]))


def _marked(captured: Captured, tensor: WholeTensor, mark: str) -> Captured:
    inputs = [
        replace(inp, mark=ShardSpec.parse(mark))
        if inp.kind in (PARAMETER, BUFFER) and tensor.is_like(inp.name, inp.shape)
        else inp
        for inp in captured.inputs
    ]
    return replace(captured, inputs=inputs)


def _difference(new: Report, old: Report) -> TriedMark:
    return TriedMark(
        new.estimate.seconds - old.estimate.seconds,
        new.memory.peak + new.memory.optimizer - old.memory.peak - old.memory.optimizer,
        sum(row.sent_bytes for row in new.collectives)
        - sum(row.sent_bytes for row in old.collectives),
    )
