"""The annotated program that XLA partitions: the pipeline up to layouts, or up to a partition."""

from __future__ import annotations

from dataclasses import replace

from ..fx_passes.boundary import start_program
from ..fx_passes.pipeline import passes, run
from ..fx_passes.program import Program, Request
from .lower import unpartitioned


def annotate_for_xla(request: Request, pin: str) -> Program:
    """Return the program that XLA partitions. pin="all": our partitioner chooses all layouts."""
    names = {"decompose_ops", "propagate", "split_fused"}
    if pin == "all":
        names |= {"split_axes", "partition", "merge_axes"}
    request = replace(request, expand=unpartitioned, keep_marks=True)
    return run(start_program(request), steps=[each for each in passes() if each.name in names])
