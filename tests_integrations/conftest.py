"""Tests with the libraries themselves, in an environment of their own: make test-integrations."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("TORCHGSPMD_CACHE", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # as torchrun has it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distributed(*meshes): runs on processes")
    config.addinivalue_line("markers", "xdist_group(name): one worker runs all of the group")
