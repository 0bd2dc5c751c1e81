"""Hardware: how fast a device computes, and how devices are linked. No layout depends on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ShardingError, did_you_mean
from ..layout.mesh import Mesh

GB = 1e9
US = 1e-6
STARTS = 4.0  # How many times as long as its start the largest bucket takes.
BUCKETS = 1.6e6, 400e6  # Bytes that a device sends in the largest bucket: the least, the most.
UNHIDDEN = 25 * 2**20  # The same where it hides behind nothing.
CARD = 25 * GB  # Bytes per second between hosts: of a GPU's network card, with 200 Gb/s,
NETWORK = 1.25 * GB  # and of a host with processes on CPUs, which share it, with 10 Gb/s.


@dataclass(frozen=True)
class Link:
    """A group's links: those within a host, then those between hosts.

    Args:
        devices: How many devices it joins, those that the link before joins included.
        bandwidth: Bytes per second that one device sends over it, in one direction.
        latency: Seconds until a message's first byte arrives.

    Example:
        >>> Link(8, 450e9, 5e-6).bandwidth
        450000000000.0
    """

    devices: float
    bandwidth: float
    latency: float


GroupKey = tuple[str, int] | tuple[str, int, int]


def group_key(links: Sequence[Link], mesh: Mesh, axes: tuple[str, ...], kind: str) -> GroupKey:
    """Return the key of a collective's measured link: kind, size, and members in one host."""
    group = next(iter(mesh.groups(axes)))
    if len(links) == 1:
        return kind, len(group)
    host = links[0].devices
    return kind, len(group), sum(rank // host == group[0] // host for rank in group)


@dataclass(frozen=True)
class Hardware:
    """The speed of one device, and of its links to others, for estimates.

    Args:
        name: The name in reports.
        flops: Matmul operations per second, by bytes per element; 0.5 for four bits.
        memory_bandwidth: Bytes per second that a device reads or writes.
        memory: Bytes on a device.
        links: From the nearest devices to all.
        launch: Seconds to start an operation.
        efficiency: Share of `flops` that matmuls reach.
        beside: Whether devices communicate without their compute units.
        source: Where the numbers are from.
        step: Seconds that a run takes besides its operations.
        groups: Measured links, by collective kind and group size, and where there are several
            links by a group's members in one host; their latency is a whole collective's. Others
            follow from `links`.
        view: Seconds for an operation that moves nothing; on GPUs it costs no device time.
        host_bandwidth: Bytes per second between a device and its host's memory, in one direction.
        attention: Seconds to start an attention, and operations per second that it reaches; None if
            it runs as other matmuls do.
        exponentials: Per second; attention needs one for each pair of tokens.
        units: Processors that share a product's tiles; 0 if it has no tiles.

    Example:
        >>> Hardware.of("h100").memory
        80000000000.0
    """

    name: str
    flops: Mapping[float, float]
    memory_bandwidth: float
    memory: float
    links: tuple[Link, ...]
    launch: float = 5 * US
    efficiency: float = 0.7
    beside: bool = True
    source: str = "ours"
    step: float = 0.0
    groups: Mapping[GroupKey, Link] = field(default_factory=dict)
    view: float = 0.0
    attention: tuple[float, float] | None = None
    host_bandwidth: float = 25 * GB  # PCIe of the fourth generation, 16 lanes
    exponentials: float = math.inf
    units: int = 0

    @property
    def peak(self) -> float:
        """Return the operations per second in bfloat16, to which utilizations refer."""
        return self.rate(2)

    @staticmethod
    def of(name: str | Hardware) -> Hardware:
        """Return the preset with this name.

        Args:
            name: A preset, such as "h100", or a Hardware, which is returned.

        Returns:
            The hardware.

        Raises:
            ShardingError: There is no such preset.

        Example:
            >>> Hardware.of("a100").links[0].devices
            8
        """
        if isinstance(name, Hardware):
            return name
        if name not in PRESETS:
            raise ShardingError.here(
                f"there is no hardware '{name}'", fix=did_you_mean(name, PRESETS)
            )
        return PRESETS[name]

    def link(self, mesh: Mesh, axes: tuple[str, ...], relayed: bool) -> Link:
        """Return the link over which a group along mesh axes communicates, as one device sees it.

        Args:
            mesh: The mesh; a host's devices are neighbours in it.
            axes: The axes that a group runs over.
            relayed: Devices pass received data on: a message crosses to another host once, and
                every device on the host has a share in that.

        Returns:
            A link that joins as many devices as the group has.

        Example:
            >>> mesh = Mesh(data=4, model=8)
            >>> Hardware.of("h100").link(mesh, ("model",), relayed=True).bandwidth
            450000000000.0
            >>> Hardware.of("h100").link(mesh, ("data",), relayed=True).bandwidth
            50000000000.0
        """
        group = next(iter(mesh.groups(axes)))
        bandwidth, latency, inside = math.inf, 0.0, 1
        for link in self.links:
            # The slowest link that a message crosses bounds it; links that add no member are not
            # crossed.
            members = sum(rank // link.devices == group[0] // link.devices for rank in group)
            if members > inside:
                share = inside if relayed else 1
                bandwidth = min(bandwidth, share * link.bandwidth)
                latency = max(latency, link.latency)
            inside = members
        return Link(len(group), bandwidth, latency)

    def transfer_seconds(
        self, mesh: Mesh, axes: tuple[str, ...], kind: str, relayed: bool, sent: float
    ) -> float:
        """Return the seconds that a collective takes.

        Args:
            mesh: The mesh.
            axes: The axes that a group runs over.
            kind: The collective's kind.
            relayed: As for `link`.
            sent: Bytes that one device sends.

        Returns:
            Seconds.

        Example:
            >>> seconds = Hardware.of("h100").transfer_seconds
            >>> round(seconds(Mesh(model=8), ("model",), "all_gather", True, 450e6) * 1e3, 3)
            1.015
        """
        latency, bandwidth = self._start(mesh, axes, kind, relayed)
        return latency + sent / bandwidth

    def bucket_bytes(self, mesh: Mesh, axes: tuple[str, ...], kind: str, relayed: bool) -> float:
        """Return the bytes that a device sends in the largest bucket of collectives.

        They take STARTS times as long as the start of a collective: a larger bucket would save
        little, and let more wait. Where devices send nothing beside computation it is UNHIDDEN.

        Args:
            mesh: The mesh.
            axes: The axes that a group runs over.
            kind: Of the collectives.
            relayed: As for `link`.

        Returns:
            Bytes, from 1.6 to 400 MB.

        Example:
            >>> largest = Hardware.of("h100").bucket_bytes
            >>> round(largest(Mesh(data=8), ("data",), "all_gather", True) / 1e6)
            27
            >>> round(largest(Mesh(data=512), ("data",), "all_gather", True) / 1e6)
            216
        """
        if not self.beside:
            return UNHIDDEN
        latency, bandwidth = self._start(mesh, axes, kind, relayed)
        return min(max(STARTS * latency * bandwidth, BUCKETS[0]), BUCKETS[1])

    def measured(self, mesh: Mesh, axes: tuple[str, ...], kind: str) -> Link | None:
        """Return the link that was measured for a collective; None if none was.

        Args:
            mesh: The mesh.
            axes: The axes that a group runs over.
            kind: The collective's kind.

        Returns:
            The link, whose latency is the whole collective's.

        Example:
            >>> Hardware.of("h100").measured(Mesh(data=8), ("data",), "all_gather")
        """
        if not self.groups:
            return None
        exact = self.groups.get(group_key(self.links, mesh, axes, kind))
        return self.groups.get((kind, mesh.count(axes))) if exact is None else exact

    def _start(
        self, mesh: Mesh, axes: tuple[str, ...], kind: str, relayed: bool
    ) -> tuple[float, float]:
        """Return the latency and bandwidth of a whole collective."""
        if (measured := self.measured(mesh, axes, kind)) is not None:
            return measured.latency, measured.bandwidth
        link = self.link(mesh, axes, relayed)
        # A tree of messages has log2(n) levels; no group is faster than a pair.
        return link.latency * math.ceil(math.log2(max(link.devices, 2))), link.bandwidth

    def product_seconds(self, flops: float, itemsize: float) -> float:
        """Return the seconds that matmuls take.

        Args:
            flops: Operations.
            itemsize: Bytes per element.

        Returns:
            Seconds.

        Example:
            >>> round(Hardware.of("h100").product_seconds(1e12, 2) * 1e3, 2)
            1.44
        """
        return flops / (self.efficiency * self.rate(itemsize))

    def rate(self, itemsize: float) -> float:
        """Return operations per second for an element size: the rate of the next wider one.

        Elements wider than all of these compute as the widest.

        Args:
            itemsize: Bytes per element.

        Returns:
            Operations per second.

        Example:
            >>> Hardware.of("tpu_v4").rate(1) == Hardware.of("tpu_v4").rate(2)
            True
        """
        # Narrower types without units of their own are computed in the next wider one.
        wider = [size for size in self.flops if size >= itemsize]
        return self.flops[min(wider, default=max(self.flops))]


def _gpu(
    name: str,
    flops: dict[float, float],
    memory: tuple[float, float],
    links: tuple,
    host_bandwidth: float = 50 * GB,  # PCIe 5
    joined: int = 8,
    exponentials: float = math.inf,
    units: int = 0,
    source: str = "NVIDIA's data sheets of the SXM module and of the DGX host",
) -> Hardware:
    """Return a GPU. joined: how many its fast links join, as a rule those of a host."""
    inside, across = links
    return Hardware(
        name,
        flops,
        memory[0],
        memory[1],
        (Link(joined, inside, 5 * US), Link(math.inf, across, 15 * US)),
        host_bandwidth=host_bandwidth,
        exponentials=exponentials,
        units=units,
        source=f"{source}; latencies are ours",
    )


def _tpu(
    name: str,
    flops: float,
    memory: tuple[float, float],
    link: float,
    text: str,
    float8: float | None = None,
) -> Hardware:
    """Return a TPU whose torus sends both ways along one dimension at once."""
    return Hardware(
        name,
        {1: float8 or flops, 2: flops, 4: flops / 6},  # f32 products take six passes of bf16
        memory[0],
        memory[1],
        (Link(math.inf, link, 2 * US),),
        launch=1 * US,
        source=text,
    )


# By compute capability: multiprocessors x 16 a clock (CUDA programming guide, table of arithmetic
# instructions; twice as many on 10.3, NVIDIA's data sheet) x the boost clock.
_EXP = {9: 132 * 16 * 1.755e9, 10: 148 * 16 * 1.85e9}
_CLOUD = "Google Cloud's documentation of the version; latencies are ours"
# Round numbers for a GPU and for one core: the scheduler places collectives by these.
GPU = Hardware(
    "gpu", {2: 5e14, 4: 5e13, 8: 3e13}, 3e12, 80 * GB, (Link(math.inf, 2e11, 1e-5),), efficiency=1.0
)
CPU = Hardware(
    "cpu",
    {2: 5e10, 4: 5e10, 8: 2.5e10},
    1e10,
    8 * GB,
    (Link(math.inf, 1e9, 1e-4),),
    efficiency=1.0,
    beside=False,  # the threads of gloo need cores too
    host_bandwidth=5 * GB,  # a copy reads and writes the same memory
)
PRESETS = {
    hardware.name: hardware
    for hardware in (
        _gpu(
            "a100",
            {2: 312e12, 4: 19.5e12, 8: 19.5e12},
            (2039 * GB, 80 * GB),
            (300 * GB, 25 * GB),
            25 * GB,
        ),
        *(
            _gpu(
                name,
                {1: 1979e12, 2: 989e12, 4: 67e12, 8: 67e12},
                (bandwidth * GB, memory * GB),
                (450 * GB, 50 * GB),
                exponentials=_EXP[9],
                units=132,
            )
            for name, bandwidth, memory in (("h100", 3350, 80), ("h200", 4800, 141))
        ),
        _gpu(
            "b200",
            {0.5: 9000e12, 1: 4500e12, 2: 2250e12, 4: 75e12, 8: 37e12},
            (7700 * GB, 180 * GB),
            (900 * GB, 50 * GB),
            exponentials=_EXP[10],
            units=148,
        ),
        _gpu(
            "gb200",
            {0.5: 10000e12, 1: 5000e12, 2: 2500e12, 4: 80e12, 8: 40e12},
            (8000 * GB, 186 * GB),
            (900 * GB, 50 * GB),
            225 * GB,  # two share the link to their Grace CPU
            joined=72,
            exponentials=_EXP[10],
            units=148,
            source="NVIDIA's data sheet of the GB200 NVL72, without sparsity; quoted from memory",
        ),
        _gpu(
            "b300",
            {0.5: 13500e12, 1: 4500e12, 2: 2250e12, 4: 75e12, 8: 1.2e12},
            (8000 * GB, 270 * GB),
            (900 * GB, 100 * GB),  # ConnectX-8
            100 * GB,
            exponentials=2 * _EXP[10],
            source="NVIDIA's data sheet of the DGX B300, without sparsity; quoted from memory",
        ),
        _gpu(
            "gb300",
            {0.5: 15000e12, 1: 5000e12, 2: 2500e12, 4: 80e12, 8: 1.4e12},
            (8000 * GB, 279 * GB),
            (900 * GB, 100 * GB),  # ConnectX-8
            225 * GB,
            joined=72,
            exponentials=2 * _EXP[10],
            source="NVIDIA's data sheet of the GB300 NVL72, without sparsity; quoted from memory",
        ),
        _gpu(
            "mi300x",
            {2: 1307e12, 4: 163e12, 8: 163e12},
            (5300 * GB, 192 * GB),
            (448 * GB, 50 * GB),  # seven links of 64 GB/s, one to each of the others
            source="AMD's data sheet of the MI300X, quoted from memory; a 400 Gb/s card for each",
        ),
        _gpu(
            "mi355x",
            {0.5: 10066e12, 1: 5033e12, 2: 2516e12, 4: 157e12, 8: 79e12},
            (8000 * GB, 288 * GB),
            (538 * GB, 50 * GB),  # seven links of 76.8 GB/s
            source="AMD's data sheet of the MI355X, quoted from memory; a 400 Gb/s card for each",
        ),
        _tpu(
            "tpu_v3",
            61.5e12,
            (450 * GB, 16 * GB),
            82 * GB,
            "one of two cores of a chip; Jouppi et al., CACM 63(7), 2020; latencies are ours",
        ),
        _tpu("tpu_v4", 275e12, (1228 * GB, 32 * GB), 100 * GB, _CLOUD),
        _tpu("tpu_v5p", 459e12, (2765 * GB, 95 * GB), 200 * GB, _CLOUD),
        _tpu("tpu_v6e", 918e12, (1638 * GB, 32 * GB), 224 * GB, _CLOUD),  # 3,584 Gb/s, four links
        _tpu("tpu_v7x", 2307e12, (7380 * GB, 192 * GB), 400 * GB, _CLOUD, 4614e12),
        GPU,
        CPU,
    )
}
PRESETS["cpu_gloo"] = CPU


def hardware_of(device: str, hosts: int = 0) -> Hardware:
    """Return the round numbers for a device type.

    Args:
        device: A torch device type. "meta" stands for GPUs.
        hosts: The devices on a host, if there are several hosts; else 0.

    Returns:
        The hardware.

    Example:
        >>> hardware_of("meta").name
        'gpu'
        >>> [link.devices for link in hardware_of("cuda", hosts=8).links]
        [8, inf]
    """
    found = CPU if device == "cpu" else GPU
    if not hosts:
        return found
    (inside,), across = found.links, NETWORK / hosts if found is CPU else CARD
    links = replace(inside, devices=hosts), Link(math.inf, across, 2 * inside.latency)
    return replace(found, links=links)
