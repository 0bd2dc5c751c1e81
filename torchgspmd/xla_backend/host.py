"""Warn about operations that torch_xla runs on the host.

Their results are right, but their operands are gathered and the step is cut in two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import fx

from ..compat.private_apis import OpOverload

_READS = {"aten::_local_scalar_dense"}  # reads a value, computes nothing


def report_host_operations(graph: fx.Graph, run: Callable[[], object]) -> object:
    """Return `run`'s result; warn about each operation in the graph that ran on the host."""
    # torch_xla counts for the whole process, other models included.
    before = _host_counts()
    result = run()
    for name, count in _host_counts().items():
        if count > before.get(name, 0) and name not in _READS:
            lines = dict.fromkeys(
                n.meta.get("source") for n in graph.nodes if _name(n.target).startswith(name)
            )
            where = f" ({', '.join(line for line in lines if line)})" if any(lines) else ""
            warnings.warn(
                f"{name}{where} has no kernel on XLA: the host computes it, on gathered tensors, "
                "and the step is cut in two",
                stacklevel=3,
            )
    return result


def _host_counts() -> dict[str, int]:
    """Return how often the host has run each operation."""
    import torch_xla.debug.metrics as met

    return {
        name: met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")
    }


def _name(target: object) -> str:
    return target._schema.name if isinstance(target, OpOverload) else ""
