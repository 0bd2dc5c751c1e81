"""Parameters of wrapped modules in training loops for one device, on real gloo processes: see
worker_dtensors.py.
"""

from pathlib import Path

import pytest
from test_parallelize import launch

WORKER = Path(__file__).with_name("worker_dtensors.py")


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_loops_for_one_device_do_the_same(mesh):
    assert launch(mesh, worker=WORKER).count(f"holds on {mesh}") == 9
