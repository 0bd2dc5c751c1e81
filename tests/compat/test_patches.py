"""Patches as rows: applied in order, undone in reverse."""

import pytest

from torchgspmd.compat.patches import ABSENT, Patch, apply


class Base:
    flag, inherited = False, 1


class Owner(Base):
    own = 2


def test_patches_are_undone_in_reverse():
    entries = {"there": 3}
    rows = [
        Patch(Owner, "own", lambda before: before + 10, "an attribute"),
        Patch(Owner, "own", lambda before: before + 10, "once more"),
        Patch(Owner, "inherited", lambda before: before + 10, "what the owner has not itself"),
        Patch(entries, "there", lambda before: before + 10, "an entry"),
        Patch(entries, "new", lambda before: before, "no entry"),
        Patch(Owner, "of_instances", lambda before: before, "what the class has not"),
        Patch(Owner, "flag", lambda before: True, "for another torch", ()),
    ]
    with apply(rows):
        assert (Owner.own, Owner.inherited, Base.inherited, Owner.flag) == (22, 11, 1, False)
        assert entries == {"there": 13, "new": None}
        assert Owner.of_instances is None
    assert (
        Owner.own == 2 and rows[2].value() is rows[5].value() is ABSENT and entries == {"there": 3}
    )
    with apply(rows):
        Owner.own = "of someone else"
    assert Owner.own == "of someone else"
    Owner.own = 2
    with pytest.raises(TypeError):
        apply([*rows[:3], Patch(Owner, "own", lambda before: before + "", "fails")])
    assert Owner.own == 2 and Owner.inherited == 1
