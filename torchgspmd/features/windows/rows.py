"""The rows that windows add to the core's tables."""

from . import (  # noqa: F401 (rows of RULES and REWRITES)
    adaptive_max_pool,
    circular,
    convolution,
    interpolate,
    pooling,
    spatial,
)
