"""The schedules that a pipeline takes by name."""

from __future__ import annotations

from ..errors import ShardingError, did_you_mean, user_line

# Without a loss all forwards come first, so 1F1B and zero-bubble need a loss.
SCHEDULES = ("auto", "gpipe", "circular")
WITH_LOSS = ("auto", "gpipe", "1f1b", "zero_bubble")


def check_schedule(
    schedule: str, repeats: int, microbatches: int, loss: object, memory: int | None
) -> None:
    """Raise ShardingError unless there is such a schedule."""
    names = SCHEDULES if loss is None else WITH_LOSS
    if schedule not in (*SCHEDULES, *WITH_LOSS):
        raise ShardingError(
            f"there is no schedule '{schedule}'",
            where=user_line(),
            fix=did_you_mean(schedule, dict.fromkeys((*SCHEDULES, *WITH_LOSS))),
        )
    if schedule not in names:
        raise ShardingError(
            f"schedule '{schedule}' is used with{'out' if loss is None else ''} a loss",
            where=user_line(),
            why="backwards between forwards need the loss of a microbatch, which is outside"
            if loss is None
            else "the stages of a pipeline with its loss have neighboring blocks",
            fix="pass loss=fn, and call self.blocks(x, targets=...): docs/pipelines.md"
            if loss is None
            else "leave loss= out, or schedule='zero_bubble'",
        )
    # GPipe's stages are neighboring blocks, which a second round would split.
    if (schedule == "gpipe" and repeats > 1) or min(repeats, microbatches) < 1:
        raise ShardingError(
            f"schedule '{schedule}' is used with {repeats} repeats and {microbatches} microbatches",
            where=user_line(),
            fix="use schedule='circular' for repeats, or with a loss '1f1b' or 'zero_bubble'; "
            "both numbers have to be at least 1",
        )
    if memory is not None and (loss is None or memory < 1):
        raise ShardingError(
            f"a pipeline with{'out' if loss is None else ''} a loss is given memory={memory}",
            where=user_line(),
            fix="give a number of bytes, and loss=fn: without it all forwards come before all "
            "backwards",
        )
