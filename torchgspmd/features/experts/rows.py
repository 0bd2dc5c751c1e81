"""The rows that experts add to the core's tables; PIPELINE has their pass."""

from . import capture, rule  # noqa: F401 (rows of REWRITES and RULES)
