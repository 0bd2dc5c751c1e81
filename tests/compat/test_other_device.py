"""Plans on a device that PyTorch knows by registration alone."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

REGISTRATION = importlib.import_module("torch.utils.backend_registration")


@pytest.mark.skipif(
    not hasattr(REGISTRATION, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are written in Python",
)
def test_a_plan_on_a_registered_device_is_the_cpus() -> None:
    """In a process of its own: a process has one such device."""
    script = Path(__file__).with_name("other_device.py")
    subprocess.run([sys.executable, str(script)], check=True, timeout=300)
