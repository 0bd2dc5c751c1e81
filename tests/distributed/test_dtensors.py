"""Parameters of wrapped modules in training loops for one device, on real gloo processes: see
worker_dtensors.py.
"""

import pytest
from helpers import launch


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_loops_for_one_device_do_the_same(mesh):
    assert launch(mesh, worker="dtensors").count(f"holds on {mesh}") == 9
