"""Reach and Window: which rows are read, by whom they are held, what is sent; against a count row
by row.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgspmd import Mesh, ShardSpec
from torchgspmd.layout.halo_window import Reach, Window, sent_rows


def convolution(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Reach:
    return Reach(-padding, dilation * (kernel - 1) - padding, stride, fill=0.0)


def rows_read(reach: Reach, position: int, size: int) -> set[int]:
    found = {
        r
        for r in range(-99, 99)
        if reach.low <= reach.every * r - reach.stride * position <= reach.high
    }
    return {r % size for r in found} if reach.wrap else {r for r in found if 0 <= r < size}


CASES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 8),
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(CASES)
def test_a_window_holds_all_rows_that_its_positions_read(case):
    kernel, stride, padding, dilation, inverse, positions, size, count = case
    reach = convolution(kernel, stride, padding, dilation)
    check(reach.inverse() if inverse else reach, positions, size, count)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.integers(-30, 30),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from(["flip", "roll", "slice"]),
)
def test_flips_rolls_and_slices(shift, size, count, kind):
    reach = {
        "flip": Reach(size - 1, size - 1, -1),
        "roll": Reach(-shift, -shift, wrap=True),
        "slice": Reach(abs(shift), abs(shift), 3),
    }[kind]
    check(reach, max(1, size - abs(shift) if kind == "slice" else size), size, count)


def check(reach: Reach, positions: int, size: int, count: int) -> None:
    window, block, rows = (
        reach.bind(positions, size, count),
        -(-positions // count),
        -(-size // count),
    )
    sent = [0] * count
    for device in range(count):
        pieces = list(window.pieces(device, size, count))
        held = {}
        for owner, row, place, length in pieces:
            assert (
                length > 0
                and 0 <= row
                and row + length <= rows
                and 0 <= place
                and place + length <= window.length
            )
            held.update({place + i: owner * rows + row + i for i in range(length)})
            sent[owner] += length * (owner != device)
        assert len(held) == sum(length for *_, length in pieces)  # no place twice
        mine = range(device * block, min((device + 1) * block, positions))
        wanted = set().union(*(rows_read(reach, p, size) for p in mine))
        assert wanted <= set(held.values())
        places = {window.first(device) + place: row for place, row in held.items()}
        assert all(
            (row - place) % size == 0 if reach.wrap else row == place
            for place, row in places.items()
        )
    assert sent_rows(window, size, count) == max(sent)
    if window.is_block(size, count):
        assert max(sent) == 0
    assert Window.parse(str(window)) == window
    assert reach.inverse(reach.fill).inverse(reach.fill) == reach


@pytest.mark.parametrize(
    "reach, positions, size, count, text, sent",
    [
        (convolution(7, 2, 3), 112, 224, 2, "112i-3:+117 in 0:224 else 0", 3),
        (convolution(3, 2), 3, 6, 2, "4i:+5 in 0:6 else 0", 2),
        (convolution(4, 2, 3), 5, 9, 5, "2i-3:+4 in 0:9 else 0", 3),
        (convolution(5, 3, 2), 2, 4, 2, "3i-2:+5 in 0:4 else 0", 1),
        (convolution(3, 1, 1), 64, 64, 8, "8i-1:+10 in 0:64 else 0", 2),
        (convolution(3, 2, 1).inverse(0.0), 64, 32, 8, "(8i)/2:+5 in 0:32 else 0", 1),
        (convolution(2, 2).inverse(0.0), 64, 32, 8, "(8i)/2:+4 in 0:32 else 0", 0),
        (Reach(63, 63, -1), 64, 64, 4, "-16i+48:+16 in 0:64", 16),
        (Reach(-5, -5, wrap=True), 64, 64, 4, "16i-5:+16 in -5:59 wrap 64", 5),
        (Reach(1, 1, 2), 32, 64, 4, "16i+1:+15 in 1:64", 0),
    ],
)
def test_text_and_bytes(reach, positions, size, count, text, sent):
    """The first four are windows that GSPMD's sources compute the halos of."""
    window = reach.bind(positions, size, count)
    assert str(window) == text
    assert sent_rows(window, size, count) == sent


def test_printed_as_a_slice():
    assert [
        str(r)
        for r in (
            convolution(3, 2, 1),
            convolution(3, 1, 1),
            Reach(4, 4),
            Reach(9, 9, -1),
            convolution(3, 2, 1).inverse(),
        )
    ] == ["[2p-1:2p+2]", "[p-1:p+2]", "[p+4:p+5]", "[-p+9:-p+10]", "[p-1:p+2/2]"]


def test_a_layout_with_windows():
    window = convolution(3, 1, 1).bind(64, 64, 8)
    spec = ShardSpec.parse("_ s").with_window(1, window)
    assert (
        str(spec) == "_ s[8i-1:+10 in 0:64 else 0]"
        and ShardSpec.parse(str(spec)) == spec != spec.plain()
    )
    assert spec.local_shape((4, 64), Mesh(s=8)) == (4, 10)
    assert spec.with_window(1, None) == spec.plain() == ShardSpec.parse("_ s")


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(-5, 5),
    st.integers(4, 20),
    st.integers(2, 8),
    st.sampled_from(["flip", "roll", "pad"]),
)
def test_windows_of_moved_rows(kernel, stride, padding, shift, size, count, kind):
    """A convolution of flipped, rolled or padded rows reads windows of the rows themselves."""
    moved = {
        "flip": Reach(size - 1, size - 1, -1),
        "roll": Reach(shift, shift, wrap=True),
        "pad": Reach(shift, shift, fill=0.0),
    }[kind]
    middle = size + 2 if kind == "pad" else size
    positions = (middle + 2 * padding - kernel) // stride + 1
    if positions < 1:
        return
    outer = convolution(kernel, stride, padding).bind(positions, middle, count)
    inner = moved.through(outer, size)
    assert inner.length == outer.length and inner.fill == 0.0

    def rows(window, size, device):
        pieces = window.pieces(device, size, count)
        return {
            place + k: owner * -(-size // count) + row + k
            for owner, row, place, n in pieces
            for k in range(n)
        }

    for device in range(count):
        want = {
            place: next(iter(rows_read(moved, row, size)), None)
            for place, row in rows(outer, middle, device).items()
        }
        got = rows(inner, size, device)
        got = (
            {inner.length - 1 - place: row for place, row in got.items()} if kind == "flip" else got
        )
        assert got == {place: row for place, row in want.items() if row is not None}
