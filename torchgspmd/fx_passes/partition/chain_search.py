"""Other layouts for chains of operations on one tensor, alone or with the contraction in front.

before   every operation of a chain has the strategy that is cheapest while the others keep theirs
after    all are laid out like the operand of the chain, or as its result is needed, if that costs
         less
"""

from __future__ import annotations

from .op_search import OpSearch
from .region_proposal import RegionProposals
from .regions import Region, chains, sources


class ChainSearch(RegionProposals):
    """Tries other layouts for chains, alone or with the contraction before."""

    search = "chain"

    def __init__(self, op_search: OpSearch) -> None:
        super().__init__(op_search)
        ops = self.assignment.ops
        self.chains, self.sources = chains(ops), sources(ops)

    def improve(self) -> list[bool]:
        """Try every chain and contraction once; return of each whether it changed."""
        return [*map(self._improve_chain, self.chains), *map(self._improve_source, self.sources)]

    def _improve_chain(self, chain: Region) -> bool:
        """Lay out a chain like its operand, or as its result is required."""
        return self.try_proposal(
            chain, "in", lambda: self.propose_forwards(chain)
        ) or self.try_proposal(chain, "out", lambda: self.propose_backwards(chain))

    def _improve_source(self, source: Region) -> bool:
        """Compute a contraction as it costs least by itself; the chain behind it follows."""
        return self.try_proposal(source, "in", lambda: self.propose_forwards(source))
