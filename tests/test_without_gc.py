"""The garbage collector while planning: off, and afterwards as it was."""

import gc

import pytest
import torch

import torchgspmd as gspmd

MESH = gspmd.Mesh(data=2)


class Inside(Exception):
    pass


def tells(x):
    raise Inside(gc.isenabled())


@pytest.mark.parametrize("program", [torch.neg, tells])
@pytest.mark.parametrize("enabled", [True, False])
def test_planning_does_without_it_and_leaves_it_as_it_was(program, enabled):
    try:
        if not enabled:
            gc.disable()
        gspmd.plan(program, torch.randn(4), mesh=MESH)
    except Inside as inside:
        assert inside.args == (False,)
    else:
        assert program is torch.neg
    finally:
        after = gc.isenabled()
        gc.enable()
    assert after == enabled
