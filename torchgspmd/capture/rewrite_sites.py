"""Source lines whose values a rewrite leaves out, as the results need only other values.

A softmax whose weights only attention needs is no part of the captured program. If the program
needs the weights elsewhere, too, it is traced again and the rewrite keeps that site. A site is a
line, since a checkpoint computes a value again on the same line.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import fx

from ..compat.patches import setting

SITE = "site"  # the key for a site in its node's metadata


class RewriteSites:
    """One trace's sites. kept: those whose values the program needs."""

    def __init__(self, kept: set[str]) -> None:
        self.kept, self.rewritten = kept, set[str]()

    def needed(self, graph: fx.Graph) -> set[str]:
        """Return the rewritten sites whose values a graph needs all the same.

        The metadata that says so is removed.
        """
        return self.rewritten & {node.meta.pop(SITE, "") for node in graph.nodes}


_sites: ContextVar[RewriteSites | None] = ContextVar("sites", default=None)


def current_sites() -> RewriteSites | None:
    """Return the running trace's sites; None if rewrites may leave out nothing."""
    return _sites.get()


def rewriting(sites: RewriteSites) -> AbstractContextManager[RewriteSites | None]:
    """Allow rewrites to leave out values while in this context."""
    return setting(_sites, sites)
