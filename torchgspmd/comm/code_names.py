"""File names of generated code, and the node that each line computes.

    <torchgspmd forward blocks.block>.1f0c2a9b3d4e.5a6b7c8d

The first hash is of the lines' nodes, so that every process with these nodes has the same name for
them. The second is of the code, whose constants may differ between ranks. Stacks of threads, the
flight recorder's and those of memory snapshots consist of such names and lines.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import fx

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
        text, operands = _text(node, source), tuple(n.name for n in node.all_input_nodes)
        rows[number] = NodeLine(kind or "", source, last, text, path, operands, limit_of(node))
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
