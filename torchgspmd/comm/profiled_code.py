"""Generated code: file names that lead to the node of each line, and ranges for torch.profiler.

    <torchgspmd forward blocks.block>.1f0c2a9b3d4e.5a6b7c8d
    forward | blocks | blocks.0 | blocks.0.up | all_gather blocks_0_up_weight, 4.00 MiB, data

The first hash of a name is of the lines' nodes, so that every process with these nodes has the same
name for them. The second is of the code, whose constants may differ between ranks. Stacks of
threads, the flight recorder's and those of memory snapshots consist of such names and lines.

A range has the path of the module whose operations run in it. A collective's range names its
payload. They stand in a second version of the code, made when a profiler first looks. Without a
profiler a run costs one more question.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.graph import CodeGen

from ..compat.fx_nodes import copy_node
from ..compat.private_apis import _profiler_enabled, is_missing
from ..errors import ShardingError, outside_error
from .rank_failure import COMPARISON

_FILE = re.compile(r"(<torchgspmd [^<>]*>\.[0-9a-f]{12})\.[0-9a-f]{8}")
_COLLECTIVES = "all_reduce all_gather reduce_scatter all_to_all permute broadcast ring".split()


class NodeLine(NamedTuple):
    """A line of generated code.

    kind: the collective that its node starts or waits for, or nothing. source: the user's line.
    last: the last collective begun there, with its line. text: the node for people. module: its
    module's path. operands: its operands' names in the code. limit: the rows of the table that its
    indices are for, or 0.
    """

    kind: str
    source: str
    last: str
    text: str
    module: str = ""
    operands: tuple[str, ...] = ()
    limit: int = 0


class CodeLines:
    """The lines of a program's code, by number. last: the program's last collective."""

    def __init__(self, rows: Mapping[int, NodeLine]) -> None:
        self.rows = rows
        self.last = next((row.last for row in reversed([*rows.values()])), "")


# Weak: a discarded program must not be kept for reports. Its GraphModule holds the lines.
_LINES: weakref.WeakValueDictionary[str, CodeLines] = weakref.WeakValueDictionary()


def named_code(forward: Callable[..., Any]) -> str:
    """Give a GraphModule's forward its file name, and return that."""
    module: Any = forward.__self__  # pyright: ignore[reportFunctionMemberAccess]
    function: Any = forward.__func__  # pyright: ignore[reportFunctionMemberAccess]
    given = function.__code__.co_filename
    if _FILE.fullmatch(given):
        return given
    rows = _rows(module)
    text = "\n".join(f"{number} {row.kind} {row.text}" for number, row in rows.items())
    key = f"<torchgspmd {_title(module.graph)}>.{_hash(text, 6)}"
    name = f"{key}.{_hash(module.code, 4)}"
    # Equal programs share the lines, which live as long as one of them.
    module.__dict__["_code_lines"] = _LINES.setdefault(key, CodeLines(rows))
    function.__code__ = function.__code__.replace(co_filename=name)
    if given in linecache.cache:  # fx has put a function there that returns the code
        linecache.cache[name] = linecache.cache[given]
    return name


def lines_of(name: str) -> CodeLines | None:
    """Return the lines of a file of generated code, while its program or an equal one lives."""
    return _LINES.get(key) if (key := key_of(name)) else None


def key_of(name: str) -> str:
    """Return the part of a file name that its nodes decide; "" for a file of other code."""
    found = _FILE.fullmatch(name)
    return found[1] if found else ""


def all_lines() -> dict[str, CodeLines]:
    """Return the lines of all programs that live, by `key_of` their names."""
    return dict(_LINES)


def _rows(module: fx.GraphModule) -> dict[int, NodeLine]:
    """Return the lines of a GraphModule's code that compute nodes."""
    nodes, last = {node.name: node for node in module.graph.nodes}, ""
    rows: dict[int, NodeLine] = {}
    for number, line in enumerate(module.code.splitlines(), 1):
        # A line of generated code is `name: type = call(...)`, with the node's name.
        name = line.partition("=")[0].partition(":")[0].strip()
        if (node := nodes.get(name)) is None:
            continue
        kind, source = _kind(node), node.meta.get("source") or ""
        if kind is not None:
            last = f"{kind} at {source}" if source else kind
        path = str(node.meta.get("module") or "").rpartition("/")[2]
        operands = tuple(n.name for n in node.all_input_nodes)
        place = kind or "", source, last, _text(node, source), path
        rows[number] = NodeLine(*place, operands=operands, limit=limit_of(node))
    return rows


def limit_of(node: fx.Node) -> int:
    """Return the rows of the whole table that an operation's indices are for; 0 if it has none."""
    return next((n.meta["limit"] for n in node.all_input_nodes if "limit" in n.meta), 0)


def _text(node: fx.Node, source: str) -> str:
    """Return a node's name, that of its value in `print(plan)`, its collective, module and line."""
    meta = node.meta
    name = f"{node.name} of %{meta['value']}" if meta.get("value") else node.name
    module = str(meta.get("module") or "").rpartition("/")[2]
    at = f"at {source}" if source else ""
    # As ranges of profiles have it: kind, operand, size and axes.
    parts = [meta.get("collective") or "", " ".join(filter(None, [module, at]))]
    return ": ".join([name, *filter(None, parts)])


def _title(graph: fx.Graph) -> str:
    """Return the phase and the module that all operations of a graph are in."""
    places = {
        (bool(node.meta["backward"]), str(node.meta.get("module") or ""))
        for node in graph.nodes
        if node.op == "call_function" and "backward" in node.meta
    }
    phases = {backward for backward, _ in places}
    phase = "program" if len(phases) != 1 else "backward" if True in phases else "forward"
    paths = [path.rpartition("/")[2].split(".") for _, path in places]
    return f"{phase} {'.'.join(os.path.commonprefix(paths))}".strip()


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).hexdigest()


def _kind(node: fx.Node) -> str | None:
    """Return the name of the collective that a lowered program's node starts or waits for."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if name == "wait_tensor" and isinstance(node.args[0], fx.Node):
        return _kind(node.args[0]) or "wait"
    if name in ("carry", "total", "settle"):
        return COMPARISON
    if not any(word in name for word in _COLLECTIVES):
        return None
    planned = re.match("|".join(_COLLECTIVES), node.name)  # gloo may do it by another one
    return planned[0] if planned else name


# Asked once: `is_profiling` runs at every call of a program.
_IS_MISSING = is_missing(_profiler_enabled)


class ProfiledCode:
    """A function that runs a graph. plain: its GraphModule's `forward`, without ranges.

    codegen: the graph's, if it is not torch's own.
    """

    def __init__(self, plain: Callable[..., Any], codegen: CodeGen | None = None) -> None:
        self.plain, self.codegen = plain, codegen
        named_code(plain)
        self.__self__: fx.GraphModule = plain.__self__  # pyright: ignore[reportFunctionMemberAccess]
        self._with_ranges: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self._run(inputs)
        except (IndexError, RuntimeError) as error:
            if (outside := _outside_of(error)) is not None:
                raise outside from error
            raise

    def _run(self, inputs: tuple) -> Any:
        if not is_profiling():
            return self.plain(*inputs)
        if self._with_ranges is None:
            graph = with_ranges(self.__self__.graph)
            graph.set_codegen(self.codegen or CodeGen())
            self._with_ranges = fx.GraphModule(self.__self__, graph).forward
            named_code(self._with_ranges)
        return self._with_ranges(*inputs)


def _outside_of(error: Exception) -> ShardingError | None:
    """Return the error for an index outside of its table, from a program's line in a traceback."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    for frame, number in reversed(frames):
        if (lines := lines_of(frame.f_code.co_filename)) is None:
            continue
        if (line := lines.rows.get(number)) is None:
            return None
        operands = [frame.f_locals.get(name) for name in line.operands]
        return outside_error(error, line.source, line.module, line.limit, operands)
    return None


def open_range(text: str) -> Any:
    return torch.autograd.profiler.record_function(text).__enter__()


def close_range(begun: Any) -> None:
    begun.__exit__(None, None, None)


def with_ranges(graph: fx.Graph) -> fx.Graph:
    """Copy a graph; the copy's nodes run inside ranges."""
    result, new = fx.Graph(), dict[fx.Node, fx.Node]()
    opened: list[tuple[str, fx.Node]] = []

    def move_to(ranges: list[str]) -> None:
        common = 0
        # Ranges nest: only those that the next node is not in are closed.
        while common < min(len(opened), len(ranges)) and opened[common][0] == ranges[common]:
            common += 1
        while len(opened) > common:
            result.call_function(close_range, (opened.pop()[1],))
        for text in ranges[common:]:
            opened.append((text, result.call_function(open_range, (text,))))

    for node in graph.nodes:
        if node.op == "call_function":
            move_to(ranges_of(node))
        elif node.op == "output":
            move_to([])
        new[node] = copy_node(result, node, new.__getitem__)
    return result


def is_profiling() -> bool:
    """Return whether a profiler is active."""
    return not _IS_MISSING and _profiler_enabled()


@contextmanager
def within(ranges: Sequence[str]) -> Iterator[None]:
    """Run the block in ranges, the outermost first, if a profiler is active."""
    begun = [open_range(text) for text in ranges] if is_profiling() else []
    try:
        yield
    finally:
        for each in reversed(begun):
            close_range(each)


def common_ranges(graph: fx.Graph) -> list[str]:
    """Return the ranges that all operations in a graph share, the outermost first."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and "backward" in n.meta]
    alike = zip(*map(ranges_of, nodes))
    return [texts[0] for texts in takewhile(lambda texts: len({*texts}) == 1, alike)]


def ranges_of(node: fx.Node) -> list[str]:
    """Return a node's ranges, the outermost first."""
    path = node.meta.get("module", "")
    ranges = ["backward" if node.meta.get("backward") else "forward"]
    own, _, path = path.rpartition("/")
    ranges += own.split("/") if own else []
    parts = path.split(".") if path else []
    ranges += [".".join(parts[: i + 1]) for i in range(len(parts))]
    label = node.meta.get("collective")
    return [*ranges, label] if label else ranges
