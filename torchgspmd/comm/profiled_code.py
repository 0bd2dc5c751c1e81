"""A program's code, with ranges for torch.profiler while it runs.

    forward | blocks | blocks.0 | blocks.0.up | all_gather blocks_0_up_weight, 4.00 MiB, data

A range has the path of the module whose operations run in it. A collective's range names its
payload. They stand in a second version of the code, made when a profiler first looks. Without a
profiler a run costs one more question.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from ..compat.fx_nodes import copy_node
from ..compat.private_apis import _profiler_enabled, is_missing
from ..errors import ShardingError, outside_error
from .code_names import lines_of, named_code

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
