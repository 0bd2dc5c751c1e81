"""DualPipeV: a device pairs a forward of one stage with a backward of its other stage in a V.

    steps of device d of p        pieces, 0 and 1 are the device's first and its second stage
    2 (p - d - 1)                 F0
    d + 1                         F0 F1
    p - d - 1                     B1 W1 F1                 weight gradients fill the gap
    m - 2 p + d + 1               F0 + B1 W1, F1 + B0 W0   pairs
    p - d - 1                     B1 W1, F1 + B0 W0
    d + 1                         B1 B0                    the second half without their W
    p - d - 1                     W B0
    the rest                      W

A pair is of two microbatches, of which neither waits for the other. Where messages inside of a
piece (tokens to experts) take time, a pair is one program, in which they travel beside the other's
products (join_stages.py). The bubble is (p - 1)(F + B - W), for the pieces of one stage. A device
keeps 2 p + 1 activations.

source   DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) and its repository DualPipe, whose V is half
         of DualPipe. torch.distributed.pipelining calls it ScheduleDualPipeV.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from .schedule import Piece, Steps

ROUNDS = 2


def dual_pipe(devices: int, microbatches: int) -> list[list[Piece]]:
    """Return each device's pieces in order, for as many microbatches as stages or more."""
    return [_Device(device, devices, microbatches).run() for device in range(devices)]


def pairs(pieces: Sequence[Piece]) -> Steps:
    """Return a device's pieces, with those of a pair together: F, B, and its W if it follows."""
    steps: list[list[Piece]] = []
    for piece in pieces:
        last = steps[-1] if steps else list[Piece]()
        kinds = "".join(x.kind for x in last)
        is_beside = kinds == "F" and piece.kind == "B" and piece.stage != last[0].stage
        is_last = kinds == "FB" and piece == Piece("W", last[1].stage, last[1].microbatch)
        if is_beside or is_last:
            last.append(piece)
        else:
            steps.append([piece])
    return steps


class _Device:
    """One device's pieces. later: weight gradients that have not been computed."""

    def __init__(self, device: int, devices: int, microbatches: int) -> None:
        self.stages = device, 2 * devices - 1 - device
        self.before, self.after = device + 1, devices - device - 1
        self.pairs = microbatches - 2 * devices + device + 1
        self.count, self.pieces = Counter[tuple[str, int]](), list[Piece]()
        self.later: deque[Piece] = deque()

    def run(self) -> list[Piece]:
        for _ in range(2 * self.after):
            self._do("F", 0)
        for _ in range(self.before):
            self._do("F", 0)
            self._do("F", 1)
        for _ in range(self.after):
            self._back(1, is_whole=False)
            self._weights()
            self._do("F", 1)
        for _ in range(self.pairs):
            for ahead in (0, 1):
                self._do("F", ahead)
                self._back(1 - ahead)
        for _ in range(self.after):
            self._back(1)
            self._do("F", 1)
            self._back(0)
        # From the middle on weight gradients wait for gaps: of B1 B0 B1 B0 ..., all in order.
        for i in range(2 * self.before):
            self._back(1 - i % 2, is_whole=i < self.before)
        for _ in range(self.after):
            self._weights()
            self._back(0, is_whole=False)
        while self.later:
            self._weights()
        return self.pieces

    def _do(self, kind: str, round_: int) -> Piece:
        piece = Piece(kind, self.stages[round_], self.count[kind, round_])
        self.count[kind, round_] += 1
        self.pieces.append(piece)
        return piece

    def _back(self, round_: int, is_whole: bool = True) -> None:
        """Do a backward, and the gradients of its weights, if it `is_whole`."""
        piece = self._do("B", round_)
        self.later.append(Piece("W", piece.stage, piece.microbatch))
        if is_whole:
            self.pieces.append(self.later.pop())

    def _weights(self) -> None:
        if self.later:
            self.pieces.append(self.later.popleft())
