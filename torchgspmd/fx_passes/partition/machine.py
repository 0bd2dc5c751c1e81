"""What the devices can do that a program is for: decides how it communicates, not what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a device can do, in round numbers."""

    flops: dict[int, float]  # operations a second, by the bytes of an element
    bandwidth: float  # bytes a second that a device sends
    memory: float  # bytes a second that it reads or writes
    begin: float  # seconds to begin a communication
    beside: bool  # whether it communicates without help of what computes


GPU = Machine({2: 5e14, 4: 5e13, 8: 3e13}, 2e11, 3e12, 1e-5, True)  # an H100 on NVLink
CPU = Machine(
    {2: 5e10, 4: 5e10, 8: 2.5e10}, 1e9, 1e10, 1e-4, False
)  # a core; gloo's threads need cores too


def machine_of(device: str) -> Machine:
    """device: the type of those that the program is for; "meta" for any, which is taken for GPUs."""
    return CPU if device == "cpu" else GPU
