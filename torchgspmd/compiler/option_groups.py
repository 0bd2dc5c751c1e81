"""Groups of options: mappings of settings that have one purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

from ..comm.collective import CARRIERS
from ..errors import ShardingError
from ..fx_passes.units import parse_size

T = TypeVar("T")
Unmarked = Literal["propagated", "replicated"]
Rng = Literal["global", "native"]
Regather = Literal["auto", "always", "all", "never"]
Recompute = Literal["model", "auto"]
Offload = Literal["never", "activations"]
Check = Literal["always", "first", "never"]
Pin = Literal["user", "all", "none"]

PLANNED = "plan parallelize"


def option(default: T, readers: str, doc: str) -> T:
    """Return a field for Options. readers: their names, as in Reader."""
    return cast(T, field(default=default, metadata={"readers": (*readers.split(),), "doc": doc}))


@dataclass(frozen=True)
class MemorySettings:
    """How the peak of a device's memory is kept low."""

    recompute: Recompute = option(
        "model",
        PLANNED,
        'Values of the forward that the backward computes again: "model": those of checkpoints; '
        '"auto": besides, those that take least time, until the peak of a device fits the budget.',
    )
    offload: Offload = option(
        "never",
        PLANNED,
        'Whether values of the forward wait for the backward on the host: "never", or '
        '"activations", until the peak of a device fits the budget. With recompute="auto" those '
        "for which that takes less time than computing them again.",
    )
    budget: int | str | None = option(
        None,
        PLANNED,
        'Bytes of a device that the peak of a run may have: a number, or a text such as "8GiB". '
        "None: those of the device or of hardware, without two float32 values a parameter for an "
        "optimizer.",
    )

    @property
    def bytes(self) -> int | None:
        """The budget as a number; None for the device's own, or if it is no size."""
        return parse_size(self.budget)

    def check(self) -> None:
        if self.budget is None:
            return
        if self.recompute != "auto" and self.offload == "never":
            raise ShardingError.here(
                "memory has a budget, and nothing keeps to it",
                fix='set recompute="auto" or offload="activations" as well',
            )
        if self.bytes is None or self.bytes <= 0:
            raise ShardingError.here(
                f"the memory budget is {self.budget!r}",
                fix='give bytes, or a text such as "8GiB" or "500 MB"; None for its memory',
            )


@dataclass(frozen=True)
class CheckSettings:
    """Checks of the plan, of arguments and of values that ranks share."""

    arguments: Check = option(
        "always",
        "parallelize",
        'When ranks compare the values of plain tensor arguments. "always": at every call, by '
        'checksums over all integers and small tensors and samples from large ones. "first": at '
        'each program\'s first call. "never": later calls do not compare programs either. On GPUs '
        "each eighth call is compared, and no rank waits (docs/gpu.md).",
    )
    audit: int | None = option(
        None,
        "parallelize",
        "Compare the values that ranks share at each k-th call. If one rank has other bits in a "
        "weight or optimizer state, a RankError names both. It also names a loss or gradient norm "
        "that differs, and NaN. None: never.",
    )
    verify: bool = option(
        False,
        PLANNED,
        "Check each value of a new plan against the one-device program, as Plan.verify does. "
        "It takes about as long as planning, and memory for all devices' values.",
    )

    def check(self) -> None:
        # bool is a subclass of int: audit=True would compare at every call.
        if self.audit is not None and (type(self.audit) is not int or self.audit < 1):
            raise ShardingError.here(
                f"audit is {self.audit!r}",
                fix="give the calls from one comparison to the next, 1 or more, such as "
                'check={"audit": 100}; None for never',
            )


@dataclass(frozen=True)
class AdvancedSettings:
    """Settings that ordinary programs leave as they are."""

    rng: Rng = option(
        "global",
        PLANNED,
        '"global": random numbers are those on one device, by an element\'s position; all ranks '
        'need the same torch.manual_seed. "native": they are PyTorch\'s, and each shard draws '
        "its own.",
    )
    regather: Regather = option(
        "auto",
        PLANNED,
        'Whether the backward gathers weights again: "always", "never" (they are kept), or "auto": '
        'if a GPU\'s memory would not suffice otherwise. "all": activations too, such as a long '
        "context's keys.",
    )
    unmarked: Unmarked = option(
        "propagated",
        "plan",
        'Layouts of parameters and buffers without a mark: chosen by propagation ("propagated"), '
        'or "replicated", as parallelize stores them.',
    )
    skip_passes: Iterable[str] = option(
        (),
        PLANNED,
        'Passes to leave out, such as "prefetch"; the same on all ranks. docs/schedule.md has the '
        "names.",
    )
    costs: Mapping[str, float] | None = option(
        None,
        PLANNED,
        "Other values for the cost model's constants, by name, the same on all ranks; "
        "docs/debugging_a_layout.md lists them.",
    )
    carriers: Iterable[str] = option(
        (),
        "parallelize",
        'Libraries that carry messages of GPUs where they can: "symmetric_memory" (products with a '
        'gathered operand or a scattered result), "deep_ep" (rows of experts); docs/gpu.md.',
    )
    pin: Pin = option(
        "user",
        "xla",
        'The layouts that XLA gets besides those for inputs and results: the marks ("user"), every '
        'layout that our partitioner chose ("all"), or nothing ("none").',
    )

    def check(self) -> None:
        for carrier in self.carriers:
            check_choice("carrier", carrier, CARRIERS)


Group = MemorySettings | CheckSettings | AdvancedSettings


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ShardingError for a value outside a closed set."""
    if value not in choices:
        raise ShardingError.here(
            f"there is no {name} '{value}'; there are {', '.join(map(repr, choices))}"
        )
