"""A step's estimated numbers, as a search compares and extrapolates them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ...comm.hardware import Hardware
from ..report.report import Report

ACCUMULATION = 3  # times a gradient is read or written to add it to other microbatches'


@dataclass(frozen=True)
class Numbers:
    """A step on one device: seconds, and bytes. saved: memory kept for the backward."""

    seconds: float
    memory: float
    sent_bytes: float
    gradients: float
    saved: float

    @classmethod
    def of(cls, report: Report) -> Numbers:
        """Read them from a report."""
        memory = report.memory
        return cls(
            report.estimate.seconds,
            float(memory.peak + memory.optimizer),
            sum(row.sent_bytes for row in report.collectives),
            float(memory.gradients),
            float(memory.saved),
        )

    def towards(self, other: Numbers, share: float) -> Numbers:
        """Return numbers between these and others: 0 is these, 1 the others, 2 twice as far."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Numbers(*(a + share * (b - a) for a, b in pairs))

    def plus(self, other: Numbers, less: Numbers) -> Numbers:
        """Return these with the change from `less` to `other` added."""
        names = [f.name for f in fields(self)]
        change = {n: getattr(other, n) - getattr(less, n) for n in names}
        return Numbers(*(getattr(self, n) + change[n] for n in names))

    def repeated(self, count: int, hardware: Hardware) -> Numbers:
        """Return the numbers for so many microbatches, whose gradients add up."""
        if count == 1:
            return self
        # The first microbatch writes its gradients; each later one adds to them.
        adding = (count - 1) * ACCUMULATION * self.gradients / hardware.memory_bandwidth
        return replace(
            self,
            seconds=count * self.seconds + adding,
            memory=self.memory + self.gradients,
            sent_bytes=count * self.sent_bytes,
        )
