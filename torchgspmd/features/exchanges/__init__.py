"""Exchanges: the operations between two of them, in parts beside the exchanges of others."""

from __future__ import annotations

from ...fx_passes.pass_types import FEATURE_PASSES, FeaturePass
from .find_chains import EXCHANGES
from .split_exchanges import split_exchanges

FEATURE_PASSES["split_exchanges"] = FeaturePass(split_exchanges, EXCHANGES)
