"""Unknown sizes: dimensions whose size only a run knows, such as a selection's."""

from . import capture, operands  # noqa: F401 (rows of REWRITES)
