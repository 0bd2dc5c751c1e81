"""The speed of the devices that a program is for. It decides how they communicate, not what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The speed of a device, in round numbers."""

    flops: dict[int, float]  # operations per second, by bytes of an element
    bandwidth: float  # bytes per second that a device sends
    memory: float  # bytes per second that it reads or writes
    begin: float  # seconds to start a collective
    beside: bool  # whether it communicates without help of its compute units


# An H100 on NVLink.
GPU = Machine({2: 5e14, 4: 5e13, 8: 3e13}, 2e11, 3e12, 1e-5, True)
# One core; the threads of gloo need cores too.
CPU = Machine({2: 5e10, 4: 5e10, 8: 2.5e10}, 1e9, 1e10, 1e-4, False)


def machine_of(device: str) -> Machine:
    """Return the machine for a device type. "meta" stands for GPUs."""
    return CPU if device == "cpu" else GPU
