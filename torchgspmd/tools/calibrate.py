"""calibrate: measure the devices and links at hand, so that estimates fit them.

Small models with whole weights give one device's speed while all devices work. Their step times are
fitted by product operations, other operations' bytes, and a launch for each operation. Further
terms are constants for an attention, for its operations and for a step. Collectives are timed in
two sizes: exchanges inside hosts and between them, and each kind over each axis and over all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.gloo_rewriter import PIECES
from ..comm.hardware import Hardware, Link, group_key, hardware_of
from ..comm.hosts import devices_of_a_host
from ..comm.kinds import KINDS, CollectiveKind, all_gather, all_reduce, all_to_all, reduce_scatter
from ..comm.process_groups import ProcessGroups, groups_of
from ..compat.operators import c10d
from ..compat.private_apis import OpOverload
from ..compiler.plan import Plan
from ..errors import ShardingError
from ..fx_passes.lower.lower_collectives import CollectiveOfAnySize
from ..fx_passes.schedule.arithmetic import flops, is_attention, traffic
from ..layout.layout_rules import mesh_of
from ..layout.mesh import Mesh
from ..layout.spec_notation import Axes
from ..runtime.parallelize import parallelize

# Models (rows, width, layers). Launches grow with the layers, the rest of a step does not.
SHAPES = ((16, 16, 1), (16, 16, 8), (64, 64, 4), (256, 128, 2), (512, 256, 2), (1024, 256, 1))
SEQUENCES = ((8, 32, 16), (32, 64, 16), (32, 128, 32))  # attentions (heads, length, width)
ROWS = ((64, 256), (512, 256), (512, 1024))  # models (rows, width) without products
DTYPES = (torch.float64, torch.bfloat16)  # products in these are compared with float32
SIDES = (8, 1024)  # square tensors that are sent, and those between hosts
# A switch lets the first bytes pass at once: both large sizes have them.
BETWEEN = (8, 512, 768)
PRIOR = 0.3  # weight for a coefficient measured alone, beside a model
RANGE = 0.4, 4.0  # bounds for a coefficient, over its value measured alone
SECONDS = 0.2  # the least time for each measurement


def calibrate(mesh: Mesh | DeviceMesh | None = None) -> Hardware:
    """Measure the processes at hand. Call it identically on every rank; all get the same.

    It takes some seconds. The current accelerator is measured if the process group is not gloo's.

    Args:
        mesh: The devices; collectives are measured over each axis, and over all. By default one
            axis over all processes.

    Returns:
        A Hardware for plan.estimate, plan.report and suggest.

    Raises:
        ShardingError: There is no process group with one process per device.

    Example:
        >>> import torch.distributed as dist  # here one process; under torchrun one a device
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> calibrate().product_seconds(1e9, 4) > 0
        True
        >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise ShardingError.here(
            "there is no process group to measure",
            fix="call torch.distributed.init_process_group() first, under torchrun",
        )
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    with torch.random.fork_rng():  # drawing the models' weights must not move the user's generator
        return _Calibration(mesh_of(mesh or Mesh(data=dist.get_world_size())), str(device)).run()


class _Model(nn.Module):
    """Layers with a norm and two products, then a softmax."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x.log_softmax(-1).square().mean()


class _Pointwise(nn.Module):
    """Norms, activations and a softmax, without products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + nn.functional.gelu(self.norm(x))
        return x.log_softmax(-1).square().mean()


class _Attention(nn.Module):
    """Causal attentions over a tensor that is scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q = x * self.scale
            x = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x.square().mean()


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).sum().backward()


def _input(size: int, width: int) -> Tensor:
    """Return a tensor that is the same on all ranks."""
    return torch.linspace(-1, 1, size * width).view(size, width)


class _Calibration:
    """Measures one mesh."""

    def __init__(self, mesh: Mesh, device: str) -> None:
        self.mesh, self.device = mesh, device
        self.view = 0.0  # a view's share in a launch
        self.groups: ProcessGroups = groups_of(mesh, torch.device(device).type)

    def run(self) -> Hardware:
        links = self._links()  # first, as it finds the hosts, by which collectives get their forms
        launch, step, product, moved, attention, score = self._device()
        groups = {
            group_key(links, self.mesh, axes, kind): link
            for axes in self._axes(links)
            for kind, link in self._collectives(axes)
        }
        return Hardware(
            f"{self.mesh.size} processes of {self.device}",
            {4: 1 / product, **self._other_products(1 / product)},
            1 / moved,
            hardware_of(self.device).memory,
            links,
            launch=launch,
            efficiency=1.0,
            beside=self.device != "cpu",
            source="measured by calibrate",
            step=step,
            groups=groups,
            view=launch * self.view if self.device == "cpu" else 0.0,
            attention=(attention, 1 / score),
        )

    def _device(self) -> tuple[float, ...]:
        """Return seconds for: a launch, a step, a product operation, a byte moved, the start of an
        attention, and an operation in it.
        """
        alone, rows, seconds = self._alone(), [], []
        models: list[tuple[nn.Module, Tensor]] = [
            *((_Model(width, layers), _input(size, width)) for size, width, layers in SHAPES),
            *((_Pointwise(width), _input(size, width)) for size, width in ROWS),
            *((_Attention(n[-1]), _input(n[0] * n[1], n[2]).view(1, *n)) for n in SEQUENCES),
        ]
        for model, x in models:
            specs = " ".join("_" * x.dim())  # each device computes the whole model
            module = parallelize(model.to(self.device), self.mesh, in_specs=specs)
            x = x.to(self.device)
            seconds.append(self._time(lambda module=module, x=x: _step(module, x)))
            rows.append(_work(cast(Plan, module.plan), self.view))
        fit = _fit(rows, seconds, alone)
        return tuple(map(self._most, fit))  # the last bit of a fit may differ between processes

    def _alone(self) -> tuple[float, ...]:
        """Return the same, each measured by itself. A view takes `view` of a launch."""
        small, large, square = (
            _input(*n).to(self.device) for n in ((2, 4), (512, 1024), (256, 256))
        )
        launch = self._time(lambda: [small + 1 for _ in range(100)]) / 100
        view = self._time(lambda: [small.view(8) for _ in range(100)]) / 100
        self.view = view / launch if self.device == "cpu" else 0.0
        empty = parallelize(nn.Linear(2, 2).to(self.device), self.mesh, in_specs="_ _")
        step = self._time(lambda x=_input(2, 2).to(self.device): _step(empty, x))
        product = self._time(lambda: square @ square) / (2 * 256**3)
        mixed = self._time(lambda: nn.functional.gelu(large + large)) / (5 * large.nbytes)
        begin, end = (self._attention_seconds(*n) for n in (SEQUENCES[0], SEQUENCES[-1]))
        score = max(end[0] - begin[0], 0.1 * end[0]) / (end[1] - begin[1])
        return launch, step, product, mixed, begin[0], score

    def _attention_seconds(self, heads: int, length: int, width: int) -> tuple[float, float]:
        """Return the seconds an attention takes without backward, and its operations."""
        x = _input(heads * length, width).view(1, heads, length, width).to(self.device)
        attend = nn.functional.scaled_dot_product_attention
        return self._time(lambda: attend(x, x, x, is_causal=True)), 4 * x.numel() * length

    def _other_products(self, rate: float) -> dict[int, float]:
        """Return operations per second in other dtypes, by bytes per element."""
        times = {}
        for dtype in (torch.float32, *DTYPES):
            x = torch.randn(256, 256, device=self.device).to(dtype)
            times[dtype] = self._time(lambda x=x: x @ x)
        return {d.itemsize: rate * times[torch.float32] / times[d] for d in DTYPES}

    def _links(self) -> tuple[Link, ...]:
        """Return the links inside a host, if it has several devices, and those between hosts.

        Exchanges in pieces use both directions of a link. Devices of a host send at once.
        """
        each, ranks, me = devices_of_a_host(self.groups), [*range(self.mesh.size)], self.groups.rank
        levels = {math.inf: ranks}
        if each:
            host = me - me % each
            levels = {each: ranks[host : host + each], math.inf: ranks[me % each :: each]}
        return tuple(self._level(devices, group) for devices, group in levels.items())

    def _level(self, devices: float, ranks: list[int]) -> Link:
        """Return the link that a group communicates over. devices: see Link."""
        if len(ranks) == 1:
            return Link(devices, math.inf, 0.0)
        whole = len(ranks) == self.mesh.size
        name = self.groups.group(self.mesh.names)[0] if whole else self.groups.name_of(ranks)
        rows, op = [1] * len(ranks), c10d.all_to_all_single.default

        def run(x: Tensor) -> None:
            begun = [op(piece.view(len(ranks), -1), rows, rows, name) for piece in x.chunk(PIECES)]
            for piece in begun:
                c10d.wait_tensor.default(piece)

        bandwidth, latency = self._line(
            run,
            lambda x: all_to_all.sent(x.nbytes, len(ranks)),
            PIECES * len(ranks),
            BETWEEN,
        )
        # A collective's latency counts once for each doubling of its group.
        return Link(devices, bandwidth, latency / math.ceil(math.log2(len(ranks))))

    def _axes(self, links: Sequence[Link]) -> list[Axes]:
        """Return the axes over which collectives are measured: one for each key of a group."""
        choices = [(name,) for name in self.mesh.names] + [self.mesh.names]
        by_key = {group_key(links, self.mesh, axes, ""): axes for axes in choices}
        return [axes for axes in by_key.values() if self.mesh.count(axes) > 1]

    def _collectives(self, axes: Axes) -> list[tuple[str, Link]]:
        """Return each kind's link over some axes. Kinds that are sent alike have one link."""
        text, count = "+".join(axes), self.mesh.count(axes)
        links = {
            kind.name: self._link(kind, arguments, count)
            for kind, arguments in (
                (all_reduce, ("sum", text)),
                (all_gather, (0, text)),
                (reduce_scatter, ("sum", 0, text)),
                (all_to_all, (0, 1, text)),
            )
        }
        by_wire = {w.op: link for kind, link in links.items() for w in _wire(KINDS[kind])}
        for name, kind in KINDS.items():
            for wire in _wire(kind):
                links.setdefault(name, by_wire[wire.op])
        return [*links.items()]

    def _link(self, kind: CollectiveKind, arguments: tuple[object, ...], count: int) -> Link:
        run = CollectiveOfAnySize(kind.name, self.groups, torch.float32)
        # A gather is measured by its result, all others by their operand.
        copies = count if kind.gathers else 1
        return Link(
            count,
            *self._line(
                lambda x: run(x, *arguments),
                lambda x: kind.sent(x.nbytes * copies, count),
                count,
                BETWEEN if len({*(self.groups.hosts or ())}) > 1 else (),
            ),
        )

    def _line(
        self,
        run: Callable[[Tensor], object],
        sent: Callable[[Tensor], float],
        multiple: int = 1,
        sides: Sequence[int] = (),
    ) -> tuple[float, float]:
        """Return a collective's bytes per second and latency, by the largest sizes and the least.

        sent: bytes, by operand. multiple: divides the operand's sides. sides: BETWEEN or SIDES.
        """
        points, size = [], 0
        seconds = (5 if sides else 1) * SECONDS  # of a slow link each takes long
        for side in sides or SIDES:
            size = max(-(-side // multiple), size + 1)
            # Zeros would have no pages of their own.
            x = _input(size * multiple, size * multiple).to(self.device)
            points.append((sent(x), self._time(lambda x=x: run(x), seconds)))
        (less, second), (most, third) = points[-2:]
        few, first = points[0]
        whole = (third - first) / (most - few)
        # The sizes of a fast link are near each other in time: noise must not hide the larger one.
        slope = max((third - second) / (most - less), whole / 2, 1e-15)
        return 1 / slope, max(first - few * slope, 0.0)

    def _time(self, run: Callable[[], object], seconds: float = SECONDS) -> float:
        """Return a call's median seconds, each until the slowest device is through.

        Where devices take turns on few cores, it is another one each time. seconds: how long it is
        repeated at least.
        """
        for _ in range(2):
            run()
        once = max(self._once(run), 1e-6)
        # Seconds on a slow link are alike: three calls will do.
        repeats = min(max(3, int(self._most(seconds / once))), 200)
        times = [self._once(run) for _ in range(repeats)]
        return statistics.median(self._slowest(times))

    def _once(self, run: Callable[[], object]) -> float:
        """Return the seconds that one call takes which all devices begin together."""
        dist.barrier()
        start = time.perf_counter()
        run()
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    def _most(self, value: float) -> float:
        """Return the largest value that any device has."""
        return self._slowest([value])[0]

    def _slowest(self, values: list[float]) -> list[float]:
        """Return the largest that any device has, number by number."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.groups.checked_on)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()


def _wire(kind: object) -> Sequence[Any]:
    return kind.wire if isinstance(kind, CollectiveKind) else ()


def _work(plan: Plan, view: float) -> tuple[float, ...]:
    """Return a program's launches, 1, product operations, bytes that others move, attentions and
    their operations. view: the share of a launch that a view takes.
    """
    launches = products = moved = attentions = scores = 0.0
    for node in plan.program.graph.nodes:
        count, size = flops(node, plan.mesh), traffic(node)
        if is_attention(node):
            attentions, scores = attentions + 1, scores + count
            continue
        launches += 1 if count or size else view * isinstance(node.target, OpOverload)
        products += count
        moved += 0 if count else size
    return launches, 1.0, products, moved, attentions, scores


def _fit(
    rows: Sequence[tuple[float, ...]], seconds: Sequence[float], alone: Sequence[float]
) -> tuple[float, ...]:
    """Return coefficients that give the rows' seconds, and are near those measured alone.

    They minimize the sum of squared relative errors, within RANGE of those.
    """
    scale = torch.tensor(alone, dtype=torch.float64)
    models = torch.tensor(rows, dtype=torch.float64) * scale / torch.tensor(seconds)[:, None]
    matrix = torch.cat([models, PRIOR * torch.eye(len(alone), dtype=torch.float64)])
    ones = torch.cat([torch.ones(len(rows)), torch.full((len(alone),), PRIOR)]).double()
    factors, free = torch.ones(len(alone), dtype=torch.float64), [*range(len(alone))]
    while free:  # until all are within; coefficients outside stay at their bound
        fixed = [i for i in range(len(alone)) if i not in free]
        rest = ones - matrix[:, fixed] @ factors[fixed]
        factors[free] = torch.linalg.lstsq(matrix[:, free], rest[:, None]).solution.flatten()
        within = [i for i in free if RANGE[0] <= factors[i] <= RANGE[1]]
        factors = factors.clamp(*RANGE)
        if within == free:
            break
        free = within
    return tuple((factors * scale).tolist())
