"""Sources: printed, read and written; retraces."""

import collections
import contextvars
import math

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.capture import State, capture
from torchgspmd.capture import trace as tracing
from torchgspmd.capture.state.source import ABSENT, ARGUMENTS, Attribute, Source

Pair = collections.namedtuple("Pair", "one other")


class Slotted:
    __slots__ = ("gain",)
    calls = 3


def cell_of(n):
    return (lambda: n).__closure__[0]


net = nn.Linear(2, 2)
net.caches = [{"keys": 5}, Pair(1, (2, 3))]
slotted = Slotted()
slotted.gain = 1.0
mode = contextvars.ContextVar("mode")
mode.set(0)
SOURCES = {
    "self.caches": Source(net, (Attribute("caches"),)),
    "self.caches[0]['keys']": Source(net, (Attribute("caches"), 0, "keys")),
    "self.caches[1][1][0]": Source(net, (Attribute("caches"), 1, 1, 0)),
    "Slotted.gain": Source(slotted, (Attribute("gain"),)),
    "Slotted.calls": Source(Slotted, (Attribute("calls"),)),
    "global math.pi": Source(math.__dict__, ("pi",)),
    "closure cell n": Source(cell_of(7), (Attribute("n"),)),
    "context variable mode": Source(mode, (Attribute("mode"),)),
}


@pytest.mark.parametrize("text", SOURCES)
def test_a_source_prints_reads_and_writes(text):
    source = SOURCES[text]
    before = source.read()
    assert str(source) == text and before is not ABSENT and source.reader()() is before
    assert source == Source(source.root, source.steps)
    source.write("new")
    assert source.read() == source.reader()() == "new"
    source.write(before)
    assert source.read() == before


def test_a_source_of_a_submodule_and_of_arguments():
    model = nn.Sequential(net)
    names = {id(m): f"self.{name}" for name, m in model.named_modules()}
    assert SOURCES["self.caches"].text(names) == "self.0.caches"
    source = Source(ARGUMENTS, (0, 1, "x"))
    arguments = (torch.ones(1), {"x": 4}), {}
    assert str(source) == "args[1]['x']" and source.read(arguments) == 4
    source.write(5, arguments)
    assert source.read(arguments) == 5


def test_what_is_not_there():
    for source in (
        Source(net, (Attribute("absent"),)),
        Source(net, (Attribute("caches"), 9)),
        Source(net, (Attribute("caches"), 0, "absent", "further")),
        Source(Slotted(), (Attribute("gain"),)),
        Source(collections.defaultdict(int), ("absent",)),
    ):
        assert source.read() is ABSENT and source.reader()() is ABSENT
    entries = {"a": 1}
    Source(entries, ("a",)).write(ABSENT)
    Source(entries, ("a",)).write(ABSENT)
    assert entries == {}


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("limit", torch.tensor(3))

    def forward(self, x):
        self.calls += 1
        if len(x) > 4:
            raise KeyError("a batch that is too long")
        return x * self.calls


def test_an_error_of_the_program_passes_and_changes_nothing():
    """Even of a trace with symbolic numbers, which is repeated without them."""
    module, state, mesh = Counts(), State(), gspmd.Mesh(data=2)
    for _ in range(2):
        capture(module, (torch.ones(4),), {}, mesh, state=state)
    assert state.counted
    with pytest.raises(KeyError, match="too long"):
        capture(module, (torch.ones(6),), {}, mesh, state=state)
    assert state.is_counting and not state.is_looking and module.calls == 0


def test_a_trace_is_not_repeated_for_ever(monkeypatch):
    monkeypatch.setattr(tracing, "MOST_RETRACES", 1)
    with pytest.raises(
        gspmd.ShardingError, match=r"(?s)traced 1 times.*the last reason: the program writes self.c"
    ):
        capture(Counts(), (torch.ones(4),), {}, gspmd.Mesh(data=2))
