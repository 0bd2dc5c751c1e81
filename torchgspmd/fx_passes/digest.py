"""A long program on a page: a line for each module, equal layers once, with its bytes.

    layers.*.down.weight   x 8   f32[64, 256@model]
    forward
      layers.*.down        x 8   f32[8@data, 32, 64]        all_reduce model 64.00 KiB
    backward
      layers.*.up          x 8                              all_reduce data 64.00 KiB

A module's line has the layout of its largest value, and the bytes that a device sends for one among
the like modules. Nested modules are joined until the text fits the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torch import Tensor, fx

from ..layout.mesh import Mesh
from .ir import other_shapes, runs
from .printer import type_text
from .units import size_text

WIDTH, HEIGHT = 120, 60  # columns and lines of a page
_NAME, _TYPE = 44, 34  # columns of a name and of a type, at most
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class _Group:
    """Like modules, or like weights."""

    names: dict[str, None] = field(default_factory=dict)
    layout: str = ""  # of the largest value of the first module; of equal ones the last
    size: int = 0  # elements of that value
    sent: dict[tuple[str, str], float] = field(default_factory=dict)  # by kind and axes


def fits_page(text: str) -> bool:
    """Return whether a text has no more lines than a page."""
    return text.count("\n") < HEIGHT


def page_text(graph: fx.Graph, inputs: Sequence[str], mesh: Mesh, summary: str) -> str:
    """Return a program and its summary on a page. The arguments are those of `digest_text`."""
    page = digest_text(graph, inputs, mesh, HEIGHT - summary.count("\n") - 4)
    return f"{page}\n\n{summary}\nprint(plan.text(full=True)) shows every value"


def digest_text(graph: fx.Graph, inputs: Sequence[str], mesh: Mesh, height: int) -> str:
    """Return a program on a page.

    Args:
        graph: The partitioned program, with modules in its nodes' metadata.
        inputs: The input names, in order.
        mesh: The devices.
        height: The line limit, if joining modules suffices.
    """
    head = f"mesh {' '.join(f'{n}={s}' for n, s in mesh.axes)}"
    deepest = max((module_path(node).count(".") + 1 for node in graph.nodes), default=1)
    lines: list[str] = []
    # From the most detail to the least: the first that fits the page wins.
    for depth in range(deepest, 0, -1):
        lines = [head, *_weights(graph, inputs, depth)]
        for phase in ("forward", "backward"):
            lines += _phase(graph, phase, depth)
        if len(lines) <= height:
            break
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def _weights(graph: fx.Graph, inputs: Sequence[str], depth: int) -> Iterator[str]:
    """Yield lines for the inputs: like inputs with one layout together."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    groups: dict[tuple[str, str], _Group] = {}
    for name, node in zip_longest(inputs, placeholders):
        # Cotangents are inputs of the joint graph, but none of the user's.
        if node is None or name is None or name.startswith("tangent_"):
            continue
        layout = layout_text(node)
        owner, _, last = name.rpartition(".")
        like = like_name(owner, depth)
        shown = f"{like}.{last}".lstrip(".") if owner.count(".") < depth else f"{like}.**"
        key = shown, layout if owner.count(".") < depth else ""
        group = groups.setdefault(key, _Group())
        group.names[name], group.layout = None, key[1]
    # Sorting out equal names comes last: only then all layouts of like weights are known.
    yield from _lines({name: group for (name, _), group in _distinct(groups).items()}, "  ")


def _distinct(groups: Mapping[tuple[str, str], _Group]) -> Mapping[tuple[str, str], _Group]:
    """Return groups under names that differ, also where like weights have several layouts."""
    counts: dict[str, int] = {}
    result = {}
    for (name, layout), group in groups.items():
        counts[name] = counts.get(name, 0) + 1
        shown = next(iter(group.names)) if counts[name] > 1 else name
        result[shown, layout] = group
    return result


def _phase(graph: fx.Graph, phase: str, depth: int) -> Iterator[str]:
    groups: dict[str, _Group] = {}
    for node in graph.nodes:
        if node.op != "call_function" or bool(node.meta.get("backward")) != (phase == "backward"):
            continue
        path = ".".join(module_path(node).split(".")[:depth])
        group = groups.setdefault(like_name(path, depth), _Group())
        group.names[path] = None
        # Bytes and layouts of one module: those of its likes are equal, and only counted.
        is_first = path == next(iter(group.names))
        step = node.meta.get("step")
        if step is not None and step.sent and is_first:
            key = step.target.name, "+".join(step.axes)
            group.sent[key] = group.sent.get(key, 0.0) + step.sent * runs(node)
        val = node.meta.get("val")
        if is_first and phase == "forward" and isinstance(val, Tensor):
            if (size := val.numel()) >= group.size:
                group.layout, group.size = layout_text(node), size
    # The backward has the forward's modules again: only those that send are news.
    if phase == "backward":
        groups = {name: group for name, group in groups.items() if group.sent}
    if groups:
        yield phase
        yield from _lines(groups, "  ")


def _lines(groups: Mapping[str, _Group], indent: str) -> Iterator[str]:
    names = {name: _cut(name or "(outside of modules)", _NAME) for name in groups}
    width = max(map(len, names.values()), default=0)
    types = max((min(len(group.layout), _TYPE) for group in groups.values()), default=0)
    for name, group in groups.items():
        count = f"x {len(group.names)}" if len(group.names) > 1 else ""
        layout = _cut(group.layout, _TYPE)
        row = f"{indent}{names[name]:{width}}  {count:5}  {layout:{types}}"
        yield f"{row}  {_sent(group, WIDTH - len(row) - 2)}".rstrip()


def _sent(group: _Group, width: int) -> str:
    """Return a module's collectives, the largest first, in at most `width` columns."""
    parts = [
        f"{kind} {axes} {size_text(size)}"
        for (kind, axes), size in sorted(group.sent.items(), key=lambda row: -row[1])
    ]
    for shown in range(len(parts), 0, -1):
        rest = f", {len(parts) - shown} more" if shown < len(parts) else ""
        if len(text := ", ".join(parts[:shown]) + rest) <= width:
            return text
    return f"{len(parts)} collectives" if parts else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def named_node(graph: fx.Graph, inputs: Sequence[str], name: str) -> fx.Node | None:
    """Return the value behind a name in a digest, the first of equal ones.

    That is an input, the last step in a module that sends, or its last value.
    """
    wild = re.escape(name).replace(r"\*\*", ".*").replace(r"\*", r"\d+")
    matches = re.compile(wild).fullmatch
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for each, node in zip(inputs, placeholders):
        if matches(each):
            return node
    calls = [n for n in graph.nodes if n.op == "call_function"]
    depth = name.count(".") + 1

    def path(node: fx.Node) -> str:
        return ".".join(module_path(node).split(".")[:depth])

    # The name of one module exactly, before names that joined modules share.
    found = [n for n in calls if matches(module_path(n))] or [n for n in calls if matches(path(n))]
    first = [n for n in found if path(n) == path(found[0])]
    sends = [n for n in first if n.meta.get("step") is not None and n.meta["step"].sent]
    return (sends or first or [None])[-1]


def module_path(node: fx.Node) -> str:
    """Return the path of the module that computes a value, without the user's ranges."""
    return str(node.meta.get("module") or "").rpartition("/")[2]


def like_name(path: str, depth: int | None = None) -> str:
    """Return a path down to `depth` modules, if given, with * for numbers."""
    return _NUMBER.sub("*", ".".join(path.split(".")[:depth]))


def layout_text(node: fx.Node) -> str:
    """Return a tensor's dtype, shape and layout; "" for another value."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return ""
    (other,) = other_shapes(node)
    return type_text(val.dtype, val.shape, node.meta.get("spec"), other)
