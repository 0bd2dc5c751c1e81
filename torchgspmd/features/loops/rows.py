"""The rows that loops add to the core's tables; PIPELINE has their passes."""

from . import capture, recurrent, rule  # noqa: F401 (rows of REWRITES and RULES)
