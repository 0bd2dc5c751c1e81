"""Metrics: sums over rows, and their values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # Target for rows that are not counted, as in torch's cross_entropy.


@dataclass(frozen=True)
class Metric:
    """A metric: sums over any rows in outputs and targets, and its value from all sums.

    Args:
        sums: A function that takes outputs and targets, and returns a tensor [count]. It is called
            with parts of a batch; its results add up to the whole batch's.
        count: How many sums there are.
        value: A function that takes the sums over all data, a float64 tensor [count] on the CPU. By
            default the first one divided by the second.
        whole: Output dimensions that targets lack, such as the classes. A part has all of these.
            The others correspond, in order, to the targets' first dimensions.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, Metric
        >>> def errors(outputs, targets):
        ...     error = (outputs - targets).double()
        ...     return torch.stack([error.square().sum(), torch.ones_like(error).sum()])
        >>> rmse = Metric(errors, 2, lambda sums: (sums[0] / sums[1]).sqrt().item())
        >>> meter = Meter({"rmse": rmse})
        >>> meter.update(torch.ones(4, 3), torch.zeros(4, 3))
        >>> meter.compute()
        {'rmse': 1.0}
    """

    sums: Callable[..., Tensor]
    count: int = 2
    value: Callable[[Tensor], Any] = field(
        default_factory=lambda: lambda sums: (sums[0] / sums[1]).item()
    )
    whole: Sequence[int] = ()


def accuracy(top: int = 1, classes: int = 1, ignored: int = IGNORED) -> Metric:
    """Return the share of targets among the best classes.

    Args:
        top: How many best classes count.
        classes: The output dimension that has class scores.
        ignored: The target in rows that do not count.

    Returns:
        A metric over scores [..., classes, ...] and class numbers [...].

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, accuracy
        >>> meter = Meter({"top-1": accuracy(), "top-2": accuracy(2)})
        >>> meter.update(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), torch.tensor([0, 1]))
        >>> meter.compute()
        {'top-1': 0.5, 'top-2': 1.0}
    """

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        best = outputs.topk(top, classes).indices if top > 1 else outputs.argmax(classes, True)
        real = targets != ignored
        right = (best == targets.unsqueeze(classes)).any(classes) & real
        return torch.stack([right.sum(), real.sum()])

    return Metric(sums, whole=(classes,))


def perplexity(classes: int | None = 1, ignored: int = IGNORED) -> Metric:
    """Return exp(mean cross entropy), which is summed in float64.

    Args:
        classes: The output dimension that has logits, or log probabilities. None: outputs are cross
            entropies already, as `reduction="none"` leaves them.
        ignored: The target in rows that do not count.

    Returns:
        A metric over logits [..., classes, ...], or losses [...], and class numbers [...].

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, perplexity
        >>> meter = Meter({"perplexity": perplexity(classes=-1)})
        >>> meter.update(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long))
        >>> round(meter.compute()["perplexity"], 6)
        8.0
    """

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        losses, real = outputs, targets != ignored
        if classes is not None:
            logits = outputs.movedim(classes, -1).flatten(0, -2)
            losses = F.cross_entropy(
                logits, targets.flatten(), ignore_index=ignored, reduction="none"
            ).view_as(targets)
        # where, not a product: an ignored loss may be NaN.
        return torch.stack([losses.double().where(real, 0).sum(), real.sum().double()])

    return Metric(
        sums,
        value=lambda sums: (sums[0] / sums[1]).exp().item(),
        whole=() if classes is None else (classes,),
    )


def mean_iou(count: int, classes: int = 1, ignored: int = IGNORED) -> Metric:
    """Return the intersection over union of best class and target, averaged over classes.

    A class that is neither predicted nor a target is left out of the mean.

    Args:
        count: How many classes there are.
        classes: The output dimension that has class scores.
        ignored: The target in rows that do not count.

    Returns:
        A metric over scores [..., classes, ...] and class numbers [...].

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, mean_iou
        >>> meter = Meter({"mean IoU": mean_iou(2)})
        >>> meter.update(torch.tensor([[[1.0, 1.0], [0.0, 2.0]]]), torch.tensor([[0, 0]]))
        >>> meter.compute()
        {'mean IoU': 0.25}
    """

    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        best, real = outputs.argmax(classes), targets != ignored
        best, targets = best[real], targets[real]
        both, found, there = (
            torch.bincount(t, minlength=count) for t in (best[best == targets], best, targets)
        )
        return torch.cat([both, found + there - both])

    def value(sums: Tensor) -> float:
        both, either = sums.view(2, count)
        return (both / either)[either > 0].mean().item()

    return Metric(sums, 2 * count, value, (classes,))


def error_rate(
    pairs: Callable[..., Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]]],
    whole: Sequence[int] = (1,),
) -> Metric:
    """Return the number of edits from targets to predictions, per target item.

    An edit puts in, leaves out or changes one item. For word lists that is the word error rate.

    Args:
        pairs: A function that takes outputs and targets and returns, for each row, the prediction
            and the target: two sequences of words, letters or numbers.
        whole: Output dimensions that a sequence runs over, and the class dimensions.

    Returns:
        A metric over the arguments of `pairs`. It is computed on the CPU, by every process for its
        rows.

    Example:
        >>> import torch
        >>> from torchgspmd.tools.evaluation import Meter, error_rate
        >>> def words(outputs, targets):
        ...     return zip(outputs.tolist(), targets.tolist())
        >>> meter = Meter({"word error rate": error_rate(words)})
        >>> meter.update(torch.tensor([[1, 2, 3, 5]]), torch.tensor([[1, 3, 4, 5]]))
        >>> meter.compute()
        {'word error rate': 0.5}
    """

    def sums(*tensors: Tensor) -> Tensor:
        total = items = 0
        for predicted, target in pairs(*tensors):
            total, items = total + edits(predicted, target), items + len(target)
        return torch.tensor([total, items])

    return Metric(sums, whole=whole)


def edits(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Count the items to put in, leave out or change, to get from a to b."""
    # One row of the table of distances is enough (Wagner and Fischer, 1974).
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            last, row[j + 1] = row[j + 1], min(row[j + 1] + 1, row[j] + 1, last + (x != y))
    return row[-1]
