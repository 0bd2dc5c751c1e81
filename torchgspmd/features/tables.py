"""The place where the tables KINDS, RULES, REWRITES and PATCHES are put together.

The import of a feature's rows adds them. PIPELINE (fx_passes/pipeline.py), a page of its own, has
the passes of features in their places. Nothing else of the core imports a feature.
"""

from .attention import rows as _attention  # noqa: F401
from .experts import rows as _experts  # noqa: F401
from .windows import rows as _windows  # noqa: F401
