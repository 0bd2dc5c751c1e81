"""The lines that debug prints: one value on a rank each, and the stops between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.prints import Breakpoint, LocalValue
from ..compiler.api import Plan
from ..errors import ShardingError, did_you_mean
from ..fx_passes.ir import other_shapes
from ..fx_passes.lower.verify_in_flight import STARTS
from ..fx_passes.printer import call_text, dtype_name, type_text
from ..shard_spec import ShardSpec
from .comparison import denoted


class ShownValues:
    """Prints one rank's values as a program computes them.

    graphs: a device's program; or its forward and its backward.
    """

    def __init__(
        self, graphs: Sequence[fx.Graph], plan: Plan, stops: Sequence[str], rank: int
    ) -> None:
        self.plan, self.rank, self.first = plan, rank, next(iter(graphs[0].nodes))
        self.wholes = {node.name: node for node in plan.captured.graph.nodes}
        nodes = [node for graph in graphs for node in graph.nodes]
        self.rows = {node: None for node in nodes if _is_row(node, graphs[0])}  # in their order
        self.names = _names(nodes, self.rows)
        self.width = max((len(self.names[node]) for node in self.rows), default=0)
        self.stops = {node for each in stops for node in self._nodes_of(each)}
        self.known = {name for node in self.rows if (name := denoted(node))}
        self.wanted = {name for each in plan.captured.breakpoints for name in each.values()}

    def operands(self, node: fx.Node, value_of: Callable[[fx.Node], object]) -> dict[str, object]:
        """Copy the operands of a node that a stop shows; the node may overwrite them."""
        if node not in self.stops:
            return {}
        return {self.names[each]: _kept(value_of(each)) for each in node.all_input_nodes}

    def see(self, node: fx.Node, value: object, operands: Mapping[str, object]) -> None:
        """Print a value, and stop where a stop is."""
        # Calls are not announced: a run begins when its first node is seen.
        if node is self.first:
            self._begin()
        if node not in self.names or not isinstance(value, (Tensor, tuple, list)):
            return
        if node in self.rows:
            self._print(node, value)
        name = denoted(node)
        if name is not None and name in self.wanted and name not in self.values:
            self.values[name], self.specs[name] = _kept(value), node.meta["spec"]
        if node in self.stops:
            self._stop(node, value, operands)
        # A breakpoint() stops once all its variables have values.
        while self.waiting and self.waiting[0].values() & self.known <= self.values.keys():
            self._stop_in_forward(self.waiting.pop(0))

    def _begin(self) -> None:
        mesh = self.plan.mesh
        place = " ".join(f"{k}={v}" for k, v in mesh.coordinates(self.rank).items())
        print(f"rank {self.rank} of {mesh.size}: {place}")
        self.values, self.specs = dict[str, object](), dict[str, ShardSpec]()
        self.phase, self.place = "", ("", "")
        self.waiting = [*self.plan.captured.breakpoints]

    def _print(self, node: fx.Node, value: Any) -> None:
        self._print_place(node)
        text = node.meta.get("collective") or call_text(node, self.names)
        name = f"%{self.names[node]}"
        if isinstance(value, Tensor):
            line = f"{self._type(node, value)} = {text}  {_range(self._own(node, value))}"
        else:
            kinds = [dtype_name(t.dtype) + str([*t.shape]) for t in value if isinstance(t, Tensor)]
            line = f"({'; '.join(kinds)}) = {text}"
        print(f"    {name:{self.width + 1}} : {line}")

    def _print_place(self, node: fx.Node) -> None:
        """Print a node's phase, module and line, if they are others than before."""
        if node.op != "placeholder" and "source" not in node.meta:  # a pass has put it here
            return
        phase = "backward" if node.meta["backward"] else "forward"
        phase = "inputs" if node.graph is self.first.graph and node.op == "placeholder" else phase
        place = _module_of(node), node.meta["source"] or ""
        if phase != self.phase:
            self.phase, self.place = phase, ("", "")
            print(phase)
        if place != self.place and any(place):
            self.place = place
            print("  " + "  ".join(filter(None, place)))

    def _type(self, node: fx.Node, value: Tensor) -> str:
        """Return a shard's type, and the whole value's if it is another."""
        spec, own = node.meta.get("spec"), type_text(value.dtype, value.shape, None)
        if (
            spec is None
            or not (spec.sharding_axes or spec.pending)
            or len(spec.dims) != value.dim()
        ):
            return own
        whole, other = self._whole(node) or (["?"] * value.dim(),) * 2
        text = type_text(value.dtype, whole, spec, other)
        return f"{own} of {text[len(dtype_name(value.dtype)) :]}"

    def _whole(self, node: fx.Node) -> tuple[Any, Any] | None:
        """Return the whole value's shape, and one that differs in sizes that only a run knows."""
        captured, spec = self.wholes.get(node.meta.get("captured", "")), node.meta.get("spec")
        val = None if captured is None else captured.meta.get("val")
        if captured is None or not isinstance(val, Tensor) or spec is None or spec.windows:
            return None
        return (val.shape, other_shapes(captured)[0]) if val.dim() == len(spec.dims) else None

    def _own(self, node: fx.Node, value: Tensor) -> Tensor:
        """Return a shard without its padding, if the whole value's size is known."""
        known = self._whole(node)
        if known is None or known[0] != known[1] or len(known[0]) != value.dim():
            return value
        coordinates, mesh = self.plan.mesh.coordinates(self.rank), self.plan.mesh
        for dim, axes in enumerate(node.meta["spec"].dims):
            rows = value.shape[dim]
            # Padding is behind the last rows, so a late shard may have none of the whole.
            left = max(0, known[0][dim] - mesh.index(axes, coordinates) * rows)
            value = value.narrow(dim, 0, min(rows, left))
        return value

    # --------------------------------------------------------------------------------------- stops

    def _nodes_of(self, stop: str) -> list[fx.Node]:
        named = [node for node in self.rows if stop.lstrip("%") == self.names[node]]
        if named:
            return named[:1]
        if re.search(r":\d+$", stop):
            inside = [n for n in self.rows if f"/{n.meta.get('source')}".endswith(f"/{stop}")]
            places = dict.fromkeys(inside, stop)
        else:
            places = {n: p for n in self.rows for p in _parents(n) if fnmatchcase(p, stop)}
        # The last node wins: a stop is behind all operations of its place.
        last = {(p, bool(n.meta.get("backward"))): n for n, p in places.items()}
        if not last:
            words = [p for n in self.rows for p in (self.names[n], *_parents(n))]
            raise ShardingError.here(
                f"nothing of the program is called '{stop}'",
                fix=did_you_mean(stop, dict.fromkeys(words)),
            )
        return [*last.values()]

    def _stop(self, node: fx.Node, value: object, operands: Mapping[str, object]) -> None:
        name, module, line = self.names[node], _module_of(node), node.meta.get("source") or ""
        of = f" of module '{module}'" if module else ""
        print(f"    stop behind %{name}{of}{line and f', {line}'}")
        file, _, number = line.rpartition(":")
        spec = node.meta.get("spec")
        Breakpoint(file or "<no line>", int(number or 1), "forward", {"torch": torch}, {}).stop(
            {}, name=name, value=value, operands=operands, layout=str(spec or "")
        )

    def _stop_in_forward(self, stop: Breakpoint) -> None:
        print(f"    stop at breakpoint(), {stop.file}:{stop.line}")
        layouts = {
            name: str(self.specs[value.name])
            for name, value in stop.variables.items()
            if isinstance(value, LocalValue) and value.name in self.specs
        }
        stop.stop(self.values, layouts=layouts)


def _kept(value: object) -> object:
    """Return a copy, since later operations may write over it."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_row(node: fx.Node, forward: fx.Graph) -> bool:
    """Return whether a node's value is printed: not if it is inside a collective."""
    if node.op == "placeholder":
        return "spec" in node.meta and (node.graph is forward or bool(node.meta.get("backward")))
    # A collective that has only been started has no value yet.
    if node.op != "call_function" or node.target in STARTS:
        return False
    return "spec" in node.meta or "collective" not in node.meta


def _names(nodes: Sequence[fx.Node], rows: Collection[fx.Node]) -> dict[fx.Node, str]:
    """Name each node: the plan's names for its values, `.2` for a second layout."""
    names, counts = dict[fx.Node, str](), dict[str, int]()
    for node in nodes:
        name = (denoted(node) if node in rows else None) or node.name
        if node.op == "placeholder" and node not in rows:
            names[node] = name
            continue
        counts[name] = counts.get(name, 0) + 1
        names[node] = name if counts[name] == 1 else f"{name}.{counts[name]}"
    return names


def _module_of(node: fx.Node) -> str:
    return node.meta.get("module", "").rpartition("/")[2]


def _parents(node: fx.Node) -> list[str]:
    """Return the paths of the modules around a node."""
    parts = _module_of(node).split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts)) if parts[0]]


def _range(value: Tensor) -> str:
    """Return the smallest and the largest element as text, and how many are not finite."""
    value = value.detach()
    if not value.numel():
        return "empty"
    if value.dtype == torch.bool:
        return f"{int(value.sum())} of {value.numel()} true"
    if value.is_complex():
        value = value.abs()
    if not value.is_floating_point():
        return f"{value.min()} to {value.max()}"
    value = value.float()
    finite = value[value.isfinite()]
    text = f"{finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    rest = value.numel() - finite.numel()
    return f"{text}{', ' if text and rest else ''}{f'{rest} not finite' if rest else ''}"
