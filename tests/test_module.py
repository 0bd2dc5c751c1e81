"""Wrapped modules in users' hands, on real gloo processes: see worker_module.py for what is compared."""
from pathlib import Path

import pytest
from test_parallelize import launch

WORKER = Path(__file__).with_name("worker_module.py")


@pytest.mark.parametrize("mesh", ["model=3", "data=2,model=2"])
def test_a_wrapped_module_is_used_as_the_model(mesh):
    assert launch(mesh, worker=WORKER).count(f"holds on {mesh}") == 14
