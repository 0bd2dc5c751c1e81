"""The rows that unknown sizes add to the core's tables."""

from . import capture, operands, vmapped  # noqa: F401 (rows of REWRITES)
