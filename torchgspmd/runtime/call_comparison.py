"""Comparison of one call of a sharded module between the ranks: what is compared, and when.

    the CPU    each call, before its program sends anything; the result may travel with a sum
    a GPU      the first call of a program so; later ones by messages that nobody waits for

check="never": the first call of a program alone.
"""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.late_check import Call, late_checks
from ..comm.process_groups import ProcessGroups
from ..comm.rank_check import RankCheck
from ..comm.rank_mismatch import check_values
from ..comm.value_check import Reading, checksums_of
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
