"""The rows that unknown sizes add to the tables of the core."""

from . import capture, operands, vmapped  # noqa: F401 (rows of REWRITES)
