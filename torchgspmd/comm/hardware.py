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
        deep: Share of `flops` that a framework's products reach, if their sums are deep.

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
    deep: float = 0.725  # DeepGEMM's README, FP8 on an H800

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


# By compute capability: multiprocessors x 16 a clock (CUDA programming guide, table of arithmetic
# instructions; twice as many on 10.3, NVIDIA's data sheet) x the boost clock.
_EXP = {9: 132 * 16 * 1.755e9, 10: 148 * 16 * 1.85e9}
# TransformerEngine's docs, examples/gemm_profiling: a layer's products in bfloat16 and FP8 take
# 19.9 ms on a B300; 0.725 would give 19.3. Its data sheet's float32 rate is that of 148 units, too.
_SM100 = {"exponentials": _EXP[10], "units": 148, "deep": 0.70}
_SM103 = {**_SM100, "exponentials": 2 * _EXP[10]}
_SXM = "NVIDIA's data sheets of the SXM module and of the DGX host"
_NVL72 = "NVIDIA's data sheet of the {} NVL72, without sparsity; quoted from memory"
_OF_B300 = _NVL72.replace("{} NVL72", "DGX B300")
_AMD = "AMD's data sheet of the {}, quoted from memory; a 400 Gb/s card for each"
_CLOUD = "Google Cloud's documentation of the version; latencies are ours"


def _gpu(
    name: str,
    teraflops: Mapping[float, float],
    memory: tuple[float, float],
    links: tuple[float, float, float],
    exponentials: float = math.inf,
    units: int = 0,
    joined: int = 8,
    source: str = _SXM,
    deep: float = 0.725,
) -> Hardware:
    """Return a GPU.

    memory: GB/s, GB. links: GB/s to GPUs that fast links join, to other hosts, to the host.
    """
    inside, across, host = (rate * GB for rate in links)
    return Hardware(
        name,
        {size: rate * 1e12 for size, rate in teraflops.items()},
        memory[0] * GB,
        memory[1] * GB,
        (Link(joined, inside, 5 * US), Link(math.inf, across, 15 * US)),
        host_bandwidth=host,
        exponentials=exponentials,
        units=units,
        deep=deep,
        source=f"{source.format(name.upper())}; latencies are ours",
    )


def _tpu(
    name: str, flops: float, memory: tuple[float, float], link: float, float8: float = 0
) -> Hardware:
    """Return a TPU whose torus sends both ways along one dimension at once."""
    return Hardware(
        name,
        {1: float8 or flops, 2: flops, 4: flops / 6},  # f32 products take six passes of bf16
        memory[0] * GB,
        memory[1] * GB,
        (Link(math.inf, link * GB, 2 * US),),
        launch=1 * US,
        source=_CLOUD,
    )


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
_HOPPER: dict[float, float] = {1: 1979, 2: 989, 4: 67, 8: 67}
_B200 = {0.5: 9000, 1: 4500, 2: 2250, 4: 75, 8: 37}
_GB200 = {0.5: 10000, 1: 5000, 2: 2500, 4: 80, 8: 40}
_B300 = {0.5: 13500, 1: 4500, 2: 2250, 4: 75, 8: 1.2}
_GB300 = {0.5: 15000, 1: 5000, 2: 2500, 4: 80, 8: 1.4}
_MI355X = {0.5: 10066, 1: 5033, 2: 2516, 4: 157, 8: 79}
_JOUPPI = "one of two cores of a chip; Jouppi et al., CACM 63(7), 2020; latencies are ours"
# 50 GB/s to the host are PCIe 5. On GB200 and GB300 two share the link to their Grace CPU. 100 GB/s
# to other hosts are ConnectX-8. MI300X and MI355X: seven links of 64 or 76.8 GB/s, one to each of
# the others. TPU v6e: four links of 3,584 Gb/s in all.
PRESETS = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100", {2: 312, 4: 19.5, 8: 19.5}, (2039, 80), (300, 25, 25)),
        _gpu("h100", _HOPPER, (3350, 80), (450, 50, 50), _EXP[9], 132),
        _gpu("h200", _HOPPER, (4800, 141), (450, 50, 50), _EXP[9], 132),
        _gpu("b200", _B200, (7700, 180), (900, 50, 50), **_SM100),
        _gpu("gb200", _GB200, (8000, 186), (900, 50, 225), joined=72, source=_NVL72, **_SM100),
        _gpu("b300", _B300, (8000, 270), (900, 100, 100), source=_OF_B300, **_SM103),
        _gpu("gb300", _GB300, (8000, 279), (900, 100, 225), joined=72, source=_NVL72, **_SM103),
        _gpu("mi300x", {2: 1307, 4: 163, 8: 163}, (5300, 192), (448, 50, 50), source=_AMD),
        _gpu("mi355x", _MI355X, (8000, 288), (538, 50, 50), source=_AMD),
        replace(_tpu("tpu_v3", 61.5e12, (450, 16), 82), source=_JOUPPI),
        _tpu("tpu_v4", 275e12, (1228, 32), 100),
        _tpu("tpu_v5p", 459e12, (2765, 95), 200),
        _tpu("tpu_v6e", 918e12, (1638, 32), 224),
        _tpu("tpu_v7x", 2307e12, (7380, 192), 400, float8=4614e12),
        GPU,
        CPU,
    )
}
PRESETS["cpu_gloo"] = CPU


def hardware_of(device: str, hosts: int = 0) -> Hardware:
    """Return the round numbers for a device type; "meta" stands for GPUs.

    hosts: the devices on a host, if there are several hosts; else 0.
    """
    found = CPU if device == "cpu" else GPU
    if not hosts:
        return found
    (inside,), across = found.links, NETWORK / hosts if found is CPU else CARD
    links = replace(inside, devices=hosts), Link(math.inf, across, 2 * inside.latency)
    return replace(found, links=links)
