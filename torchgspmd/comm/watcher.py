"""Watcher: which rank has died, raised, left or is late, for the error of those that wait for it.

One thread per process wakes four times a second. It looks where the other threads are
(places.py), and tells its neighbors (peers.py). A step sends its number to two neighbors.
When a process ends its connections close: the other threads end their waits, and `run` turns the
error that this is into a RankError (rank_failure.py).

A rank that lives and does not come is a straggler. After some seconds it gets a line on stderr, and
after the process groups' time limit (parallelize's `timeout`) the error.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch.distributed as dist

from ..compat.private_apis import _get_default_store, is_missing
from ..errors import RankError, user_line_of
from . import places
from .json_rows import from_row
from .peers import Message, Peers
from .places import stack_of_main
from .rank_failure import ANSWER, TICK, Answer, Fate, Status, Stragglers, apart, failure, merged
from .roll_call import RollCall, RollCallEnded
from .termination import TERMINATION, end_waits

VERDICT = 4.0  # Seconds to wait for word of a rank whose connection has closed.
SETTLE = 0.4  # Seconds from the first such word to the error: others may have died, too.
LINGER = 5.0  # Seconds after destroy_process_group in which a rank may say that it raised.
RAISE = 1.0  # Seconds from word that a rank has left to the error: it may say that it raised.
CALLS = 16  # calls since all ranks have met that a status tells


class Watcher:
    """One rank's activity in a mesh, its thread, and the errors for waits that ended.

    step, phase, program: written by the programs that run. processes: the mesh's, as ranks in the
    world.
    """

    def __init__(self, processes: Sequence[int], limit: float, is_fake: bool = False) -> None:
        self.step, self.phase, self.program, self.raised = 0, "", "", ""
        self._raised_in = -1  # the last step in which a call of this rank raised
        self.looks = self.waits = 0  # how often the thread has looked, and found a wait
        self.processes, self.rank, self.limit = list(processes), dist.get_rank(), limit
        self.world = dist.group.WORLD
        self.fates: dict[int, Fate] = {}
        self.has_failed = False  # whether one of the fates is final
        self._news = threading.Condition()
        self._marks: dict[int, Status] = {}  # of the ranks beside this one: exact steps
        self._seen: dict[int, Status] = {}  # of the same, with places
        self._told, self._failed_at, self._over_since = Status(), 0.0, 0.0
        self._apart_since = 0.0  # when no rank was known to make another call
        self._is_closed = self._has_given_up = False
        # How often all ranks have met; calls begun since then, and the last of these. One tuple,
        # since another thread reads it.
        self._calls: tuple[int, int, tuple[str, ...]] = 0, 0, ()
        self._row = ""  # this rank's in the last roll call
        self._peers: Peers | None = None
        self._roll_call: RollCall | None = None
        if len(self.processes) > 1 and not is_fake and not is_missing(_get_default_store):
            # A clone has a connection of its own: the thread may not share that of the main thread.
            key = f"torchgspmd.{zlib.crc32(str(self.processes).encode())}."
            stores = [_get_default_store().clone() for _ in range(2)]
            at = self.processes, self.rank
            self._roll_call = RollCall(f"{key}roll_call.", *at, stores[0])
            self._peers = Peers(f"{key}peers.", *at, stores[1], self._handle)
            self._stragglers = Stragglers(self.rank, self.processes)
            TERMINATION.hold(self)
            self._peers.listen_to(TERMINATION.file)
            # A daemon: a process whose main thread ends must not stay for its watcher.
            self._thread = threading.Thread(target=self._watch, args=(self._peers,), daemon=True)
            self._thread.start()
            atexit.register(self.close)
            # Processes of multiprocessing end by os._exit, which runs no atexit.
            multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    def watch(self, function: object) -> str:
        """Return a name for a program, by which its code leads to its nodes while it lives."""
        return places.watch(function)

    def begin(self, program: str, phase: str, call: str = "") -> None:
        """Note that a program begins, by its name. Raise RankError if another rank has failed.

        call: its name, if it communicates.
        """
        if self.has_failed:
            self._give_up()
        self.program, self.phase, self.raised = program, phase, ""
        if call:
            self.note(call)
        if self._peers is not None:
            self._peers.mark(kind="step", step=self.step, phase=phase)

    def note(self, call: str) -> None:
        """Note that a call begins which all ranks make."""
        met, begun, calls = self._calls
        self._calls = met, begun + 1, (*calls[1 - CALLS :], call)

    def now(self) -> Status:
        """Return this rank's step, phase and calls."""
        met, begun, calls = self._calls
        return Status(self.step, self.phase, raised=self.raised, met=met, calls=calls, begun=begun)

    def call(self, row: object) -> None:
        """Begin a roll call: send a row, which JSON has, to all ranks."""
        self._row = json.dumps(row)
        if self._roll_call is not None:
            self._roll_call.limit = self.limit
            self.run(self._roll_call.begin, self._row)

    def answers(self) -> list[Any]:
        """Wait for the rows of all ranks, in the order of the mesh."""
        return [json.loads(row) for row in self.texts()]

    def texts(self) -> list[str]:
        """Wait for the rows of all ranks, as texts; mostly all are equal."""
        if self._roll_call is None:
            return [self._row] * len(self.processes)
        texts = self.run(self._roll_call.finish)
        self.end_comparison()
        return texts

    def end_comparison(self) -> None:
        """Note that all ranks have met."""
        self._calls = self._calls[0] + 1, 0, ()

    # ------------------------------------------------------------------------------- the thread

    def _watch(self, peers: Peers) -> None:
        try:
            self._turn_until_closed(peers)
        finally:
            TERMINATION.release(self)

    def _turn_until_closed(self, peers: Peers) -> None:
        while not self._is_closed:
            try:
                peers.turn(TICK if peers.is_complete else TICK / 10)
                TERMINATION.decide(self.has_failed)
                # A new process group is another job: this thread tells its end and closes.
                if dist.group.WORLD is self.world:
                    self._look(peers)
                else:
                    if not self._over_since:
                        self._end(None)
                        self._over_since = time.monotonic()
                    if time.monotonic() > self._over_since + LINGER:
                        self.close()
            except (RuntimeError, AttributeError):  # The process group has ended meanwhile.
                continue

    def _look(self, peers: Peers) -> None:
        """Tell the neighbors where this rank is; ask all ranks if it has waited for long."""
        status, place = places.status(self.now, self.program)
        self.looks, self.waits = self.looks + 1, self.waits + bool(status.waits_in)
        if status != self._told:
            self._told = status
            peers.mark(kind="status", status=asdict(status))
        self._judge_left()
        if self.has_failed:
            self._end_waits()
            return
        if self._has_given_up:
            return
        if self._stragglers.has_to_ask(status, place, self.limit):
            self._answer(asks=True)
        self._judge_raised(status)
        self._judge_apart(status)
        if text := self._stragglers.report(status, self.limit):
            print(text, file=sys.stderr, flush=True)

    def _judge_left(self) -> None:
        """End the waits for a rank that has left before a step that this one has begun."""
        # A copy, since another thread may add one.
        for fate in [*self.fates.values()]:
            if fate.kind == "left" and fate.status.step < self.step:
                self._fail(fate)

    def _judge_raised(self, status: Status) -> None:
        """Take a call's exception for the end of a rank that does not come any more.

        Where this rank's call raised too, all have caught it, and the other may still come.
        """
        if self._raised_in == self.step:
            return
        for answer in self._stragglers.late(status).values():
            if answer.status.raised and answer.status.step == self.step:
                now = replace(answer.status, at="")
                self._tell(Fate(answer.rank, answer.host, "raised", now, text=now.raised))

    def _judge_apart(self, status: Status) -> None:
        """End the waits of all if a rank has begun another call than this one."""
        answers, now = self._stragglers.fresh(), time.monotonic()
        pairs = {rank: status.other_call(each.status) for rank, each in answers.items()}
        other = next(filter(None, pairs.values()), None)
        if other is None:
            self._apart_since = now
        # An answer that is on its way tells where one more rank is.
        elif len(answers) == len(self.processes) - 1 or now > self._apart_since + ANSWER / 2:
            made = {self.rank: (other[0], status.step, f", {status.phase} at {status.at}")}
            for rank, pair in pairs.items():
                there = answers[rank].status
                name = (pair or other[:1])[-1]
                made[rank] = name, there.step, f", {there.phase} at {there.at}"
            what, why = apart(made)
            host = socket.gethostname()
            self._tell(Fate(self.rank, host, "apart", status, why, what, by=self.rank))

    # ----------------------------------------------------------------------------- the messages

    def _handle(self, message: Message) -> None:
        kind, rank = message["kind"], message["rank"] if "rank" in message else -1
        if kind == "step":
            self._marks[rank] = Status(int(message["step"]), str(message["phase"]))
        elif kind == "status":
            self._seen[rank] = self._marks[rank] = from_row(Status, message["status"])
        elif kind == "fate":
            self._learn(from_row(Fate, message["row"]))
        elif kind in ("closed", "lost"):
            self._has_closed(rank, "died" if kind == "closed" else "lost")
        elif kind == "ask":
            self._answer()
        elif kind == "answer":
            with self._news:
                self._stragglers.take(from_row(Answer, message["row"]))
                self._news.notify_all()

    def _has_closed(self, rank: int, kind: str) -> None:
        """Tell all ranks that one has died or is lost, unless it has said farewell.

        Among those that have lost it, the two beside it know its last step.
        """
        known, peers = self.fates.get(rank), self._peers
        if peers is None or known is not None and known.kind not in ("died", "lost"):
            return
        host, seen = peers.hosts.get(rank, "unknown"), self._seen.get(rank)
        status = replace(self._marks.get(rank, Status()), raised="")
        # A place of an earlier phase would contradict the status.
        text = seen.text("was") if seen and seen.moment == status.moment else ""
        fate = Fate(rank, host, kind, status, text, by=self.rank)
        if merged(known, fate) is fate:
            self._tell(fate)

    def _tell(self, fate: Fate) -> None:
        if self._peers is not None:
            self._peers.tell(kind="fate", row=asdict(fate))
        self._learn(fate)

    def _learn(self, fate: Fate) -> None:
        with self._news:
            is_news = fate.rank not in self.fates
            self.fates[fate.rank] = merged(self.fates.get(fate.rank), fate)
            self._news.notify_all()
        if fate.is_final:
            self._fail(fate, is_news)

    def _fail(self, fate: Fate, is_news: bool = False) -> None:
        if is_news and fate.rank != self.rank and fate.kind in ("died", "lost", "raised"):
            print(f"torchgspmd: {fate}", file=sys.stderr, flush=True)
        self.has_failed, self._failed_at = True, self._failed_at or time.monotonic()
        self._end_waits()

    def _end_waits(self) -> None:
        if self._roll_call is not None:
            self._roll_call.end()
        end_waits()

    def _answer(self, asks: bool = False) -> None:
        """Tell all ranks where this one is; asks: and let them tell the same."""
        if (peers := self._peers) is not None:
            if asks:
                peers.tell(kind="ask")
            status, _ = places.status(self.now, self.program)
            beside = {
                str(rank): {"host": peers.hosts.get(rank, "unknown"), "status": asdict(seen)}
                for rank, seen in self._seen.items()
            }
            share = self._stragglers.share
            answer = Answer(self.rank, peers.host, status, share, stack_of_main(), beside)
            self._stragglers.take(answer)
            peers.tell(kind="answer", row=asdict(answer))

    # ------------------------------------------------------------------------------- the errors

    def run(self, function: Callable, *args: object, **options: object) -> Any:
        """Call a function. Raise RankError for a wait that ended, or if another rank has failed."""
        if self.has_failed:
            self._give_up()
        try:
            return function(*args, **options)
        except RankError:
            raise
        except Exception as error:
            self.explain(error)
            if self.phase in ("forward", "backward"):
                self.raised, self._raised_in = _named(error), self.step
            raise

    def explain(self, error: BaseException) -> None:
        """Raise a RankError if the error is from a wait that ended; else return."""
        text = str(error)
        if not isinstance(error, RuntimeError) or self._peers is None:
            return
        # gloo's errors are plain RuntimeErrors, known by their text alone.
        if not isinstance(error, (dist.DistError, RollCallEnded)) and "gloo/" not in text:
            return
        status, what = places.status_of_error(self.now(), self.program, error), ""
        self._has_given_up = True
        if ("imed out" in text or "imeout" in text) and not self.has_failed:
            what = f"rank {self.rank} has waited {self.limit:g} s for another rank"
            self._blame_late(status)
        else:
            with self._news:
                # A broken connection is seen before the news of who has died.
                self._news.wait_for(lambda: bool(self.fates), VERDICT)
                self._news.wait_for(lambda: self.has_failed, RAISE)
        error_of_ranks = self.failure(status, what)
        self._end(error_of_ranks)
        raise error_of_ranks from error

    def _give_up(self) -> NoReturn:
        """Raise the error that names the ranks that have failed, and tell it to all ranks."""
        error = self.failure()
        self._end(error)  # else this rank would have left, as one does that takes fewer steps
        raise error

    def failure(self, status: Status | None = None, what: str = "") -> RankError:
        """Return the error that names the ranks that have failed. status: this rank's."""
        if status is None:
            status, _ = places.status(self.now, self.program)
        # Several ranks often die together: one error shall name all of them.
        time.sleep(max(0.0, self._failed_at + SETTLE - time.monotonic()))
        return failure(self.rank, status, self.fates.values(), what)

    def _blame_late(self, status: Status) -> None:
        """Tell all ranks for whom this one has waited, after the time limit."""
        self._answer(asks=True)
        others = {*self.processes} - {self.rank}
        with self._news:
            self._news.wait_for(lambda: others <= {*self._stragglers.fresh()}, ANSWER)
        for rank, answer in self._stragglers.late(status, with_silent=True).items():
            silent = (
                "" if answer.stack else "does not answer: it was stopped, or keeps Python's lock; "
            )
            seen, wait = silent + answer.status.text("is"), f"{self.limit:g} s"
            fate = Fate(rank, answer.host, "stuck", answer.status, by=self.rank, stack=answer.stack)
            self._tell(replace(fate, seen=seen, text=wait))

    def _end(self, error: BaseException | None) -> None:
        """Tell all ranks that this one ends: by an exception, or as it should."""
        peers, known = self._peers, self.fates.get(self.rank)
        if peers is None or known is not None and (known.kind != "left" or error is None):
            return
        kind = "left" if error is None else "raised"
        kind = "ended" if isinstance(error, RankError) else kind
        text = _named(error) if error is not None else ""
        self._tell(Fate(self.rank, peers.host, kind, self.now(), text=text, by=self.rank))

    def close(self) -> None:
        """Say farewell, and end the thread: one that waits while Python ends may abort it."""
        if self._is_closed:
            return
        self._end(_in_flight())
        self._is_closed = True
        if self._peers is not None:
            self._peers.wake()
            if threading.current_thread() is not self._thread:
                # Not for ever: the thread may wait for the lock that this one has.
                self._thread.join(1.0)
            self._peers.close()
        if self._roll_call is not None:
            self._roll_call.close()


def _in_flight() -> BaseException | None:
    """Return the exception that ends this process; None if none does.

    multiprocessing catches it, and ends by SystemExit.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    while isinstance(error, SystemExit):
        error = error.__context__
    return error


def _named(error: BaseException) -> str:
    line, at = str(error).partition("\n")[0][:300], user_line_of(error)
    return f"{type(error).__name__}: {line}" + (f" at {at}" if at else "")
