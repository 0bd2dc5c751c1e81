"""Names for frames of generated code, in dumps of the flight recorder and of CUDA's memory.

before   {"filename": "<torchgspmd forward>.1f0c...", "line": 31, "name": "forward"}
after    "name": "all_reduce__default of %up_r: all_reduce einsum_1, 64 B, model: up at train.py:41"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..comm.profiled_code import all_lines, key_of
from ..errors import ShardingError

FrameNames = Mapping[str, Mapping[str, str]]
T = TypeVar("T")


def frame_names() -> dict[str, dict[str, str]]:
    """Return a name for each line of this process's programs, to name a dump elsewhere.

    Call it after the first step, which compiles the programs. Ranks may have different programs,
    so that each writes its own.

    Returns:
        Names by file of generated code and line; `json.dump` writes them.

    Example:
        >>> import json, torchgspmd
        >>> text = json.dumps(torchgspmd.frame_names())
    """
    return {
        key: {str(number): row.text for number, row in lines.rows.items()}
        for key, lines in all_lines().items()
    }


def name_frames(dump: T, names: FrameNames | None = None) -> T:
    """Return a dump whose frames of generated code are named by the plan.

    A name has the node, the collective as profiles name it, the module, and your line. Frames of
    other files stay as they are: Python's, C++'s, and those of Inductor's kernels, which compute
    several nodes.

    Args:
        dump: Entries of the flight recorder, or a snapshot of CUDA's memory: dicts and lists, as
            loaded from pickle or JSON. It is not changed. Load a pickle only from your own
            processes, since loading runs code.
        names: `frame_names()` of the process that wrote the dump. None: this process's, which are
            the same where it has compiled the same programs.

    Returns:
        The dump, with other names.

    Raises:
        ShardingError: The dump has frames of generated code, and no program is known.

    Example:
        >>> entry = {"frames": [{"filename": "train.py", "line": 9, "name": "step"}]}
        >>> name_frames([entry]) == [entry]
        True
    """
    naming = _Naming(frame_names() if names is None else names)
    named = naming.named(dump)
    if naming.unknown and not naming.is_known:
        raise ShardingError.here(
            f"no frame of the dump is of a known program: {sorted(naming.unknown)[0]} and "
            f"{len(naming.unknown) - 1} more are not",
            why="the process that wrote it had other programs"
            if naming.names
            else "this process has compiled no program",
            fix="write json.dump(torchgspmd.frame_names(), file) there after the first step, and "
            "pass its content as names=",
        )
    return named


class _Naming:
    """Names the frames of one dump. unknown: files of generated code that have no names."""

    def __init__(self, names: FrameNames) -> None:
        self.names, self.unknown, self.is_known = names, set[str](), False
        # Entries of a dump share lists of frames: they share those with names, too.
        self.done: dict[int, object] = {}

    def named(self, value: object) -> Any:
        if isinstance(value, dict):
            if {"filename", "line", "name"} <= value.keys():
                key = key_of(str(value["filename"]))
                if not key:
                    return value
                if key not in self.names:
                    self.unknown.add(key)
                    return value
                self.is_known = True
                return {**value, "name": self.names[key].get(str(value["line"]), value["name"])}
            return {key: self.named(part) for key, part in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        if id(value) not in self.done:
            parts = [self.named(part) for part in value]
            self.done[id(value)] = parts if isinstance(value, list) else tuple(parts)
        return self.done[id(value)]
