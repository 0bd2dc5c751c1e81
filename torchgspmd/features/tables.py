"""The module that puts the tables KINDS, RULES, REWRITES and PATCHES together.

Importing a feature's rows adds them. PIPELINE (fx_passes/pipeline.py), a page of its own, lists
features' passes among the core's. Nothing else in the core imports a feature.
"""

from ..rules.rewrites import end_tables
from .attention import rows as attention
from .experts import rows as experts
from .loops import rows as loops
from .pipelines import rows as pipelines
from .unknown_sizes import rows as unknown_sizes
from .windows import rows as windows

_ROWS = attention, experts, loops, pipelines, unknown_sizes, windows
FEATURES = tuple(rows.__name__.split(".")[-2] for rows in _ROWS)
end_tables(__name__)
