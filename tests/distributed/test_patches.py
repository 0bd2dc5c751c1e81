"""The patches of torch's DTensor, on real gloo processes: see worker_patches.py."""

import pytest
from helpers import launch


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_torch_is_patched_while_a_wrapped_module_lives_and_for_its_tensors_only(mesh):
    assert launch(mesh, worker="patches").count(f"holds on {mesh}") == 2
