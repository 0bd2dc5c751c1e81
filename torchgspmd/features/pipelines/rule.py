"""Stages' sends and the loss's start: marks whose values keep their layouts.

A sum may pass the loss's mark while it is pending. Sums are reduced before they are sent.
"""

from __future__ import annotations

from ...rules.notation import Call, FactorRule, factors
from ...rules.registry import rule_for
from .op import HEAD, SEND


@rule_for(SEND, HEAD)
def _alike(call: Call) -> FactorRule:
    names = factors("d", call.results[0].dim())
    linear = [] if call.target is SEND else [[0]]
    return call.rule([names] * len(call.tensors), [names], linear=linear)
