"""The rows that recurrences add to the core's tables; PIPELINE places their pass."""

from __future__ import annotations

import sys

from ...capture.trace_context import PATCHES
from ...compat.patches import Patch
from ...compat.private_apis import generic_associative_scan, is_missing
from .blocked_scan import blocked

if not is_missing(generic_associative_scan):
    PATCHES.append(
        Patch(
            sys.modules[generic_associative_scan.__module__],
            "generic_associative_scan",
            blocked,
            "its steps take every second row, so shards exchange rows in each of them",
            feature="recurrences",
        )
    )
