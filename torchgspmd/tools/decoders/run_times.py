"""Seconds and bytes of some layers of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerTimes:
    """Some layers' seconds of the device and of the host, and bytes for the backward.

    experts, host_experts: the forward's share from the first grouped product to the last. sent:
    bytes that the device sends. products: the model's operations, a device's share.
    """

    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    experts: float = 0.0
    host_experts: float = 0.0
    saved: float = 0.0
    sent: float = 0.0
    products: float = 0.0

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return LayerTimes(*(a + b for a, b in zip(self.values, other.values)))

    def times(self, count: float) -> LayerTimes:
        return LayerTimes(*(a * count for a in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        # Not astuple, which copies deeply: a search adds many.
        return tuple(vars(self).values())

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def launched(self) -> LayerTimes:
        """Return them where the host is no faster than it is.

        The host reads how many rows each expert has before it starts their products: it cannot
        start them beside earlier work (Megatron's experts.py, tokens_per_expert.tolist()).
        """
        rest = max(self.forward - self.experts, self.host_forward - self.host_experts)
        return replace(
            self,
            forward=rest + max(self.experts, self.host_experts),
            backward=max(self.backward, self.host_backward),
        )


@dataclass(frozen=True)
class KeptValue:
    """A value that is kept for the backward, or computed again. size: bytes."""

    size: float
    seconds: float
    module: str

    def times(self, count: float) -> KeptValue:
        return replace(self, size=self.size * count, seconds=self.seconds * count)
