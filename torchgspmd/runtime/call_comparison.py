"""Comparison of one call of a sharded module between the ranks: what is compared, and when.

    the CPU    each call, before its program sends anything; the result may travel with a sum
    a GPU      the first call of a program so; the numbers of later ones are added up, and each
               EVERY-th call sends the sum, with checksums of its arguments, and reads the answer
               to the last message

check="never": the first call of a program alone.

A GPU's message is an all_reduce of 32 bytes on the device, in a group that programs use too.
Nothing in it passes through the host: a program may run ahead of the device by EVERY calls. Within
the capture of a CUDA graph nothing is compared.

Ranks whose calls differ exchange descriptions of them, and raise the same error. A rank that
compares a new program, while others run theirs, is found by the watcher (comm/watcher.py).
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck, all_gather_rows, check_values
from ..comm.value_check import ROUNDING, Reading, checksums_of, double_of, moved
from ..errors import RankError
from .joint_program import JointProgram
from .mesh_module import ModuleCall


def compared(
    groups: ProcessGroups,
    program: JointProgram,
    call: ModuleCall,
    check: str,
    raise_difference: Callable[..., Any],
) -> RankCheck:
    """Return the comparison that a call waits for, and note the call for one that it does not.

    raise_difference: a method that takes a call, the state of the generator and varying numbers.
    """
    on_gpu, is_first = groups.device_type == "cuda", not program.checked
    tensors = [t for t in call.leaves if isinstance(t, Tensor)]
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes()) if program.draws else None
    number = _number(program, call) ^ (state or 0)

    def read() -> list[Reading]:
        return program.values.read(tensors) if check == "always" else []

    is_late = on_gpu and not is_first
    if is_late and check != "never":
        noted = Call(number, _later(raise_difference, call, state))
        late_checks(groups).add(groups, noted, read)
    # Values of the first call were compared when the program was built.
    values = {} if on_gpu else checksums_of(read())
    return RankCheck(
        groups,
        number,
        lambda: raise_difference(call, state),
        values,
        lambda: check_values(groups, values),
        compares=is_first or check != "never" and not is_late,
    )


def _number(program: JointProgram, call: ModuleCall) -> int:
    """Return a number that differs with the program, its varying numbers and its sizes."""
    number = program.signature
    if program.takes_numbers:
        number ^= hash_of(str(program.captured.numbers()))
    if call.sizes.dims:
        number ^= hash_of(str(call.sizes.values(call.shapes)))
    return number


def _later(
    raise_difference: Callable[..., Any], call: ModuleCall, state: int | None
) -> Callable[[], None]:
    """Return a function that raises the difference of a call that is over: it holds no tensor."""
    method, numbers = weakref.WeakMethod(raise_difference), dict(call.numbers)
    call = call._replace(passed=((), {}), args=(), kwargs={}, leaves=[])

    def raise_later() -> None:
        if (raises := method()) is not None:
            raises(call, state, numbers=numbers)

    return raise_later


def hash_of(text: str) -> int:
    """Return 56 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


EVERY = 8  # Calls from one message to the next.
_ODD, _MASK, _SIGN = 0x1E3779B97F4A7C15, 2**62 - 1, 2**63 - 1


class Call(NamedTuple):
    """A call that is compared later. on_difference: raises, on every rank, if numbers differ."""

    number: int
    on_difference: Callable[[], object]


class LateChecks:
    """A rank's calls since the last message, and the message on its way.

    It holds no groups, since they hold it.
    """

    def __init__(self) -> None:
        self.calls = list[Call]()
        self.sent: _Message | None = None

    def add(self, groups: ProcessGroups, call: Call, read: Callable[[], Sequence[Reading]]) -> None:
        """Note a call; each EVERY-th one sends a message. read: begins to read its arguments."""
        if groups.is_fake or _is_capturing():
            return
        self.calls.append(call)
        if self.sent is not None and len(self.calls) < EVERY:
            return
        calls, self.calls = self.calls, []
        sent, self.sent = self.sent, None
        if sent is not None and sent.differs(groups):
            sent.raise_difference(groups)
        self.sent = _Message(groups, calls, read())


def late_checks(groups: ProcessGroups) -> LateChecks:
    """Return those of a mesh."""
    if groups.late_checks is None:
        groups.late_checks = LateChecks()
    return groups.late_checks


class _Message:
    """One all_reduce: the largest of a word and a double of all ranks, and the smallest."""

    def __init__(
        self, groups: ProcessGroups, calls: Sequence[Call], readings: Sequence[Reading]
    ) -> None:
        self.calls, self.readings = calls, readings
        device, total = groups.device, 0
        for call in calls:
            total = (total * _ODD + call.number) & _MASK
        exact, double = torch.tensor(total), torch.zeros((), dtype=torch.float64)
        words = [(exact, double), *(reading.words() for reading in readings)]
        exact = torch.stack([moved(word, device) for word, _ in words]).sum()
        bits = torch.stack([moved(part, device) for _, part in words]).sum().view(torch.int64)
        bits = torch.where(bits >= 0, bits, bits ^ _SIGN)  # as `ordered` does
        self.words = torch.stack([exact, ~exact, bits, ~bits])
        self.work: Any = dist.all_reduce(
            self.words, dist.ReduceOp.MAX, group=groups.of_all(), async_op=True
        )
        self.event: Any = None
        if device.type == "cuda":
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        """Copy the words to the host as soon as they are there, on a stream of their own."""
        with torch.cuda.stream(torch.cuda.Stream(self.words.device)):
            self.work.wait()  # lets the stream wait, not the host
            host = torch.empty_like(self.words, device="cpu", pin_memory=True)
            self.device_words, self.words = self.words, host.copy_(self.words, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def differs(self, groups: ProcessGroups) -> bool:
        """Wait until all ranks have sent theirs, and return whether they differ."""
        groups.watcher.run(self._arrive)
        groups.watcher.end_comparison()
        top, bottom, high, low = self.words.tolist()
        count = sum(len(reading.floats) for reading in self.readings)
        return (
            top != ~bottom
            or double_of(ordered(high)) - double_of(ordered(~low)) > 2 * ROUNDING * count
        )

    def _arrive(self) -> None:
        if self.event is None:
            self.work.wait()
        else:
            self.event.synchronize()

    def raise_difference(self, groups: ProcessGroups) -> None:
        """Raise, on every rank, the error for the first call that differs."""
        numbers = all_gather_rows(groups, [call.number for call in self.calls])
        for call, row in zip(self.calls, zip(*numbers)):
            if len({*row}) > 1:
                self._say_when(call.on_difference)
        if len({*map(len, numbers)}) > 1:
            self._say_when(self.calls[-1].on_difference)
        self._say_when(lambda: check_values(groups, checksums_of(self.readings)))

    def _say_when(self, raises: Callable[[], object]) -> None:
        """Call a function that raises a RankError, and add that its call was an earlier one."""
        try:
            raises()
        except RankError as error:
            late = f"found up to {2 * EVERY} calls later, since GPUs do not wait for the comparison"
            why = f"{error.why}; {late}" if error.why else late
            raise RankError(error.what, where=error.where, why=why, fix=error.fix) from None


def ordered(bits: int) -> int:
    """Return an integer that orders a double's bits as the numbers are; its own inverse."""
    return bits if bits >= 0 else bits ^ (2**63 - 1)


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured: nothing that it runs may be waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
