"""The graph as text, one line a value.

Sizes are global. `@` precedes a mesh axis that shards a dimension or that a value is pending over.

mesh data=2 model=4
  %x      : f32[8@data, 64]           = input
  %mm_1   : f32[8@data, 64] sum@model = mm(%gelu, %w2)
  %mm_1_r : f32[8@data, 64]           = all_reduce(%mm_1, sum, model)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.private_apis import OpOverload
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .ir import boundary_spec, other_shapes, runs, tensors_of
from .loop_call import loop_calls

_Row = tuple[str, str, str]  # name, type, what it computes

_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name: f32 for torch.float32."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def type_text(
    dtype: torch.dtype, shape: Any, spec: ShardSpec | None, other: Any | None = None
) -> str:
    """Return a value's type as text: f32[8@data, 64] sum@model.

    other: another shape for the value, if some sizes depend on values; these are printed as u496.
    """
    spec = spec or ShardSpec.replicated(len(shape))
    shape = [n if n == m else f"u{n}" for n, m in zip(shape, shape if other is None else other)]
    dims = [
        f"{_size(n, spec, d)}@{'+'.join(axes)}{f'[{w.short}]' if (w := spec.window(d)) else ''}"
        if axes
        else str(n)
        for d, (n, axes) in enumerate(zip(shape, spec.dims))
    ]
    pending = f" {spec.reduction}@{'+'.join(spec.pending)}" if spec.pending else ""
    return f"{dtype_name(dtype)}[{', '.join(dims)}]{pending}"


def _size(size: int | str, spec: ShardSpec, dim: int) -> int | str:
    """Return a sharded dimension's size as text: 3*1024 for three parts that are each sharded."""
    count = spec.parts[dim] if spec.parts else 1
    return f"{count}*{int(size) // count}" if count > 1 else size


def graph_text(graph: fx.Graph, mesh: Mesh, fold: bool = False) -> str:
    """Return the global program as text; docs/reading_a_plan.md tells how to read it.

    fold: print like layers once.
    """
    rows = [_times(row, runs(node)) for node in graph.nodes if (row := _row(node))]
    lines = _folded(rows) if fold else _lines(rows)
    return "\n".join([f"mesh {' '.join(f'{n}={s}' for n, s in mesh.axes)}", *lines])


def program_text(graph: fx.Graph) -> str:
    """Return one device's program as text.

    Sizes are its shards'. A collective has a start, and a wait for each result.
    """
    return "\n".join(_program_lines("one device", graph))


def _program_lines(title: str, graph: fx.Graph) -> list[str]:
    """Return the lines for one device's program, then those for its loops."""
    lines = [title, *_lines([_local_row(node) for node in graph.nodes])]
    for _, call in loop_calls(graph):
        for body in call.bodies:
            what = "body" if body is call else body.__name__
            lines += _program_lines(f"{what} of {call.__name__}, {call.times}", body.graph)
    return lines


def _times(row: _Row, count: int) -> _Row:
    """Return the row for a node that runs `count` times, in a loop."""
    name, kind, text = row
    return (name, kind, f"{text}  x {count}") if count > 1 else row


def _lines(rows: list[_Row]) -> list[str]:
    name_width, type_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return [
        f"  {name:{name_width}} : {kind:{type_width}} = {text}".rstrip() if name else f"  {text}"
        for name, kind, text in rows
    ]


def _folded(rows: list[_Row]) -> list[str]:
    """Return lines for rows; repeated ones stand once, indented below `x 96`."""
    blocks = [
        (run, rows[run.start : run.stop]) for run in repetitions([_like(row) for row in rows])
    ]
    shown = [
        (*row[:2], _fold_names(row[2]) if not row[0] else row[2])
        for run, block in blocks
        for row in block[: run.period]
    ]
    # All lines are aligned together, folded or not: columns stay at one place.
    lines = iter(_lines(shown))
    text: list[str] = []
    for run, block in blocks:
        folded = run.repeats > 1
        if folded:
            text.append(f"  x {run.repeats}, to {block[-1][0]}:")
        indent = "  " if folded else ""
        text += [indent + next(lines) for _ in range(run.period)]
    return text


def _like(row: _Row) -> _Row:
    name, kind, text = row
    return like(name), kind, like(text)


def _fold_names(text: str) -> str:
    """Return a list of names in which repeated ones stand once: [%a, %b] x 96."""
    names = text.removeprefix("return ").split(", ")
    parts = [
        (", ".join(names[run.start : run.start + run.period]), run.repeats)
        for run in repetitions([like(name) for name in names])
    ]
    return "return " + ", ".join(f"[{part}] x {n}" if n > 1 else part for part, n in parts)


def _local_row(node: fx.Node) -> _Row:
    if node.op == "output":
        return "", "", f"return {_text(node.args[0])[1:-1]}"
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    return (
        f"%{node.name}",
        type_text(dtype, shape, None, node.meta.get("unknown"))
        if shape is not None and dtype is not None
        else "",
        call_text(node),
    )


def _row(node: fx.Node) -> _Row | None:
    if node.op == "output":
        return "", "", f"return {_text(node.args[0])[1:-1]}"
    val = node.meta.get("val")
    name = f"%{node.name}"
    if isinstance(val, (int, float)):
        return name, type(val).__name__, call_text(node)
    if not isinstance(val, Tensor):
        specs = node.meta.get("result_specs", ())
        kinds = [
            type_text(t.dtype, t.shape, s, o)
            for t, s, o in zip(tensors_of(node), specs, other_shapes(node))
        ]
        return name, f"({'; '.join(kinds)})", call_text(node)
    (other,) = other_shapes(node)
    spec = boundary_spec(node) if "parts" in node.meta else node.meta.get("spec")
    return name, type_text(val.dtype, val.shape, spec, other), call_text(node)


def call_text(node: fx.Node, names: Mapping[fx.Node, str] | None = None) -> str:
    """Return a node's call as text: mul(%x, 2). names: others than the operands' own."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "constant"
    computed = f" in {dtype_name(node.meta['computed'])}" if "computed" in node.meta else ""
    if node.target is operator.getitem:
        return f"{_text(node.args[0], names)}[{node.args[1]}]{computed}"
    # Device and layout are the same all over: only noise.
    options = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
    arguments = [_text(value, names) for value in node.args]
    arguments += [f"{k}={_text(v, names)}" for k, v in options.items()]
    return f"{_op_name(node.target)}({', '.join(arguments)}){computed}"


def _op_name(target: Any) -> str:
    return (
        target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else target.__name__
    )


def _text(value: object, names: Mapping[fx.Node, str] | None = None) -> str:
    if isinstance(value, fx.Node):
        return f"%{names[value] if names else value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each, names) for each in value)}]"
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


# Fold like rows in a printed graph: repeated layers are printed once, with `x 96`. Rows are like if
# they differ only in the numbers in their names.


MIN_REPEATS = 4
MIN_SAVED = 8  # rows that folding has to save
MAX_PERIODS = 256  # that are tried from one row on
_NUMBER_OF_NAME = re.compile(r"(%\w*?)_\d+(?=_|\b)")


@dataclass(frozen=True)
class Run:
    """Rows `start` to `start + period`, which repeat; one row that does not has period 1."""

    start: int
    period: int = 1
    repeats: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats


def like(text: str) -> str:
    """Return a row's text without the numbers in names, equal for like rows.

    Example:
        >>> like("%relu_5_g = all_gather(%layers_3_weight, 0)")
        '%relu_g = all_gather(%layers_weight, 0)'
    """
    # Again and again: a name may have several numbers, and a match ends at the first.
    while (shorter := _NUMBER_OF_NAME.sub(r"\1", text)) != text:
        text = shorter
    return text


def repetitions(rows: Sequence[Hashable], min_saved: int = MIN_SAVED) -> Iterator[Run]:
    """Yield a sequence's runs, in order: repeated rows as one run, each other row alone."""
    places: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row, []).append(i)
    seen = dict.fromkeys(places, 0)  # how many places of each row lie behind
    start = 0
    while start < len(rows):
        here = places[rows[start]]
        # A period can only end where the first row stands again: no other is tried.
        later = here[seen[rows[start]] + 1 :][:MAX_PERIODS]
        best = Run(start)
        for place in later:
            run = Run(start, place - start, _repeats(rows, start, place - start))
            if run.repeats >= MIN_REPEATS and run.stop > best.stop:
                best = run
        if best.stop - start - best.period < min_saved:
            best = Run(start)
        yield best
        for row in rows[start : best.stop]:
            seen[row] += 1
        start = best.stop


def _repeats(rows: Sequence[Hashable], start: int, period: int) -> int:
    """Count how often `period` rows stand in sequence from `start` on."""
    i = start
    while i + period < len(rows) and rows[i] == rows[i + period]:
        i += 1
    return (i - start) // period + 1
