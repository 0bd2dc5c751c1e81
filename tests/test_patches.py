"""The table of patches of torch: applied, undone, and without effect on others' tensors."""

from pathlib import Path

import pytest
from test_parallelize import launch

from torchgspmd.compat.patches import ABSENT, Patch, apply

WORKER = Path(__file__).with_name("worker_patches.py")


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_torch_is_patched_while_a_wrapped_module_lives_and_for_its_tensors_only(mesh):
    assert launch(mesh, worker=WORKER).count(f"holds on {mesh}") == 2


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
        Patch(Owner, "gone", lambda before: 1, "what no torch has"),
        Patch(Owner, "flag", lambda before: True, "for another torch", ()),
    ]
    with apply(rows):
        assert (Owner.own, Owner.inherited, Base.inherited, Owner.flag) == (22, 11, 1, False)
        assert entries == {"there": 13, "new": None}
        assert not hasattr(Owner, "gone")
    assert Owner.own == 2 and rows[2].value() is ABSENT and entries == {"there": 3}
    with apply(rows):
        Owner.own = "of someone else"
    assert Owner.own == "of someone else"
    Owner.own = 2
    with pytest.raises(TypeError):
        apply([*rows[:3], Patch(Owner, "own", lambda before: before + "", "fails")])
    assert Owner.own == 2 and Owner.inherited == 1
