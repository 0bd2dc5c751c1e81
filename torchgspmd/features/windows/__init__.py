"""Windows: convolutions, pooling, interpolation, padding by content (section 4 of the paper)."""

from . import (  # noqa: F401 (rows of RULES and REWRITES)
    adaptive_max_pool,
    convolution,
    interpolate,
    pooling,
    spatial,
)
