"""Evaluation on a mesh: metrics as on one device, for data sets of any size.

    scores = evaluate(model, batches, {"top-1": accuracy(), "top-5": accuracy(5)})

Every data row is counted once, by one device that has it. Sums stay on the devices until the end,
when one small all_reduce adds them up. Rows that fill up the last batch are not counted. Source:
distributed evaluation in arXiv 2011.03641.
"""

from .meter import Meter, evaluate, pad_rows
from .metrics import Metric, accuracy, error_rate, mean_iou, perplexity

__all__ = [  # Type checkers treat other imported names as private.
    "Meter",
    "Metric",
    "accuracy",
    "error_rate",
    "evaluate",
    "mean_iou",
    "pad_rows",
    "perplexity",
]

PUBLIC = (Meter, Metric, accuracy, error_rate, evaluate, mean_iou, pad_rows, perplexity)
