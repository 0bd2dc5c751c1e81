"""Every option of plan, parallelize, suggest and the command line: name, type, default, meaning."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

import torch

from ..capture import ArgumentSizes, Dims, check_dtypes
from ..capture.rewrites.microbatches import check_count
from ..comm.hardware import Hardware
from ..comm.json_rows import field_types
from ..errors import ShardingError, did_you_mean
from .agreement import Agreement
from .option_groups import (
    PLANNED,
    AdvancedSettings,
    CheckSettings,
    Group,
    MemorySettings,
    check_choice,
    option,
)

Reader = Literal["plan", "parallelize", "xla", "suggest"]  # "xla": parallelize(backend="xla")
# Keyword arguments besides options, which a misspelt name may mean.
NAMED: dict[str, tuple[str, ...]] = {
    "plan": ("mesh", "in_specs", "out_specs"),
    "parallelize": ("mesh", "in_specs", "out_specs", "plan"),
    "suggest": ("devices", "hardware", "memory", "seconds", "kwargs"),
}

Backend = Literal["torch", "inductor", "cudagraphs", "inductor+cudagraphs", "xla"]
Communication = Iterable[str] | str | Path | Agreement | None
Dynamic = bool | Mapping[str, Dims] | ArgumentSizes | None


@dataclass(frozen=True)
class Options:
    """All options for one module or plan.

    Each field is stated once, here: documentation, checks and the command line read this table.
    """

    backend: Backend = option(
        "torch",
        "parallelize xla",
        '"torch" runs the program operation by operation, "inductor" compiles it. "cudagraphs" and '
        '"inductor+cudagraphs" capture that in CUDA graphs (docs/gpu.md). "xla" needs no process '
        "group: parameters become XLA tensors, and XLA partitions the program.",
    )
    grad: bool = option(
        False, "plan", "Compile forward and backward together. fn is a module then."
    )
    strict: bool = option(
        False,
        "plan parallelize",
        "Raise an error where plan.replicated_ops would list an operation.",
    )
    communication: Communication = option(
        None,
        "plan parallelize",
        "The collectives that a program may send; anything else is an error before a byte is sent. "
        'A row is a kind, axes, modules and bytes: "all_reduce model *.down 1GiB". In place of '
        'rows: a file of Plan.check, or "explicit" for those that the source names by reshard, and '
        "the backward (docs/communication.md).",
    )
    memory: MemorySettings = option(
        MemorySettings(),
        PLANNED,
        'How the peak of a device\'s memory is kept low. A size, such as "8GiB", is '
        '{"budget": "8GiB", "recompute": "auto"}.',
    )
    microbatches: int = option(
        1,
        "plan parallelize xla",
        "Parts that a training module's batch is divided into. Forward and backward run for one "
        "after the other, and parameter gradients are reduced once. The module returns its mean "
        "loss, alone or first; tensor arguments with as many rows as the first one are divided.",
    )
    param_dtype: torch.dtype | None = option(
        None,
        "plan parallelize xla suggest",
        "The dtype to compute in, such as torch.bfloat16. Floating parameters and arguments are "
        "cast to it, parameters before they are gathered. Parameters, their gradients and "
        "optimizer states keep their own dtype.",
    )
    reduce_dtype: torch.dtype | None = option(
        None,
        "plan parallelize suggest",
        "The dtype in which parameter gradients are summed over devices, such as "
        "torch.float32; by default the one that sends least.",
    )
    hardware: Hardware | str | None = option(
        None,
        "plan parallelize",
        'Device speeds and links, a name ("h100") or a Hardware. Sums over axes that leave '
        "a host are reduced within hosts first, where that takes less time, and collectives are "
        "scheduled by these numbers. None: round numbers, and the processes' hosts.",
    )
    dynamic: Dynamic = option(
        True,
        "plan parallelize",
        "Whether calls that differ in sizes share a program. True: from a dimension's second "
        "size on; a plan, which is for one call, has none. False: never. A mapping names "
        'dimensions that differ from call to call, by argument, as {"tokens": {1}}; a name may '
        "be a pattern. Sizes that are equal here are one size, unless they have names: "
        '{"tokens": {1: "length"}}.',
    )
    shard_updates: str | Literal[False] | None = option(
        None,
        "plan parallelize xla",
        'An axis, such as "data". Every parameter, its gradient and its optimizer state are stored '
        "sharded over that axis besides their mark (ZeRO; arXiv 2004.13336). None: the states of "
        "`train_step` alone, where that sends less, as with Muon. False: none.",
    )
    timeout: float | timedelta | None = option(
        None,
        "parallelize",
        "Seconds, or a timedelta, after which a rank that waits for others raises. It becomes the "
        "limit for the mesh's process groups; a one-axis mesh has the default group. None: as "
        "init_process_group has set it. Before that, ranks report on stderr for whom they wait.",
    )

    check: CheckSettings = option(
        CheckSettings(),
        PLANNED,
        'Checks of the plan and of the ranks. A text, such as "first", is {"arguments": "first"}.',
    )
    advanced: AdvancedSettings = option(
        AdvancedSettings(), f"{PLANNED} xla", "Settings that ordinary programs leave as they are."
    )

    @classmethod
    def read(cls, reader: Reader, given: Mapping[str, Any]) -> Options:
        """Return the options given to a function, checked against this table."""
        known = [row.name for row in rows_for(reader)]
        chosen = dict[str, Any](_in_groups(given))
        for name in chosen:
            if name not in known:
                raise ShardingError.here(
                    f"{reader} has no option '{name}'",
                    fix=did_you_mean(name, [*known, *NAMED.get(reader, ())]),
                )
        for name in GROUPS.keys() & chosen.keys():
            chosen[name] = _group(reader, name, chosen[name])
        chosen["communication"] = Agreement.of(chosen.get("communication"))
        options = cls(**chosen)
        options._check()
        return options

    def _check(self) -> None:
        for owner in (self, self.memory, self.check, self.advanced):
            for row in ROWS[type(owner)]:
                if row.choices:
                    check_choice(row.name, getattr(owner, row.name), row.choices)
        self.memory.check()
        self.check.check()
        self.advanced.check()
        if self.shard_updates is True:
            raise ShardingError.here(
                "shard_updates is True",
                fix='name an axis, such as "data"; None: the planner decides about states',
            )
        check_dtypes(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        check_count(self.microbatches)
        limit = self.time_limit
        if limit is not None and limit <= timedelta():
            raise ShardingError.here(
                f"timeout is {limit.total_seconds():g} s",
                fix="give seconds or a timedelta, more than 0; None for that of init_process_group",
            )

    def check_backend(self) -> None:
        """Raise ShardingError for an option that the backend does not read."""
        if self.compiler == "inductor" and self.memory.offload != "never":
            raise ShardingError.here(
                f"backend '{self.backend}' cannot offload",
                why="Inductor compiles no copies to the memory of the host",
                fix='set backend="torch", or memory={"recompute": "auto"} alone',
            )
        if self.captures and isinstance(self.dynamic, Mapping):
            raise ShardingError.here(
                f"backend '{self.backend}' has no option dynamic",
                why="each size has a program and CUDA graphs of its own",
                fix="leave it out, and pad arguments to a few sizes",
            )
        reader = "xla" if self.backend == "xla" else "parallelize"
        for owner in (self, self.memory, self.check, self.advanced):
            for row in ROWS[type(owner)]:
                if reader not in row.readers and _is_set(owner, row):
                    raise ShardingError.here(f"backend '{self.backend}' has no option {row.name}")

    @property
    def compiler(self) -> str:
        """The compiler of a rank's program: "torch" or "inductor"."""
        return "inductor" if self.backend.startswith("inductor") else "torch"

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs run the program."""
        return self.backend.endswith("cudagraphs")

    @property
    def time_limit(self) -> timedelta | None:
        seconds = self.timeout
        return timedelta(seconds=seconds) if isinstance(seconds, (int, float)) else seconds

    def precision(self) -> dict[str, torch.dtype]:
        """Return the dtypes that are set, by name."""
        dtypes = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype}
        return {name: dtype for name, dtype in dtypes.items() if dtype is not None}

    def of_plan(self) -> dict[str, Any]:
        """Return the options that a plan depends on, by name.

        A call's key covers the others.
        """
        # These change no plan, or are in the key of a call.
        beside = ("timeout", "dynamic", *GROUPS)
        found = {row.name: getattr(self, row.name) for row in OPTIONS if row.name not in beside}
        found |= {**vars(self.memory), **vars(self.advanced), "verify": self.check.verify}
        del found["carriers"]
        return found


GROUPS: dict[str, type[Group]] = {
    "memory": MemorySettings,
    "check": CheckSettings,
    "advanced": AdvancedSettings,
}
# What a value means that is no mapping.
_SHORT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "memory": lambda size: {"budget": size, "recompute": "auto"},
    "check": lambda when: {"arguments": when},
}


def _is_set(owner: object, row: Option) -> bool:
    value = getattr(owner, row.name)
    if row.name == "dynamic":  # XLA compiles a program for each size, as False asks for
        return isinstance(value, Mapping)
    if row.name in GROUPS:  # Its own rows are read by the backend, or not.
        return False
    return bool(value) if row.default == () else value != row.default


def _in_groups(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those that had names of their own before 0.3 in their groups."""
    found = {name: value for name, value in given.items() if name not in MOVED}
    for old, value in given.items():
        if old not in MOVED:
            continue
        group, name = MOVED[old]
        shown = f'{group}={{"{name}": ...}}'
        warnings.warn(
            f"the option {old}= is {shown} from now on; the next release has only that",
            FutureWarning,
            stacklevel=4,
        )
        found[group] = {**_mapping(group, found.get(group, {})), name: value}
    return found


def _mapping(group: str, value: Any) -> Mapping[str, Any]:
    """Return a group's settings by name."""
    if isinstance(value, GROUPS[group]):
        return vars(value)
    if isinstance(value, Mapping):
        return value
    if value is not None and group in _SHORT:
        return _SHORT[group](value)
    raise ShardingError.here(
        f"{group} is {value!r}", fix=f'give a mapping, such as {group}={{"{_first(group)}": ...}}'
    )


def _first(group: str) -> str:
    return fields(GROUPS[group])[0].name


def _group(reader: Reader, group: str, value: Any) -> Group:
    """Return a group's settings, checked against its table."""
    given = _mapping(group, value)
    known = [row.name for row in rows_of(GROUPS[group], reader)]
    if isinstance(value, GROUPS[group]):
        return value
    for name in given:
        if name not in known:
            raise ShardingError.here(
                f"{group} of {reader} has no setting '{name}'", fix=did_you_mean(name, known)
            )
    return GROUPS[group](**given)


class Option(NamedTuple):
    """One table row. choices: the values in a closed set, else empty."""

    name: str
    type: str
    default: object
    choices: tuple[str, ...]
    readers: tuple[str, ...]
    doc: str

    def backends(self) -> str:
        """Name the parallelize backends that read the option, if not all do."""
        if "parallelize" not in self.readers:
            return ' For "xla" alone.' if "xla" in self.readers else ""
        return "" if "xla" in self.readers else ' Not for "xla".'


def _rows(owner: type) -> Iterator[Option]:
    types = field_types(owner)
    for each in fields(owner):
        choices = get_args(types[each.name]) if get_origin(types[each.name]) is Literal else ()
        yield Option(each.name, str(each.type), each.default, choices, **each.metadata)


ROWS = {owner: (*_rows(owner),) for owner in (Options, *GROUPS.values())}
OPTIONS = ROWS[Options]
# Options that had names of their own before 0.3: group and name.
MOVED = {
    "memory_budget" if row.name == "budget" else row.name: (group, row.name)
    for group, owner in GROUPS.items()
    for row in ROWS[owner]
    if row.name != "arguments"
}


def rows_for(reader: Reader) -> list[Option]:
    """List the options that a function reads; parallelize takes those for all backends."""
    return rows_of(Options, reader)


def settings_for(reader: Reader) -> Iterator[tuple[str, Option]]:
    """Yield each option or setting that a function reads: its group, "" for none, and row."""
    for row in rows_for(reader):
        if row.name not in GROUPS:
            yield "", row
        else:
            yield from ((row.name, each) for each in rows_of(GROUPS[row.name], reader))


def is_an_option(name: str, value: object, is_argument: bool) -> bool:
    """Whether plan takes a keyword for itself, though the planned function may have such a name.

    A TransformerDecoder's `memory` is a tensor.
    """
    if name in GROUPS and is_argument:
        return isinstance(value, (str, int, Mapping, GROUPS[name]))
    if name in MOVED:
        group, name = MOVED[name]
        return any(row.name == name for row in rows_of(GROUPS[group], "plan"))
    return any(row.name == name for row in rows_for("plan"))


def rows_of(owner: type, reader: Reader) -> list[Option]:
    """List the rows that a function reads: options, or the settings in a group of them."""
    readers = {reader, "xla"} if reader == "parallelize" else {reader}
    return [row for row in ROWS[owner] if readers.intersection(row.readers)]


# The table of options as texts: in signatures and docstrings.

F = TypeVar("F", bound=Callable[..., object])


def documented(reader: Reader) -> Callable[[F], F]:
    """Write a function's options into its signature and its docstring.

    The docstring has a line "{options}" where they belong.
    """

    def decorate(function: F) -> F:
        # **kwargs hides the options from help(): the signature names them, as if they stood there.
        signature = inspect.signature(function)
        *named, last = signature.parameters.values()
        rows = rows_for(reader)
        options = [
            inspect.Parameter(
                row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=row.type
            )
            for row in rows
        ]
        rest = [last] if last.name == "kwargs" else []
        document = cast(Any, function)  # a function has more attributes than its type says
        document.__signature__ = signature.replace(parameters=[*named, *options, *rest])
        document.__doc__ = str(function.__doc__).replace(
            "        {options}", "\n".join(_paragraph(row, reader) for row in rows)
        )
        return function

    return decorate


def _paragraph(row: Option, reader: Reader, indent: int = 8) -> str:
    text = f"{row.name}: {row.doc}{row.backends() if reader == 'parallelize' else ''}"
    first = textwrap.fill(
        text, 100, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)
    )
    inner = rows_of(GROUPS[row.name], reader) if row.name in GROUPS else ()
    return "\n".join([first, *(_paragraph(each, reader, indent + 4) for each in inner)])
