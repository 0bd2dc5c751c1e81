"""XLA with 8 virtual devices on the CPU, started before anything runs a backward."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}  # compiles in a quarter of the time
os.environ.update(ENVIRONMENT)
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples"), str(Path(__file__).parent)]


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # of xdist, the process that runs no test
    from torchgspmd import Mesh
    from torchgspmd.xla_backend.runtime import start

    start(Mesh(data=4, model=2))
