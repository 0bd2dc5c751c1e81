"""The numbers that an optimizer's own step counts, in the state_dict of a train_step.

    state["step"] += 1      of a parameter
    group["k"] += 1         of a group
    self.calls += 1         of the optimizer

They are no buffers. Without them a run that goes on would count from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from ..errors import ShardingError
from .own_step import FirstStates, is_plain

_KEY = "_extra_state"  # as that of get_extra_state: full_state_dict and checkpoints know it


class Counting(Protocol):
    """A train step. Lists are by optimizer.

    names: of the parameters, by group. kept: by parameter, and common: of none, the states that are
    no buffers. loaded: the optimizers whose state_dict was loaded before the step's.
    """

    optimizers: Sequence[Optimizer]
    names: list[list[list[str]]]
    kept: dict[str, dict[Any, Any]]
    common: list[dict[Any, Any]]
    counted: list[FirstStates | None]
    loaded: set[int]


def save_counts(step: Counting, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add the numbers, and the names of the states that only the optimizer's state_dict has."""
    numbers = {
        name: {key: table[key] for key in keys if key in table and is_plain(table[key])}
        for name, table, keys in _tables(step)
    }
    others = {
        name: [key for key, value in table.items() if not is_plain(value)]
        for name, table in step.kept.items()
    }
    counts = {
        "numbers": {name: entries for name, entries in numbers.items() if entries},
        "others": {name: keys for name, keys in others.items() if keys},
    }
    if any(counts.values()):
        state[prefix + _KEY] = counts


def load_counts(step: Counting, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Set the numbers that `save_counts` has added.

    Raises:
        ShardingError: There are states that only the optimizer's state_dict has, and it has not
            been loaded.
    """
    counts = state.pop(prefix + _KEY, {"numbers": {}, "others": {}})
    for optimizer, groups in zip(step.optimizers, step.names):
        name = next((n for group in groups for n in group if n in counts["others"]), None)
        if name is not None and id(optimizer) not in step.loaded:
            raise ShardingError.here(
                f"the states {', '.join(map(repr, counts['others'][name]))} of '{name}' are not in "
                "the step's state_dict",
                why="they are lists or tables, or the first step creates them: the optimizer's "
                "state_dict has them",
                fix="load the optimizer's state_dict before the step's",
            )
    step.loaded.clear()
    for name, table, _keys in _tables(step):
        table.update(counts["numbers"].get(name, {}))


def _tables(step: Counting) -> Iterator[tuple[str, dict[Any, Any], Sequence[str]]]:
    """Yield each table with counted numbers: its name, itself, and the names of the numbers."""
    for name, table in step.kept.items():
        yield f"state {name}", table, [*table]
    for i, (optimizer, counted) in enumerate(zip(step.optimizers, step.counted)):
        if counted is not None:
            for j, (group, names) in enumerate(zip(optimizer.param_groups, counted.groups)):
                yield f"group {i} {j}", group, names
            yield f"optimizer {i}", vars(optimizer), counted.attributes
            yield f"common {i}", step.common[i], [*step.common[i]]
