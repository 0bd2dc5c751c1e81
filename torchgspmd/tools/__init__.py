"""Tools around a plan: `gspmd.tools.suggest`, also `gspmd.suggest`. The library imports none."""

from . import evaluation as evaluation
from .calibrate import calibrate as calibrate
from .compare_with_xla import compare_with_xla as compare_with_xla
from .doctor import doctor as doctor
from .report.visualize import visualize as visualize
from .suggest import suggest as suggest

__all__ = ["calibrate", "compare_with_xla", "doctor", "evaluation", "suggest", "visualize"]
